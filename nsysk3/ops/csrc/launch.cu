// The shared library that cuda.py loads: plain C functions on device pointers.
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC -o libk3.so launch.cu
#include <cuda_runtime.h>

#include "prims.cuh"
#include "copy.cuh"
#include "ring.cuh"

using namespace k3;

namespace k3 {

template <int MW, int SW, int R, int NL, int NR, int NP, Remote MODE, bool GATHER>
int launch(const RingParams& p, int grid, cudaStream_t s) {
  using K = Ring<MW, SW, R, NL, NR, NP, MODE, GATHER>;
  constexpr int bytes = (int)sizeof(typename K::Smem);
  static_assert(bytes <= 227 * 1024, "shared memory of one SM");
  auto kernel = rs_attn_res<MW, SW, R, NL, NR, NP, MODE, GATHER>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return (int)e;
  kernel<<<grid, K::kThreads, bytes, s>>>(p);
  return (int)cudaGetLastError();
}

}  // namespace k3

extern "C" int k3_abi_ring() { return (int)sizeof(RingParams); }

// kind: 0 rows of this GPU only, 1 pull from peers, 2 push to peers, 3 gather
extern "C" int k3_ring(const RingParams* p, int grid, int kind, int variant, cudaStream_t s) {
  switch (kind * 10 + variant) {
    case 0: return launch<7, 7, 2, 13, 0, 0, kNone, false>(*p, grid, s);
    case 1: return launch<7, 4, 4, 13, 0, 0, kNone, false>(*p, grid, s);  // many tokens, several bank rows
    case 10: return launch<7, 7, 2, 9, 4, 0, kPull, false>(*p, grid, s);
    case 20: return launch<7, 4, 2, 7, 3, 3, kPush, false>(*p, grid, s);
    case 30: return launch<7, 7, 2, 13, 0, 0, kNone, true>(*p, grid, s);
    default: return (int)cudaErrorInvalidValue;
  }
}

namespace k3 {

// Where a function is in the driver; null where it has none.
void* driver(const char* name) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found);
  return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? f : nullptr;
}

}  // namespace k3

// One word, after everything before it in the stream, by the stream's front end: no kernel, no room on an SM.
extern "C" int k3_write_value(uint32_t* word, uint32_t value, cudaStream_t s) {
  using Write = int (*)(cudaStream_t, unsigned long long, uint32_t, unsigned);
  static const auto write = (Write)driver("cuStreamWriteValue32");
  if (!write) return (int)cudaErrorNotSupported;
  return write(s, (unsigned long long)word, value, 0) ? (int)cudaErrorUnknown : 0;
}

// By a copy engine, to any mapped address.
extern "C" int k3_memcpy(void* dst, const void* src, long long bytes, cudaStream_t s) {
  return (int)cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, s);
}

// Ceilings, for the benchmark: see copy.cuh.
extern "C" int k3_copy(void* dst, const void* src, long long rows, int mode, int grid, cudaStream_t s) {
  constexpr int bytes = sizeof(CopySmem);
  if (mode == 0) {
    copy_words<<<grid, 1024, 0, s>>>((uint4*)dst, (const uint4*)src, rows * kRowVecs);
  } else {
    const cudaError_t e = cudaFuncSetAttribute(copy_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return (int)e;
    copy_bulk<<<grid, 32, bytes, s>>>((char*)dst, (const char*)src, rows, mode);
  }
  return (int)cudaGetLastError();
}

extern "C" const char* k3_error(int code) { return cudaGetErrorString((cudaError_t)code); }
