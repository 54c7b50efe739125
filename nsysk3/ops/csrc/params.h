// What the host hands to the kernels.  cuda.py mirrors these structs field by field; k3_abi_* give their sizes.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

namespace k3 {

constexpr int kH = 7168;  // hidden size of Kimi K3
constexpr uint32_t kRowBytes = kH * 2;
constexpr int kRowVecs = kH / 8;  // 16-byte vectors of a row
constexpr int kMaxP = 8;

// Words of device memory that live from call to call (one block for each family of calls on a rank).
struct State {
  uint32_t epoch;     // calls completed
  uint32_t arrivals;  // CTAs of the running call that have read the epoch
  uint32_t base;      // what `next` was when the running call started
  uint32_t next;      // tokens handed out, over all calls
  uint32_t exits;     // CTAs of the running call that have finished (all-gather)
  uint32_t error;     // 1: a bounded spin gave up
};

using bf16 = __nv_bfloat16;

// What the gate of a source means for row t.
enum Gate {
  kGateAll = 0,   // its word reaches the target: all rows are there
  kGateEach = 1,  // word t reaches the target
};

// Reduce, add, attention residual, norm.  Row t of source i is source[i] + t * kH.
struct RingParams {
  const bf16* local[kMaxP];             // summed, read through the local ring
  const bf16* remote[kMaxP];            // summed after them, read through the remote ring
  const uint32_t* gate_local[kMaxP];    // words to wait for before row t is read, see Gate; null: no gate
  const uint32_t* gate_remote[kMaxP];
  uint32_t* ready[kMaxP];               // words at the peers that are told "my partial is complete" when the kernel starts
  const bf16* push_src[kMaxP];          // PUSH: rows sent to peer i ...
  bf16* push_dst[kMaxP];                // ... its staging ...
  uint32_t* push_flag[kMaxP];           // ... and its word for each row
  bf16* outs[kMaxP];                    // GATHER: where every rank wants the rows
  uint32_t* peer_done[kMaxP];           // GATHER: words at the peers that are told "my rows are there"
  const uint32_t* my_done;              // GATHER: words [nout] to wait for before the kernel ends
  State* state;                         // null: nothing is signalled, and tokens are dealt out statically
  uint32_t* error;
  const bf16* residual;                 // [T, H] or null
  bf16* prefix_out;                     // [T, H] or null
  bf16* bank;                           // [T, NB, H]
  const float* cw;                      // [H]
  const bf16* ow;                       // [H]
  bf16* out;                            // [T, H]
  int64_t stride_bm, stride_bb;         // bank strides over tokens and rows, elements
  int64_t parity_stride;                // PUSH: elements between the two halves of the staging
  int32_t T, nvb, nlocal, nremote, nready, npush, nout, gate, write_row, own_epoch;
  uint32_t target;                      // of the gates, when own_epoch is 0
  float score_eps, out_eps;
  long long spin_limit;                 // clock ticks
};

}  // namespace k3
