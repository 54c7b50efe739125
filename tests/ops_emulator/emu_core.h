// A CPU stand-in for the parts of a GPU that the kernels in nsysk3/ops/csrc use.  Every CUDA thread is a fiber; a
// seeded scheduler runs them in a random order and performs asynchronous copies late and out of order, so a missing
// wait shows as a wrong number, every time for the same seed.  Streams keep their order; different streams interleave.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace emu {

struct Cta;
struct Kernel;

struct Fiber {
  jmp_buf at;
  ucontext_t start;
  char* stack = nullptr;
  bool started = false, done = false;
  const uint64_t* blocked_on = nullptr;  // runnable again when this differs from `seen`
  uint64_t seen = 0;
  Cta* cta = nullptr;
  int tid = 0;
  std::vector<int> groups{0};  // outstanding bulk stores by commit group; the last is open
};

struct Barrier {  // of a fixed number of fibers
  int expected = 0, waiting = 0;
  uint64_t generation = 0;
};

struct MBarrier {
  uint32_t count = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
};

struct Cta {
  Kernel* kernel;
  int index;
  std::vector<char> shared;
  std::map<const void*, MBarrier> mbarriers;
  Barrier all, group;
  std::vector<Barrier> warps;
  std::vector<uint32_t> exchange;
  char* base() { return (char*)(((uintptr_t)shared.data() + 1023) & ~uintptr_t(1023)); }
};

struct Kernel {
  std::function<void(Cta&)> body;  // null: `action` alone
  std::function<void()> action;
  std::function<bool()> ready;  // what an action waits for; empty: nothing
  int grid = 0, threads = 0, group_threads = 0;
  int delay = 0, jitter = 0;  // steps before it starts, and up to so many more
  size_t shared_bytes = 0;
  int unfinished = 0;
  bool started = false;
};

struct Copy {
  std::function<void()> perform;
};

struct World {
  std::map<uint64_t, std::deque<std::unique_ptr<Kernel>>> streams;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Copy> copies;
  std::vector<char*> stacks;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  uint64_t random = 1, steps = 0;
  const char* failure = nullptr;
  std::map<uint64_t, uint64_t> queued, finished;  // by stream, over all time
};
inline World world;
inline int planted = 0;  // which of the bugs that a test has put in
constexpr size_t kStack = 64 << 10;

inline uint32_t draw() {
  world.random = world.random * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(world.random >> 33);
}
inline void fail(const char* why) {
  if (!world.failure) world.failure = why;
}
inline void leave() {  // back to the scheduler
  if (_setjmp(world.current->at) == 0) _longjmp(world.scheduler, 1);
}
inline void yield() {
  if (world.current) leave();
}
inline void block(const uint64_t* on, uint64_t seen) {
  world.current->blocked_on = on;
  world.current->seen = seen;
  leave();
}
inline void meet(Barrier& b) {
  const uint64_t generation = b.generation;
  if (++b.waiting == b.expected) {
    b.waiting = 0;
    ++b.generation;
    if (draw() % 4 == 0) yield();
  } else {
    block(&b.generation, generation);
  }
}
inline MBarrier& mbarrier(const void* p) { return world.current->cta->mbarriers[p]; }
inline void check(MBarrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.pending = b.count;
  }
}
inline void arrive(MBarrier& b, int64_t bytes) {
  if (b.pending == 0) return fail("more arrivals than the barrier expects");
  b.bytes += bytes;
  --b.pending;
  check(b);
}

inline void enter_fiber() {
  Fiber* f = world.current;
  f->cta->kernel->body(*f->cta);
  f->done = true;
  Cta& c = *f->cta;
  --c.all.expected;  // threads that have left do not hold up the others
  if (c.all.waiting && c.all.waiting == c.all.expected) { c.all.waiting = 0; ++c.all.generation; }
  if (--c.kernel->unfinished == 0) c.kernel->started = true;
  _longjmp(world.scheduler, 1);
}

inline void start_kernel(Kernel& k) {
  k.started = true;
  if (k.action) k.action();
  k.unfinished = k.body ? k.grid * k.threads : 0;
  for (int b = 0; k.body && b < k.grid; ++b) {
    auto c = std::make_unique<Cta>();
    c->kernel = &k;
    c->index = b;
    c->shared.assign(k.shared_bytes + 1024, (char)0xff);
    c->all.expected = k.threads;
    c->group.expected = k.group_threads;
    c->warps.resize(k.threads / 32);
    for (auto& w : c->warps) w.expected = 32;
    c->exchange.resize(k.threads);
    for (int t = 0; t < k.threads; ++t) {
      auto f = std::make_unique<Fiber>();
      f->cta = c.get();
      f->tid = t;
      if (world.stacks.empty()) {
        f->stack = (char*)mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      } else {
        f->stack = world.stacks.back();
        world.stacks.pop_back();
      }
      world.fibers.push_back(std::move(f));
    }
    world.ctas.push_back(std::move(c));
  }
}

