"""Hands the hooks to SGLang, in the processes that run a scheduler."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from types import MethodType
from typing import Any

from nsysk3 import __version__
from nsysk3.plugin import SP_SWITCH
from nsysk3.plugin.hooks import Hooks
from nsysk3.plugin.ranges import logger
from nsysk3.plugin.rank import read_facts, sglang_version
from nsysk3.plugin.targets import HOOK_REGISTRY, SCHEDULER, SP_TARGETS, TARGETS, FunctionTarget, Target


def register_hooks(markers: bool, kernels: bool) -> None:
    """Register what is asked for with SGLang's HookRegistry, which applies it after all plugins; never raises.

    SGLang imports a target's module to hook it.  A process that has not loaded the scheduler (the detokenizer) runs no
    batch, and is spared that.
    """
    if SCHEDULER not in sys.modules:
        return
    off = "nsysk3's markers are off in this process", "nsysk3 SP is off: SGLang's functions could not be hooked"
    for wanted, work, said in ((markers, _register_markers, off[0]), (kernels, _register_kernels, off[1])):
        try:
            if wanted:
                work()
        except Exception:
            logger.exception(said)


def _register_kernels() -> None:
    from nsysk3.plugin.sp import SpHooks

    hooks = SpHooks("fused" if os.environ.get(SP_SWITCH, "").lower() == "fused" else "auto")
    registry = importlib.import_module(HOOK_REGISTRY)
    found = [(target, _function_path(target)) for target in SP_TARGETS]
    for target, path in found:
        registry.HookRegistry.register(path, getattr(hooks, target.hook), registry.HookType.AROUND)


def _function_path(target: FunctionTarget) -> str:
    """Where this SGLang has it.  Raises LookupError where it is not what it was, for then none of them is hooked."""
    for name in target.modules:
        if _exists(name):
            function = getattr(importlib.import_module(name), target.function, None)
            taken = tuple(inspect.signature(function).parameters) if callable(function) else None
            if taken is None or taken[: len(target.parameters)] != target.parameters:
                raise LookupError(f"{name}.{target.function} takes {taken}, expected {target.parameters}")
            return f"{name}.{target.function}"
    raise LookupError(f"no module {target.modules[0]}")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def _register_markers() -> None:
    import torch

    registry = importlib.import_module(HOOK_REGISTRY)
    hooks = Hooks(torch.cuda.nvtx, read_facts, lambda: proof(hooks), torch.compiler.is_compiling)
    kinds = {"before": registry.HookType.BEFORE, "after": registry.HookType.AFTER, "around": registry.HookType.AROUND}
    for target in TARGETS:
        registry.HookRegistry.register(target.path, getattr(hooks, target.hook), kinds[target.kind])


def proof(hooks: Hooks) -> str:
    """What the rank mark says of the plugin: versions, and the markers whose hooks SGLang really runs.

    SGLang only logs a hook that it could not apply.
    """
    applied = {target: _carries(_hooked(target), getattr(hooks, target.hook)) for target in TARGETS}
    missing = {target.marker for target, there in applied.items() if not there}
    there = dict.fromkeys(target.marker for target in TARGETS if target.marker not in missing)
    return f"nsysk3={__version__} sglang={sglang_version()} markers={','.join(there)}"


def _hooked(target: Target) -> Any:
    return getattr(getattr(sys.modules.get(target.module), target.owner, None), target.function, None)


def _carries(function: Any, hook: Any) -> bool:
    """Whether SGLang's wrapper of ``hook``, or another plugin's wrapper of that, is what is called."""
    while function is not None:
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        if any(isinstance(each, MethodType) and each == hook for each in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
