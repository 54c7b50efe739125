// Reduce + prefix add + attention residual + RMSNorm, one token after another, for any number of tokens (K0, K1, K3 and
// the consumer of K2).
//
//   scheduler warp : deals out tokens; for each brings [bank rows][local rows][residual] into the local ring
//   remote warp    : the same tokens' rows that come from elsewhere, into a ring of their own, so that NVLink runs
//                    several tokens ahead and never stands behind HBM, nor HBM behind it
//   push warp      : (PUSH) sends this rank's rows to their owners, a few rows in flight
//   SW score warps : sum of squares and product with the score weight of the bank rows as they arrive, each warp its own
//                    columns, ahead of the others and without a barrier among them
//   MW mix warps   : fold scored bank rows (online softmax), then the sum of the rows (fp32, fixed order, rounded once),
//                    written as the new prefix, folded in, normed, written; they meet once a token
//
// Rings hold whole rows of 14 KiB; a full and an empty mbarrier a slot.  Nothing passes through device memory between
// the reduce and the norm, and every input is read from it once.
#pragma once
#include "rows.cuh"

namespace k3 {

enum Remote { kNone = 0, kPull = 1, kPush = 2 };  // how remote rows come

constexpr int kQueue = 32;   // tokens dealt out and not yet finished; the local ring keeps them well below this
constexpr int kBatches = 16;  // batches of bank rows scored and not yet folded; each holds at least a slot

template <int MW, int SW, int R, int NL, int NR, int NP, Remote MODE, bool GATHER>
struct Ring {
  static constexpr int kMix = MW * 32, kScore = SW * 32;
  static constexpr int kVec = kRowVecs / kMix, kScoreVec = kRowVecs / kScore;
  static constexpr int kElems = kVec * 8;
  static constexpr int kThreads = kMix + kScore + 32 + (MODE != kNone ? 32 : 0) + (MODE == kPush ? 32 : 0);
  static_assert(kMix * kVec == kRowVecs && kScore * kScoreVec == kRowVecs, "the warps must cover the row exactly");
  static_assert(SW <= 8 && (R == 1 || R == 2 || R == 4), "a batch's scores are summed by R lanes");
  static_assert(NL + 2 <= kQueue && NL < kBatches && (MODE == kNone) == (NR == 0) && (MODE == kPush) == (NP > 0), "rings");
  static_assert(NL >= R, "a batch is scored before its first row is folded");
  static_assert(NP == 0 || NP >= 3, "a row is loaded, one is stored, one completes");

  struct Smem {
    uint64_t full[NL + NR], empty[NL + NR], told[kQueue], scored[kBatches], loaded[NP + 1];
    float parts[kBatches][R][2][8];  // of a bank row: by score warp, the sum of squares and the product
    alignas(16) float sums[2][MW][4];  // read as float4
    int token[kQueue];
    float4 cw[2 * kVec][kMix];  // the mix warps' score weight, each thread its own columns
    alignas(128) uint4 buf[NL + NR + NP][kRowVecs];
  };

  // Walks a ring: the slot, and the phase its barriers are in.
  template <int FIRST, int N>
  struct Walk {
    int slot = FIRST;
    uint32_t phase;
    __device__ explicit Walk(uint32_t p) : phase(p) {}
    __device__ void next() {
      if (++slot == FIRST + N) { slot = FIRST; phase ^= 1; }
    }
  };

