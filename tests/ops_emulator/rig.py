"""The ranks of one group on the CPU: nsysk3.ops with the emulator in place of the GPU and its driver.

The kernels are built once, with every planted bug in them behind a number: ``plant(n)`` turns one on, 0 none.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_cases import Case, make_case

from nsysk3.errors import RunFailedError
from nsysk3.ops import cuda, cuda_abi, gemm
from nsysk3.ops.cuda_workspace import Workspace, workspace_bytes

HERE = Path(__file__).parent
SOURCES = Path(cuda.__file__).parent / "csrc"
MAX_STEPS = 5_000_000
_CALL = ctypes.CFUNCTYPE(None)


@dataclass(frozen=True)
class Bug:
    """Text of one source and what stands there instead: another statement, or text in which {on} is the condition."""

    name: str
    file: str
    right: str
    wrong: str = ";"


def build(folder: Path, bugs: Sequence[Bug]) -> ctypes.CDLL:
    """The kernels and all bugs as one library."""
    headers = next(
        (p for p in (Path("/usr/local/cuda/include"), *Path("/usr/local").glob("cuda-*/include")) if p.is_dir()), None
    )
    if shutil.which("g++") is None or headers is None:
        pytest.skip("the emulator needs g++ and the CUDA headers")
    for source in SOURCES.iterdir():
        if source.suffix in (".h", ".cuh"):
            shutil.copy(source, folder)
    for number, bug in enumerate(bugs, 1):
        path = folder / bug.file
        text = path.read_text("utf-8")
        assert text.count(bug.right) == 1, f"{bug.name}: {text.count(bug.right)} times {bug.right!r}"
        on = f"(emu::planted == {number})"
        instead = bug.wrong.replace("{on}", on)
        if "{on}" not in bug.wrong:
            instead = f"if {on} {{ {bug.wrong} }} else {{ {bug.right} }}"
        path.write_text(text.replace(bug.right, instead), "utf-8")
    target = folder / "libk3emu.so"
    flags = [
        "-std=c++20",
        "-O1",
        "-fsanitize=alignment",
        "-U_FORTIFY_SOURCE",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{headers}",
        f"-I{folder}",
        f"-I{HERE}",
    ]
    subprocess.run(["g++", *flags, "-o", str(target), str(HERE / "emu.cpp")], check=True)
    library = ctypes.CDLL(str(target))
    cuda_abi.declare(library)
    library.emu_run.argtypes, library.emu_run.restype = [ctypes.c_uint64, ctypes.c_uint64], ctypes.c_char_p
    library.emu_delay.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.emu_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.emu_call.argtypes = [_CALL, ctypes.c_void_p]
    return library


class Stream:
    """A stream of the emulator, as torch.cuda.Stream is used."""

    library: ctypes.CDLL
    current: Stream
    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Stream.made += 1
        self.cuda_stream = 100 + Stream.made

    def wait_stream(self, other: Stream) -> None:
        self.library.emu_wait(self.cuda_stream, other.cuda_stream)

    def record_event(self) -> Stream:
        marker = Stream()
        marker.wait_stream(self)
        return marker

    wait_event = wait_stream


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


class Rig:
    """``world`` ranks with a workspace each for ``tokens`` tokens over all."""

    def __init__(self, library: ctypes.CDLL, world: int, tokens: int, seed: int) -> None:
        self.library, self.world, self.tokens, self.seed = library, world, tokens, seed
        self.random = torch.Generator().manual_seed(seed)
        size = workspace_bytes(world, tokens)
        raw = [torch.full((size + 1024,), 0xFF, dtype=torch.uint8) for _ in range(world)]  # NaN wherever read too early
        self.buffers = [b[-b.data_ptr() % 1024 :][:size] for b in raw]
        peers = [b.data_ptr() for b in self.buffers]
        self.ranks = [Workspace(b, peers, r, tokens) for r, b in enumerate(self.buffers)]
        self.streams = [Stream() for _ in range(world)]
        self._keep: list[Any] = []

    def late(self, rank: int, most: int = 50_000) -> None:
        """Hold the rank up for a while, of a call that takes about as long."""
        self.hold(self.streams[rank], most)

    def hold(self, stream: Stream, most: int) -> None:
        """Let up to ``most`` steps pass before what comes next in the stream."""
        steps = int(torch.randint(0, most, (1,), generator=self.random))
        self.library.emu_delay(steps, stream.cuda_stream)

    def copy(self, to: torch.Tensor, source: torch.Tensor, rank: int) -> None:
        """In stream order."""
        self._keep += [to, source]
        size = source.numel() * source.element_size()
        self.library.k3_memcpy(to.data_ptr(), source.data_ptr(), size, self.streams[rank].cuda_stream)

    def call(self, f: Callable[[], Any]) -> None:
        """On the current stream, in its order."""

        def without_result() -> None:
            f()

        kept = _CALL(without_result)
        self._keep.append(kept)
        self.library.emu_call(kept, Stream.current.cuda_stream)

    def run(self) -> str | None:
        """All that is queued, to its end; what went wrong, if anything did."""
        failure = self.library.emu_run(self.seed, MAX_STEPS)
        if failure:
            return str(failure.decode())
        try:
            for rank in self.ranks:
                rank.check()
        except RunFailedError as error:
            return str(error)
        return None

    def case(self, rows: int, call: int, *, scale: float = 1.0) -> Case:
        case = make_case(
            self.tokens, self.world, cuda.HIDDEN, rows, seed=self.seed * 100 + call, slots=9, scale=scale,
            slot_major=call % 2 == 1,
        )  # fmt: skip
        self._keep.append(case)
        return case


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """nsysk3.ops.cuda on the emulator, with the bugs of the module's BUGS."""
    library = build(tmp_path_factory.mktemp("emulator"), request.module.BUGS)
    Stream.library, Stream.current = library, Stream()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors, and other tests beside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "library", lambda: library)
        patch.setattr(cuda, "multiprocessors", lambda _: 2)
        patch.setattr(cuda, "SPIN_S", 1e-3)  # a tick is a step of the emulator
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "current_stream", lambda *_: Stream.current)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(gemm, "MIN_LOCAL", 1)
        yield library
    torch.set_num_threads(threads)
