"""A torch that writes down what the plugin asks of it, and modules that take its hooks."""

from __future__ import annotations

import types


class Tape:
    """Everything that the fake torch was asked, in order; ``open`` is the stack of ranges."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: list[str] = []
        self.broken = False

    def range_push(self, msg: str) -> int:
        if self.broken:
            raise RuntimeError("no NVTX here")
        self.open.append(msg)
        self.log.append(f"push {msg}")
        return len(self.open)

    def range_pop(self) -> int:
        self.log.append(f"pop {self.open.pop()}")
        return len(self.open)

    def range_start(self, msg: str) -> str:
        self.log.append(f"start {msg}")
        return msg

    def range_end(self, range_id: str) -> None:
        self.log.append(f"end {range_id}")

    def mark(self, msg: str) -> None:
        if self.broken:
            raise RuntimeError("no NVTX here")
        self.log.append(f"mark {msg}")

    def shape(self) -> list[str]:
        """The log without what follows the first number of a name."""
        return [" ".join(line.split(" ")[:3]) if line.startswith(("push", "pop")) else line for line in self.log]


def fake_torch(tape: Tape) -> types.ModuleType:
    """What of torch the plugin uses; ``tape`` keeps the calls."""

    def stop() -> None:
        tape.log.append("cudaProfilerStop")

    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        nvtx=tape,
        current_device=lambda: 1,
        set_device=lambda device: None,
        current_stream=lambda: types.SimpleNamespace(query=lambda: None),
        synchronize=lambda device=None: tape.log.append("synchronize"),
        cudart=lambda: types.SimpleNamespace(cudaProfilerStop=stop),
    )
    torch.compiler = types.SimpleNamespace(is_compiling=lambda: False)  # type: ignore[attr-defined]
    torch.distributed = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda group=None: 2,
        monitored_barrier=lambda group, timeout: tape.log.append("barrier"),
    )
    return torch


class Module:
    """As much of torch.nn.Module as hooks need."""

    def __init__(self, children: dict[str, Module] | None = None, fails: bool = False) -> None:
        self.children = children or {}
        self.fails = fails
        self.before: list[object] = []
        self.after: list[object] = []

    def named_children(self) -> list[tuple[str, Module]]:
        return list(self.children.items())

    def named_modules(self, prefix: str = "") -> list[tuple[str, Module]]:
        below = (child.named_modules(f"{prefix}{name}.") for name, child in self.children.items())
        return [(prefix.removesuffix("."), self), *(each for found in below for each in found)]

    def register_forward_pre_hook(self, hook: object, *, prepend: bool = False) -> None:
        self.before.append(hook)

    def register_forward_hook(self, hook: object, *, always_call: bool = False) -> None:
        assert always_call
        self.after.append(hook)

    def __call__(self) -> str:
        for hook in self.before:
            hook(self, ())  # type: ignore[operator]
        try:
            for child in self.children.values():
                child()
            if self.fails:
                raise ValueError("out of memory")
        finally:
            for hook in self.after:
                hook(self, (), None)  # type: ignore[operator]
        return "result"


class ModuleList(Module):
    """Children by number."""

    def __init__(self, layers: list[Module]) -> None:
        super().__init__({str(number): layer for number, layer in enumerate(layers)})

    def __len__(self) -> int:
        return len(self.children)

    def __iter__(self):  # noqa: ANN204
        return iter(self.children.values())