  static __device__ __forceinline__ void schedule(const RingParams& p, Smem& S, uint32_t base, uint32_t target) {
    Walk<0, NL> w(1);  // a fresh barrier lets parity 1 pass
    int queued = 0, passed = 0;
    const uint64_t once = policy_evict_first();
    auto bring = [&](const void* src) {
      mbar_wait(&S.empty[w.slot], w.phase);
      mbar_expect(&S.full[w.slot], kRowBytes);
      bulk_load(S.buf[w.slot], src, kRowBytes, &S.full[w.slot], once);
      w.next();
    };
    auto tell = [&](int t) {
      S.token[queued] = t;
      mbar_arrive(&S.told[queued]);
      queued = (queued + 1) % kQueue;
    };
    for (int t = (int)blockIdx.x; t < p.T;) {
      tell(t);
      const int step = (int)gridDim.x;
      const int following = p.state ? (int)(atomicAdd(&p.state->next, 1u) - base) + step : t + step;
      const int64_t row = t;
      for (int j = 0; j < p.nvb; ++j) bring(p.bank + row * p.stride_bm + j * p.stride_bb);
      if (t >= passed) {
        passed = pass_gates(p.gate_local, p.nlocal, p.gate, t, target, p.spin_limit, p.error);
        fence_proxy_async();
      }
      for (int q = 0; q < p.nlocal; ++q) bring(p.local[q] + row * kH);
      if (p.residual) bring(p.residual + row * kH);
      t = following;
    }
    tell(-1);
  }

  static __device__ __forceinline__ void fetch_remote(const RingParams& p, Smem& S, uint32_t target, int64_t half) {
    Walk<NL, NR> w(1);
    const uint64_t once = policy_evict_first();
    int queued = 0, passed = 0;
    uint32_t phase = 0;
    for (;;) {
      mbar_wait(&S.told[queued], phase);
      const int t = S.token[queued];
      if (t < 0) return;
      if (++queued == kQueue) { queued = 0; phase ^= 1; }
      if (t >= passed) {
        passed = pass_gates(p.gate_remote, p.nremote, p.gate, t, target, p.spin_limit, p.error);
        fence_proxy_async();
      }
      for (int q = 0; q < p.nremote; ++q) {
        const bf16* row = p.remote[q] + half + (int64_t)t * kH;
        mbar_wait(&S.empty[w.slot], w.phase);
        mbar_expect(&S.full[w.slot], kRowBytes);
        bulk_load(S.buf[w.slot], row, kRowBytes, &S.full[w.slot], once);
        w.next();
      }
    }
  }

  static __device__ __forceinline__ void push(const RingParams& p, Smem& S, uint32_t epoch, int64_t half) {
    const int rows = (p.T - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, n = rows * p.npush;
    constexpr int kSlots = NP ? NP : 1;
    const uint64_t once = policy_evict_first();
    auto at = [&](int i) { return (int)blockIdx.x + i / p.npush * (int)gridDim.x; };
    for (int i = 0; i < n + 2; ++i) {  // load row i, store row i - 1, announce row i - 2
      if (i < n) {
        const int s = i % kSlots;
        mbar_expect(&S.loaded[s], kRowBytes);
        bulk_load(S.buf[NL + NR + s], p.push_src[i % p.npush] + (int64_t)at(i) * kH, kRowBytes, &S.loaded[s], once);
      }
      if (i >= 1 && i <= n) {
        const int k = i - 1, s = k % kSlots;
        mbar_wait(&S.loaded[s], (k / kSlots) & 1);
        bulk_store(p.push_dst[k % p.npush] + half + (int64_t)at(k) * kH, S.buf[NL + NR + s], kRowBytes);
      }
      bulk_commit();
      if (i >= 2) {
        bulk_wait<1>();
        const int k = i - 2;
        st_release_sys(p.push_flag[k % p.npush] + at(k), epoch);
      }
    }
  }

  // Columns of this thread: V vectors, the warps side by side.
  template <int V, int THREADS>
  static __device__ __forceinline__ void load_weight(const float* from, int tid, float (&w)[V * 8]) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 c = *reinterpret_cast<const float4*>(from + (v * THREADS + tid) * 8 + 4 * e);
        w[v * 8 + 4 * e] = c.x; w[v * 8 + 4 * e + 1] = c.y; w[v * 8 + 4 * e + 2] = c.z; w[v * 8 + 4 * e + 3] = c.w;
      }
  }

