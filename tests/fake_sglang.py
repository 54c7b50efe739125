"""A few files in the shape of SGLang's, and a torch that writes down what is asked of it; nothing here is SGLang's."""

from __future__ import annotations

import importlib
import sys
import textwrap
import types
from pathlib import Path

FILES = {
    "__init__.py": '__version__ = "0.0.fake"',
    "srt/__init__.py": "",
    "srt/plugins/__init__.py": "",
    "srt/plugins/hook_registry.py": """
        import enum, functools, pkgutil

        class HookType(enum.Enum):
            BEFORE = "before"
            AFTER = "after"
            AROUND = "around"

        class HookRegistry:
            hooks = {}

            @classmethod
            def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
                cls.hooks.setdefault(target, []).append((hook_type, hook))

            @classmethod
            def apply_hooks(cls):
                for target, hooks in cls.hooks.items():
                    owner_path, _, name = target.rpartition(".")
                    owner = pkgutil.resolve_name(owner_path)
                    for hook_type, hook in hooks:
                        setattr(owner, name, wrap(getattr(owner, name), hook, hook_type))

        def wrap(original, hook, hook_type):
            @functools.wraps(original)
            def wrapper(*args, **kwargs):
                if hook_type is HookType.AROUND:
                    return hook(original, *args, **kwargs)
                if hook_type is HookType.BEFORE:
                    changed = hook(*args, **kwargs)
                    args, kwargs = changed if changed is not None else (args, kwargs)
                    return original(*args, **kwargs)
                result = original(*args, **kwargs)
                changed = hook(result, *args, **kwargs)
                return result if changed is None else changed
            return wrapper
        """,
    "srt/runtime_context.py": """
        import types
        PARALLEL = types.SimpleNamespace(
            tp_rank=0, tp_size=1, pp_rank=1, pp_size=2, moe_ep_rank=0, moe_ep_size=1, nnodes=1)
        def get_parallel():
            return PARALLEL
        """,
    "srt/distributed/__init__.py": "",
    "srt/distributed/parallel_state.py": """
        import types
        def get_tp_group():
            return types.SimpleNamespace(ranks=[1])
        def get_pp_group():
            return types.SimpleNamespace(ranks=[0, 1])
        """,
    "srt/utils/__init__.py": "",
    "srt/utils/profile_utils.py": """
        class ProfileManager:
            cpu_group = None
            def _do_start(self, stage=None):
                LOG.append("capture starts")
            def _do_stop(self):
                LOG.append("cudaProfilerStop")
        LOG = []
        """,
    "srt/managers/__init__.py": "",
    "srt/managers/scheduler_components/__init__.py": "",
    "srt/managers/scheduler_components/profiler_manager.py": """
        LOG = []
        class SchedulerProfilerManager:
            def __init__(self, log, first_gpu=True):
                self.log = log
                self.first_gpu = first_gpu
                self.dp_tp_cpu_group = None
                self.profile_in_progress = False
                self.profiler_activities = ["CUDA_PROFILER"]
            def _start_profile(self, stage=None):
                self.profile_in_progress = True
                self.log.append("capture starts")
                return "started"
            def _stop_profile(self, stage=None):
                if "CUDA_PROFILER" in self.profiler_activities and self.first_gpu:
                    self.log.append("cudaProfilerStop")
                self.profile_in_progress = False
                return "stopped"
        """,
    "srt/managers/scheduler_pp_mixin.py": """
        class SchedulerPPMixin:
            def _pp_launch_batch(self, mb_id, cur_batch):
                return self.run_batch(cur_batch)
            def _pp_send_dict_to_next_stage(self, tensor_dict, async_send=True, msg_type="default"):
                tensor_dict["__msg_type__"] = msg_type
                return ["work"]
            def _pp_recv_typed_dict(self, expected_kind="default", all_gather_group=None):
                return {"kind": expected_kind}
        """,
    "srt/managers/scheduler.py": """
        import types
        from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
        class Scheduler(SchedulerPPMixin):
            def __init__(self, model=None, profiler=None):
                self.forward_ct = 0
                self.profiler = profiler
                self.mbs = [None, None]
                self.cur_batch_for_debug = None
                self.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
            def run_batch(self, batch, pp_proxy_tensors=None):
                self.forward_ct += 1
                if batch.at_start is not None:
                    batch.at_start()
                return self.tp_worker.model_runner.model() if self.tp_worker.model_runner.model else "result"
        """,
}


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


def write_tree(root: Path) -> None:
    """``root/sglang`` with FILES."""
    for name, text in FILES.items():
        path = root / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def forget() -> None:
    """Take the fakes out of sys.modules."""
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
