"""Sequence-parallel and pipeline kernels for Kimi-K3's attention residual, and their PyTorch references.

Importing this package needs nothing; its modules need PyTorch, and say so with one MissingToolError where it is not
installed.  docs/kernels.md has the mathematics, the protocols and when each kernel is chosen.

* ``reference``: every operation in plain PyTorch, on one process.
* ``attn_res``: attention residual and RMSNorm in one launch (K0).
* ``sp``: SequenceParallel, which fuses it with the reduce-scatter before (K1, K2) or the all-gather behind (K3).
* ``boundary``: the hand-over between pipeline stages, by row slices.
* ``dispatch``: which path was measured fastest.
"""
