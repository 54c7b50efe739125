"""A few files in the shape of SGLang's; nothing here is SGLang's."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_torch import Tape, fake_torch

from nsysk3.plugin import register

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
                        if hasattr(owner, name):  # failures are only logged
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
    "srt/environ.py": """
        import types
        envs = types.SimpleNamespace(SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS=types.SimpleNamespace(get=lambda: False))
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
            def _profile_batch_predicate(self, batch):
                if batch.at_start is not None:
                    batch.at_start()
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
        import sglang.srt.utils.profile_utils
        from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
        from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
        class Scheduler(SchedulerPPMixin):
            def __init__(self, model=None, profiler=None):
                self.forward_ct = 0
                self.profiler_manager = profiler or SchedulerProfilerManager([])
                self.mbs = [None, None]
                self.cur_batch_for_debug = None
                self.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
            def run_batch(self, batch, pp_proxy_tensors=None):
                self.forward_ct += 1
                self.profiler_manager._profile_batch_predicate(batch)
                return self.tp_worker.model_runner.model() if self.tp_worker.model_runner.model else "result"
        """,
}


def write_tree(root: Path) -> None:
    """``root/sglang`` with FILES."""
    for name, text in FILES.items():
        path = root / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@contextmanager
def process(root: Path, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler process of the tree in ``root`` that has loaded the plugin: its scheduler module."""
    forget()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setitem(sys.modules, "torch", fake_torch(tape))
    monkeypatch.setenv("NSYSK3_MARKERS", "1")
    scheduler = importlib.import_module("sglang.srt.managers.scheduler")
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    register()
    registry.apply_hooks()
    try:
        yield scheduler
    finally:
        forget()


def forget() -> None:
    """Take the fakes out of sys.modules."""
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