inline void sweep_done() {
  auto& fs = world.fibers;
  for (auto& f : fs)
    if (f->done) world.stacks.push_back(f->stack);
  fs.erase(std::remove_if(fs.begin(), fs.end(), [](auto& f) { return f->done; }), fs.end());
}

inline bool advance_streams() {
  bool moved = false;
  for (auto& [id, queue] : world.streams) {
    if (queue.empty()) continue;
    Kernel& k = *queue.front();
    if (!k.started) {
      if (k.jitter) { k.delay += (int)(draw() % (uint32_t)k.jitter); k.jitter = 0; }
      if (k.delay > 0) { --k.delay; continue; }
      if (k.ready && !k.ready()) continue;
      start_kernel(k);
      moved = true;
    }
    if (k.unfinished == 0) { sweep_done(); queue.pop_front(); ++world.finished[id]; moved = true; }
  }
  return moved;
}

inline void perform_copy() {
  const size_t i = draw() % world.copies.size();
  auto copy = std::move(world.copies[i]);
  world.copies.erase(world.copies.begin() + (long)i);
  copy.perform();
}

// Runs everything that is queued; null, or what went wrong.
inline const char* run(uint64_t seed, uint64_t max_steps) {
  world.random = seed * 2654435761u + 1;
  world.failure = nullptr;
  world.steps = 0;
  static uint64_t idle;
  static size_t hint;  // static: they outlive the jumps
  static Cta* starved;  // a warp that gets no turn for a while, as long as anything else can go on
  static int starved_warp;
  static uint64_t starved_until;
  idle = hint = starved_until = 0;
  for (;;) {
    advance_streams();
    bool empty = true;
    for (auto& [id, queue] : world.streams) empty = empty && queue.empty();
    if ((empty && world.copies.empty()) || world.failure) break;
    if (++world.steps > max_steps) { fail("no end: something waits for ever"); break; }
    if (!world.copies.empty() && draw() % 64 == 0) perform_copy();
    if (world.fibers.empty()) {
      if (!world.copies.empty()) perform_copy();
      continue;
    }
    if (draw() % 8 == 0) hint = draw() % world.fibers.size();
    if (world.steps >= starved_until && draw() % 512 == 0) {
      const Fiber* f = world.fibers[draw() % world.fibers.size()].get();
      starved = f->cta;
      starved_warp = f->tid >> 5;
      starved_until = world.steps + draw() % 16384;
    }
    Fiber* next = nullptr;
    for (int strict = 1; strict >= 0 && !next; --strict)
      for (size_t n = 0; n < world.fibers.size(); ++n) {
        hint = hint + 1 < world.fibers.size() ? hint + 1 : 0;
        Fiber* f = world.fibers[hint].get();
        if (strict && world.steps < starved_until && f->cta == starved && f->tid >> 5 == starved_warp) continue;
        if (!f->done && (!f->blocked_on || *f->blocked_on != f->seen)) { next = f; break; }
      }
    if (!next) {
      if (!world.copies.empty()) { perform_copy(); continue; }
      bool waiting = false;
      for (auto& [id, queue] : world.streams) waiting = waiting || (!queue.empty() && (queue.front()->delay > 0 || !queue.front()->started));
      if (!waiting && ++idle > 4) { fail("deadlock"); break; }
      continue;
    }
    idle = 0;
    next->blocked_on = nullptr;
    world.current = next;
    if (_setjmp(world.scheduler) == 0) {
      if (!next->started) {
        next->started = true;
        getcontext(&next->start);
        next->start.uc_stack.ss_sp = next->stack;
        next->start.uc_stack.ss_size = kStack;
        next->start.uc_link = nullptr;
        makecontext(&next->start, enter_fiber, 0);
        setcontext(&next->start);
      }
      _longjmp(next->at, 1);
    }
    world.current = nullptr;
  }
  world.current = nullptr;
  world.fibers.clear();
  world.ctas.clear();
  world.copies.clear();
  world.streams.clear();
  world.queued.clear();
  world.finished.clear();
  return world.failure;
}

}  // namespace emu
