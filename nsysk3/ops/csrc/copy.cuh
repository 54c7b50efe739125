// Plain copies that say what the memory and the links can do at all.
#pragma once
#include "params.h"

namespace k3 {

// 16-byte loads and stores, 8 in flight a thread.
__global__ void __launch_bounds__(1024) copy_words(uint4* dst, const uint4* src, long long n) {
  constexpr int kDeep = 4;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step * kDeep) {
    uint4 v[kDeep];
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      if (i + k * step < n) v[k] = src[i + k * step];
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      if (i + k * step < n) dst[i + k * step] = v[k];
  }
}

struct CopySmem {
  uint64_t loaded[12];
  alignas(128) uint4 buf[12][kRowVecs];
};

// Whole rows by bulk copies, 12 slots an SM.  mode 1: load and store, 2: load only, 3: store only.
__global__ void __launch_bounds__(32) copy_bulk(char* dst, const char* src, long long rows, int mode) {
  K3_DYN_SMEM(raw);
  CopySmem& S = *reinterpret_cast<CopySmem*>(raw);
  constexpr int kSlots = 12, kAhead = 8;
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kSlots; ++i) mbar_init(&S.loaded[i], 1);
  fence_mbar_init();
  const long long n = rows > blockIdx.x ? (rows - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const uint64_t policy = policy_evict_first();
  auto at = [&](long long i) { return (blockIdx.x + i * gridDim.x) * (long long)kRowBytes; };
  auto load = [&](long long i) {
    const int s = (int)(i % kSlots);
    mbar_expect(&S.loaded[s], kRowBytes);
    bulk_load(S.buf[s], src + at(i), kRowBytes, &S.loaded[s], policy);
  };
  if (mode != 3)
    for (long long i = 0; i < kAhead && i < n; ++i) load(i);
  for (long long i = 0; i < n; ++i) {
    const int s = (int)(i % kSlots);
    if (mode != 3) mbar_wait(&S.loaded[s], (uint32_t)(i / kSlots) & 1);
    if (mode != 2) {
      bulk_store(dst + at(i), S.buf[s], kRowBytes);
      bulk_commit();
      bulk_wait<kSlots - kAhead - 1>();
    }
    if (mode != 3 && i + kAhead < n) load(i + kAhead);
  }
  bulk_wait<0>();
}

}  // namespace k3
