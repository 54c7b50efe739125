// prims.cuh and the CUDA built-ins, for the CPU.
#pragma once
#include <cmath>

#include "emu_core.h"

struct EmuIndex { int x; };
#define threadIdx (EmuIndex{emu::world.current->tid})
#define blockIdx (EmuIndex{emu::world.current->cta->index})
#define gridDim (EmuIndex{emu::world.current->cta->kernel->grid})
#define K3_DYN_SMEM(name) char* name = emu::world.current->cta->base()

inline void __syncthreads() { emu::meet(emu::world.current->cta->all); }
inline void __syncwarp() { emu::meet(emu::world.current->cta->warps[emu::world.current->tid >> 5]); }
inline void __threadfence() {}
inline void __threadfence_system() {}
template <class F>
inline F emu_exchange(F v, int from) {
  static_assert(sizeof(F) == 4);
  emu::Cta& c = *emu::world.current->cta;
  const int tid = emu::world.current->tid;
  memcpy(&c.exchange[tid], &v, 4);
  emu::meet(c.warps[tid >> 5]);
  F r;
  memcpy(&r, &c.exchange[(tid & ~31) | from], 4);
  emu::meet(c.warps[tid >> 5]);
  return r;
}
inline float __shfl_xor_sync(unsigned, float v, int o) { return emu_exchange(v, (emu::world.current->tid & 31) ^ o); }
inline float __shfl_sync(unsigned, float v, int lane) { return emu_exchange(v, lane); }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) {
  emu::yield();
  const uint32_t old = *p;
  *p += v;
  return old;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <class T>
inline T __ldg(const T* p) { return *p; }
inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
using std::max;
using std::min;

namespace k3 {

inline void mbar_init(uint64_t* b, uint32_t n) {
  auto& m = emu::mbarrier(b);
  m.count = m.pending = n;
}
inline void mbar_expect(uint64_t* b, uint32_t bytes) { emu::arrive(emu::mbarrier(b), bytes); }
inline void mbar_arrive(uint64_t* b) {
  emu::arrive(emu::mbarrier(b), 0);
  if (emu::draw() % 4 == 0) emu::yield();
}
inline void mbar_wait(uint64_t* b, uint32_t parity) {
  auto& m = emu::mbarrier(b);
  while ((m.phase & 1) == parity) emu::block(&m.phase, m.phase);
}
inline void fence_mbar_init() {}
inline void fence_proxy_async() {}
inline uint64_t policy_evict_first() { return 0; }
inline void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, uint64_t) {
  emu::MBarrier* m = &emu::mbarrier(bar);
  emu::world.copies.push_back({[=] {
    memcpy(dst, src, bytes);
    m->bytes -= bytes;
    emu::check(*m);
  }});
}
inline void bulk_store(void* dst, const void* src, uint32_t bytes) {
  emu::Fiber* f = emu::world.current;
  const size_t group = f->groups.size() - 1;
  ++f->groups[group];
  emu::world.copies.push_back({[=] {
    memcpy(dst, src, bytes);
    --f->groups[group];
  }});
}
inline void bulk_commit() { emu::world.current->groups.push_back(0); }
template <int N>
inline void bulk_wait() {
  emu::Fiber* f = emu::world.current;
  auto waits = [&] {
    for (int g = 0; g + 1 < (int)f->groups.size() - N; ++g)
      if (f->groups[g]) return true;
    return false;
  };
  while (waits()) emu::yield();
}
inline uint32_t ld_acquire_sys(const uint32_t* p) { return *p; }
inline void st_release_sys(uint32_t* p, uint32_t v) {
  emu::yield();
  *p = v;
}
inline long long ticks() { return (long long)emu::world.steps; }
inline void relax() { emu::yield(); }
template <int THREADS>
inline void group_sync() {
  emu::meet(emu::world.current->cta->group);
  if (emu::draw() % 8 == 0) emu::yield();
}

}  // namespace k3
