"""The structs and functions of csrc/params.h and csrc/launch.cu, as ctypes sees them."""

from __future__ import annotations

import ctypes as c

MAX_PEERS = 8
_POINTERS = c.c_void_p * MAX_PEERS


class RingParams(c.Structure):
    """k3::RingParams."""

    _fields_ = (
        *((name, _POINTERS) for name in ("local", "remote", "gate_local", "gate_remote", "ready")),
        *((name, _POINTERS) for name in ("push_src", "push_dst", "push_flag", "outs", "peer_done")),
        *(
            (name, c.c_void_p)
            for name in ("my_done", "state", "error", "residual", "prefix_out", "bank", "cw", "ow", "out")
        ),
        *((name, c.c_int64) for name in ("stride_bm", "stride_bb", "parity_stride")),
        *((name, c.c_int32) for name in ("T", "nvb", "nlocal", "nremote", "nready", "npush", "nout", "gate")),
        *((name, c.c_int32) for name in ("write_row", "own_epoch")),
        ("target", c.c_uint32),
        ("score_eps", c.c_float),
        ("out_eps", c.c_float),
        ("spin_limit", c.c_longlong),
    )


def declare(library: c.CDLL) -> None:
    """Types the library's functions.  Raises OSError when its structs are not these."""
    library.k3_ring.argtypes = [c.POINTER(RingParams), c.c_int, c.c_int, c.c_int, c.c_void_p]
    library.k3_write_value.argtypes = [c.c_void_p, c.c_uint32, c.c_void_p]
    library.k3_memcpy.argtypes = [c.c_void_p, c.c_void_p, c.c_longlong, c.c_void_p]
    library.k3_copy.argtypes = [c.c_void_p, c.c_void_p, c.c_longlong, c.c_int, c.c_int, c.c_void_p]
    library.k3_error.argtypes = [c.c_int]
    library.k3_error.restype = c.c_char_p
    if library.k3_abi_ring() != c.sizeof(RingParams):
        raise OSError(f"k3_abi_ring says {library.k3_abi_ring()} bytes, not {c.sizeof(RingParams)}")
