"""NVTX without CUDA: torch has none on CPUs, and NVIDIA's Python package finds no way into older Nsight Systems.

NVTX is a protocol rather than a library.  A tool names a library in the environment; the program loads it and hands it
tables of empty function pointers, which the tool fills.  Only the core module is asked for here: ranges and marks of
plain text in the default domain.  https://github.com/NVIDIA/NVTX has the protocol (nvtxDetail/nvtxTypes.h).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_CORE_MODULE = 1
# Slots of the modules that a tool looks for, by their numbers: core, CUDA, OpenCL, CUDA runtime, core 2, sync.
_SLOTS = {1: 16, 2: 15, 3: 7, 4: 7, 5: 15, 6: 7}
_MARK, _RANGE_START, _RANGE_END, _RANGE_PUSH, _RANGE_POP = 2, 5, 7, 9, 11  # slots of the core module
_CALLBACKS, _VERSION = 1, 3  # what a tool asks for
_VARIABLE = "NVTX_INJECTION64_PATH"

_GetTable = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint))
_GetExports = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint)
_SetVersion = ctypes.CFUNCTYPE(None, ctypes.c_uint)


class _Callbacks(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("get_table", _GetTable))


class _Version(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("version", ctypes.c_uint), ("reserved", ctypes.c_uint), ("set", _SetVersion),
    )  # fmt: skip


class HostNvtx:
    """The tool's functions, under the names of torch.cuda.nvtx.  Raises OSError when the tool takes no part."""

    def __init__(self, library: str) -> None:
        self._slots = {module: (ctypes.c_void_p * size)() for module, size in _SLOTS.items()}
        self._tables = {module: self._table(module) for module in _SLOTS}
        # The tool may keep pointers to all of these, so they live as long as this.
        self._callbacks = _Callbacks(ctypes.sizeof(_Callbacks), _GetTable(self._give_table))
        self._version = _Version(ctypes.sizeof(_Version), 3, 0, _SetVersion(lambda version: None))
        self._exports = _GetExports(self._give_exports)
        if not ctypes.CDLL(library).InitializeInjectionNvtx2(self._exports):
            raise OSError(f"{library} takes no part in NVTX")
        core = [address or 0 for address in self._slots[_CORE_MODULE]]
        text, number = ctypes.c_char_p, ctypes.c_uint64
        self._push = ctypes.CFUNCTYPE(ctypes.c_int, text)(core[_RANGE_PUSH])
        self._pop = ctypes.CFUNCTYPE(ctypes.c_int)(core[_RANGE_POP])
        self._start = ctypes.CFUNCTYPE(number, text)(core[_RANGE_START])
        self._end = ctypes.CFUNCTYPE(None, number)(core[_RANGE_END])
        self._mark = ctypes.CFUNCTYPE(None, text)(core[_MARK])

    def range_push(self, msg: str) -> Any:
        """Open a range on this thread."""
        return self._push(msg.encode())

    def range_pop(self) -> Any:
        """Close the innermost one."""
        return self._pop()

    def range_start(self, msg: str) -> Any:
        """Open a range that need not nest."""
        return self._start(msg.encode())

    def range_end(self, range_id: Any) -> Any:
        """Close it."""
        return self._end(range_id)

    def mark(self, msg: str) -> Any:
        """A moment."""
        return self._mark(msg.encode())

    def _table(self, module: int) -> Any:
        """Addresses of a module's slots; the first is no function, and a null ends the table."""
        size, slots = _SLOTS[module], self._slots[module]
        addresses = [ctypes.addressof(slots) + place * ctypes.sizeof(ctypes.c_void_p) for place in range(1, size)]
        return (ctypes.c_void_p * (size + 1))(None, *addresses, None)

    def _give_table(self, module: int, table: Any, size: Any) -> int:
        if module not in self._tables:
            return 0
        if size:
            size[0] = _SLOTS[module]
        table[0] = ctypes.addressof(self._tables[module])
        return 1

    def _give_exports(self, which: int) -> int | None:
        known: dict[int, ctypes.Structure] = {_CALLBACKS: self._callbacks, _VERSION: self._version}
        return ctypes.addressof(known[which]) if which in known else None


def find_host_nvtx() -> HostNvtx | None:
    """NVTX of the tool that started this process; None where none did.  Raises OSError when it cannot be reached."""
    library = os.environ.get(_VARIABLE)
    return HostNvtx(library) if library else None
