// g++ -std=c++20 -O1 -fsanitize=alignment -U_FORTIFY_SOURCE -shared -fPIC -I$CUDA/include -I nsysk3/ops/csrc -o libk3emu.so emu.cpp
// The same C functions as launch.cu, but calls only queue; emu_run runs all streams to the end.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __forceinline__
#define __forceinline__ inline
#undef __shared__
#define __shared__

#include "emu_prims.h"
#include "ring.cuh"

using namespace k3;

// -fsanitize=alignment calls this: a GPU refuses what the CPU only does more slowly.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { emu::fail("misaligned address"); }

static void queue(void* stream, std::unique_ptr<emu::Kernel> k) {
  ++emu::world.queued[(uint64_t)stream];
  emu::world.streams[(uint64_t)stream].push_back(std::move(k));
}

template <int MW, int SW, int R, int NL, int NR, int NP, Remote MODE, bool GATHER>
static int ring(const RingParams& p, int grid, void* stream) {
  using K = Ring<MW, SW, R, NL, NR, NP, MODE, GATHER>;
  auto k = std::make_unique<emu::Kernel>();
  k->grid = grid;
  k->threads = K::kThreads;
  k->group_threads = K::kMix;
  k->shared_bytes = sizeof(typename K::Smem);
  k->body = [p](emu::Cta& c) { K::run(p, c.base()); };
  queue(stream, std::move(k));
  return 0;
}

extern "C" int k3_abi_ring() { return (int)sizeof(RingParams); }

// Few warps and short rings: what can go wrong goes wrong sooner.
extern "C" int k3_ring(const RingParams* p, int grid, int kind, int variant, void* s) {
  switch (kind * 10 + variant) {
    case 0: return ring<4, 4, 2, 3, 0, 0, kNone, false>(*p, grid, s);
    case 1: return ring<7, 4, 4, 5, 0, 0, kNone, false>(*p, grid, s);
    case 10: return ring<4, 4, 2, 3, 1, 0, kPull, false>(*p, grid, s);
    case 20: return ring<4, 4, 2, 3, 1, 3, kPush, false>(*p, grid, s);
    case 30: return ring<4, 4, 2, 3, 0, 0, kNone, true>(*p, grid, s);
    default: return 1;
  }
}
static int action(void* stream, std::function<void()> f) {
  auto k = std::make_unique<emu::Kernel>();
  k->action = std::move(f);
  queue(stream, std::move(k));
  return 0;
}
extern "C" int k3_write_value(uint32_t* word, uint32_t value, void* s) { return action(s, [=] { *word = value; }); }
extern "C" int k3_memcpy(void* dst, const void* src, long long bytes, void* s) {
  action(s, [=] { memcpy(dst, src, (size_t)bytes); });
  emu::world.streams[(uint64_t)s].back()->jitter = 30000;
  return 0;
}
extern "C" int k3_copy(void*, const void*, long long, int, int, void*) { return 1; }
extern "C" uint64_t emu_steps() { return emu::world.steps; }
extern "C" void emu_plant(int bug) { emu::planted = bug; }
extern "C" int emu_delay(int steps, void* s) {
  action(s, [] {});
  emu::world.streams[(uint64_t)s].back()->delay = steps;
  return 0;
}
// What is queued behind this waits for what is in the other stream now.
extern "C" int emu_wait(void* s, void* other) {
  const uint64_t id = (uint64_t)other, until = emu::world.queued[id];
  action(s, [] {});
  emu::world.streams[(uint64_t)s].back()->ready = [=] { return emu::world.finished[id] >= until; };
  return 0;
}
extern "C" int emu_call(void (*f)(), void* s) { return action(s, [=] { f(); }); }
extern "C" const char* emu_run(uint64_t seed, uint64_t max_steps) { return emu::run(seed, max_steps); }
extern "C" const char* k3_error(int) { return "refused by the emulator"; }