  static __device__ __forceinline__ void score(const RingParams& p, Smem& S, int tid) {
    const int warp = tid >> 5, lane = tid & 31;
    float cw[kScoreVec * 8];
    load_weight<kScoreVec, kScore>(p.cw, tid, cw);
    Walk<0, NL> w(0);
    int queued = 0, batch = 0;
    uint32_t phase = 0;
    auto pass = [&] {
      __syncwarp();
      if (lane == 0) mbar_arrive(&S.empty[w.slot]);
      w.next();
    };
    for (;;) {
      mbar_wait(&S.told[queued], phase);
      if (S.token[queued] < 0) return;
      if (++queued == kQueue) { queued = 0; phase ^= 1; }
      for (int j = 0; j < p.nvb; j += R) {
        const int n = min(R, p.nvb - j);
        float st[2 * R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float a[2] = {0.f, 0.f}, d[2] = {0.f, 0.f};
          if (r < n) {
            mbar_wait(&S.full[w.slot], w.phase);
            uint4 x[kScoreVec];
#pragma unroll
            for (int v = 0; v < kScoreVec; ++v) x[v] = S.buf[w.slot][v * kScore + tid];
            pass();
#pragma unroll
            for (int v = 0; v < kScoreVec; ++v) {
              float f[8];
              unpack(x[v], f);
#pragma unroll
              for (int e = 0; e < 8; ++e) {
                a[e & 1] = fmaf(f[e], f[e], a[e & 1]);
                d[e & 1] = fmaf(f[e], cw[v * 8 + e], d[e & 1]);
              }
            }
          }
          st[2 * r] = a[0] + a[1];
          st[2 * r + 1] = d[0] + d[1];
        }
        const float mine = warp_sums<2 * R>(st, lane);
        constexpr int kLanes = 16 / R;  // that hold the same sum
        if (lane % kLanes == 0) S.parts[batch][lane / kLanes / 2][lane / kLanes % 2][warp] = mine;
        __syncwarp();
        if (lane == 0) mbar_arrive(&S.scored[batch]);
        batch = (batch + 1) % kBatches;
      }
      // Rows that are not scored are waited for like the others: a reader that skips a phase cannot tell the next one.
      for (int n = p.nlocal + (p.residual ? 1 : 0); n; --n) {
        mbar_wait(&S.full[w.slot], w.phase);
        pass();
      }
    }
  }

