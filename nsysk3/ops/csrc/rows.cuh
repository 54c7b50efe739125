// Arithmetic on a thread's part of a row, and sums over warps.
#pragma once
#include "params.h"

namespace k3 {

__device__ __forceinline__ void unpack(const uint4& v, float* f) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = __uint_as_float(w[i] << 16);
    f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint4 pack8(const float* f) {
  return make_uint4(pack2(f[0], f[1]), pack2(f[2], f[3]), pack2(f[4], f[5]), pack2(f[6], f[7]));
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
// Sums N values over a warp with about N + 5 - log2(N) exchanges instead of 5 N: at every step a lane keeps one half of
// its values and hands the other half over.  Lane l returns the sum of value l / (32 / N).
template <int N>
__device__ __forceinline__ float warp_sums(float (&v)[N], int lane) {
  static_assert(N >= 1 && N <= 32 && (N & (N - 1)) == 0, "a power of two");
  int o = 16;
#pragma unroll
  for (int n = N / 2; n; n >>= 1, o >>= 1) {
    const bool upper = lane & o;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float keep = upper ? v[i + n] : v[i], give = upper ? v[i] : v[i + n];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, o);
    }
  }
#pragma unroll
  for (; o; o >>= 1) v[0] += __shfl_xor_sync(0xffffffffu, v[0], o);
  return v[0];
}

// Spin until the word reaches `target` (epochs only grow; signed distance, so a wrap is harmless).  Bounded: after
// `limit` ticks the error word is set and the kernel goes on, so a peer that never comes costs wrong numbers, not a
// hung device.
__device__ __forceinline__ void wait_ge(const uint32_t* p, uint32_t target, long long limit, uint32_t* error) {
  if ((int32_t)(ld_acquire_sys(p) - target) >= 0) return;
  const long long t0 = ticks();
  while ((int32_t)(ld_acquire_sys(p) - target) < 0) {
    if (ticks() - t0 > limit || *(volatile uint32_t*)error) {
      *(volatile uint32_t*)error = 1;
      break;
    }
    relax();
  }
}

// Waits until row t of every gated source may be read; returns how many rows may be read without asking again.
__device__ __forceinline__ int pass_gates(const uint32_t* const (&gates)[kMaxP], int n, int gate, int t, uint32_t target,
                                          long long limit, uint32_t* error) {
  for (int q = 0; q < n; ++q)
    if (gates[q]) wait_ge(gates[q] + (gate == kGateEach ? t : 0), target, limit, error);
  return gate == kGateEach ? t + 1 : 0x7fffffff;
}

// Called by one thread of every CTA as soon as it has read epoch and base: the last to call moves them on for the next
// kernel of the stream.  Nothing at the end of the kernel is needed for it.
__device__ __forceinline__ void enter(State* s, uint32_t epoch, uint32_t base, uint32_t tokens, uint32_t ctas) {
  __threadfence();
  if (atomicAdd(&s->arrivals, 1u) == ctas - 1) {
    s->arrivals = 0;
    s->epoch = epoch;
    s->base = base + tokens;
  }
}

}  // namespace k3