  static __device__ __forceinline__ void mix(const RingParams& p, Smem& S, int tid) {
    const int warp = tid >> 5, lane = tid & 31;
    auto weight = [&](int i) { return *reinterpret_cast<const float4*>(p.cw + ((i >> 1) * kMix + tid) * 8 + 4 * (i & 1)); };
#pragma unroll
    for (int i = 0; i < 2 * kVec; ++i) S.cw[i][tid] = weight(i);
    Walk<0, NL> near(0);
    Walk<NL, NR ? NR : 1> far(0);
    Walk<0, kBatches> batch(0);
    int flip = 0, queued = 0;
    uint32_t phase = 0;
    auto take = [&](auto& w, uint4 (&row)[kVec]) {
      mbar_wait(&S.full[w.slot], w.phase);
#pragma unroll
      for (int v = 0; v < kVec; ++v) row[v] = S.buf[w.slot][v * kMix + tid];
      __syncwarp();
      if (lane == 0) mbar_arrive(&S.empty[w.slot]);
      w.next();
    };
    for (;;) {
      mbar_wait(&S.told[queued], phase);
      const int t = S.token[queued];
      if (t < 0) return;
      if (++queued == kQueue) { queued = 0; phase ^= 1; }

      float m = -INFINITY, l = 0.f, acc[kElems];
#pragma unroll
      for (int e = 0; e < kElems; ++e) acc[e] = 0.f;

      for (int j = 0; j < p.nvb; j += R) {  // the bank does not wait for the communication
        const int n = min(R, p.nvb - j), r0 = lane % R;
        mbar_wait(&S.scored[batch.slot], batch.phase);
        float a = 0.f, d = 0.f;  // lane r: of row r
#pragma unroll
        for (int w = 0; w < SW; ++w) { a += S.parts[batch.slot][r0][0][w]; d += S.parts[batch.slot][r0][1][w]; }
        batch.next();
        const float s = r0 < n ? d * rsqrtf(a * (1.f / kH) + p.score_eps) : -INFINITY;
        float mn = s;
#pragma unroll
        for (int o = R / 2; o; o >>= 1) mn = fmaxf(mn, __shfl_xor_sync(0xffffffffu, mn, o));
        mn = fmaxf(mn, m);
        const float mine = __expf(s - mn), corr = __expf(m - mn);
        float all = mine;
#pragma unroll
        for (int o = R / 2; o; o >>= 1) all += __shfl_xor_sync(0xffffffffu, all, o);
        l = l * corr + all;
        m = mn;
        if (j) {
#pragma unroll
          for (int e = 0; e < kElems; ++e) acc[e] *= corr;
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
          if (r < n) {
            const float w = __shfl_sync(0xffffffffu, mine, r);
            uint4 x[kVec];
            take(near, x);
#pragma unroll
            for (int v = 0; v < kVec; ++v) {
              float f[8];
              unpack(x[v], f);
#pragma unroll
              for (int e = 0; e < 8; ++e) acc[v * 8 + e] = fmaf(w, f[e], acc[v * 8 + e]);
            }
          }
      }

      uint4 x[kVec];
      {
        float sum[kElems];
#pragma unroll
        for (int e = 0; e < kElems; ++e) sum[e] = 0.f;
        auto add = [&](auto& w) {
          uint4 y[kVec];
          take(w, y);
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            float f[8];
            unpack(y[v], f);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[v * 8 + e] += f[e];
          }
        };
        for (int q = 0; q < p.nlocal; ++q) add(near);
        if (p.residual) add(near);
        if constexpr (MODE != kNone)
          for (int q = 0; q < p.nremote; ++q) add(far);
#pragma unroll
        for (int v = 0; v < kVec; ++v) x[v] = pack8(sum + v * 8);  // rounded once; the score sees the stored bits
      }
      if (p.prefix_out) {
        uint4* to = reinterpret_cast<uint4*>(p.prefix_out + (int64_t)t * kH);
#pragma unroll
        for (int v = 0; v < kVec; ++v) to[v * kMix + tid] = x[v];
      }
      if (p.write_row >= 0) {
        uint4* to = reinterpret_cast<uint4*>(p.bank + (int64_t)t * p.stride_bm + p.write_row * p.stride_bb);
#pragma unroll
        for (int v = 0; v < kVec; ++v) to[v * kMix + tid] = x[v];
      }

      // One exchange gives the score of the sum x and the norm of the mix: |c A + w x|^2 = c^2 AA + 2 c w Ax + w^2 xx.
      float st[4] = {0.f, 0.f, 0.f, 0.f};  // xx, x cw, AA, Ax
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        float f[8];
        unpack(x[v], f);
        float4 c[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) c[i] = S.cw[2 * v + i][tid];
        const float cw[8] = {c[0].x, c[0].y, c[0].z, c[0].w, c[1].x, c[1].y, c[1].z, c[1].w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float b = acc[v * 8 + e];
          st[0] = fmaf(f[e], f[e], st[0]);
          st[1] = fmaf(f[e], cw[e], st[1]);
          st[2] = fmaf(b, b, st[2]);
          st[3] = fmaf(b, f[e], st[3]);
        }
      }
      const float mine = warp_sums<4>(st, lane);
      if (lane % 8 == 0) S.sums[flip][warp][lane / 8] = mine;
      uint4 ow[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) ow[v] = __ldg(reinterpret_cast<const uint4*>(p.ow) + v * kMix + tid);
      group_sync<kMix>();
      float tot[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < MW; ++w) {
        const float4 part = *reinterpret_cast<const float4*>(S.sums[flip][w]);
        tot[0] += part.x; tot[1] += part.y; tot[2] += part.z; tot[3] += part.w;
      }
      flip ^= 1;  // the next exchange uses the other buffer: one barrier an exchange is enough
      const float s = tot[1] * rsqrtf(tot[0] * (1.f / kH) + p.score_eps), mn = fmaxf(m, s);
      const float corr = __expf(m - mn), wx = __expf(s - mn), inv = __fdividef(1.f, l * corr + wx);
      const float ca = corr * inv, cx = wx * inv;
      const float square = fmaxf(ca * ca * tot[2] + 2.f * ca * cx * tot[3] + cx * cx * tot[0], 0.f);
      const float scale = rsqrtf(square * (1.f / kH) + p.out_eps), sa = ca * scale, sx = cx * scale;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        float f[8], g[8];
        unpack(x[v], f);
        unpack(ow[v], g);
#pragma unroll
        for (int e = 0; e < 8; ++e) g[e] *= fmaf(sa, acc[v * 8 + e], sx * f[e]);
        const uint4 o = pack8(g);
        if constexpr (GATHER) {
          for (int q = 0; q < p.nout; ++q) reinterpret_cast<uint4*>(p.outs[q] + (int64_t)t * kH)[v * kMix + tid] = o;
        } else {
          reinterpret_cast<uint4*>(p.out + (int64_t)t * kH)[v * kMix + tid] = o;
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const RingParams& p, char* raw) {
    Smem& S = *reinterpret_cast<Smem*>(raw);
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const uint32_t epoch = p.state ? *(volatile uint32_t*)&p.state->epoch + 1u : 0u;
    const uint32_t base = p.state ? *(volatile uint32_t*)&p.state->base : 0u;
    const uint32_t target = p.own_epoch ? epoch : p.target;
    const int64_t half = MODE == kPush ? (int64_t)(epoch & 1) * p.parity_stride : 0;
    if (blockIdx.x == 0 && tid < p.nready) {  // stream order: what our partial came from has finished
      __threadfence_system();
      st_release_sys(p.ready[tid], epoch);
    }
    if (tid == 0) {
      for (int i = 0; i < NL + NR; ++i) {
        mbar_init(&S.full[i], 1);
        mbar_init(&S.empty[i], i < NL ? MW + SW : MW);
      }
      for (int i = 0; i < kBatches; ++i) mbar_init(&S.scored[i], SW);
      for (int i = 0; i < kQueue; ++i) mbar_init(&S.told[i], 1);
      for (int i = 0; i < NP; ++i) mbar_init(&S.loaded[i], 1);
      fence_mbar_init();
    }
    __syncthreads();
    if (p.state && tid == 0) enter(p.state, epoch, base, (uint32_t)p.T, gridDim.x);  // every thread here has read them

    constexpr int kFirst = MW + SW;  // of the warps of which one lane works
    if (warp < MW) {
      mix(p, S, tid);
    } else if (warp < kFirst) {
      score(p, S, tid - kMix);
    } else if (warp == kFirst) {
      if (lane == 0) schedule(p, S, base, target);
      __syncwarp();
    } else if (MODE != kNone && warp == kFirst + 1) {
      if (lane == 0) fetch_remote(p, S, target, half);
      __syncwarp();
    } else if (MODE == kPush) {
      if (lane == 0) push(p, S, epoch, half);
      __syncwarp();
    }
    if constexpr (GATHER) {  // the last CTA out announces this rank's rows, and waits for the peers'
      __threadfence_system();
      __syncthreads();
      if (tid == 0 && atomicAdd(&p.state->exits, 1u) == gridDim.x - 1) {
        p.state->exits = 0;
        __threadfence_system();
        for (int q = 0; q < p.nout; ++q) st_release_sys(p.peer_done[q], epoch);
        for (int q = 0; q < p.nout; ++q) wait_ge(p.my_done + q, epoch, p.spin_limit, p.error);
      }
    }
  }
};

template <int MW, int SW, int R, int NL, int NR, int NP, Remote MODE, bool GATHER>
__global__ void __launch_bounds__(Ring<MW, SW, R, NL, NR, NP, MODE, GATHER>::kThreads, 1)
    rs_attn_res(const __grid_constant__ RingParams p) {
  K3_DYN_SMEM(raw);
  Ring<MW, SW, R, NL, NR, NP, MODE, GATHER>::run(p, raw);
}

}  // namespace k3
