"""Hands the hooks to SGLang, in the processes that run a scheduler."""

from __future__ import annotations

import importlib
import sys

from nsysk3 import __version__
from nsysk3.plugin.hooks import Hooks
from nsysk3.plugin.ranges import logger
from nsysk3.plugin.rank import read_facts, sglang_version
from nsysk3.plugin.targets import HOOK_REGISTRY, SCHEDULER, TARGETS


def register_hooks() -> None:
    """Register every target with SGLang's HookRegistry, which applies them after all plugins; never raises.

    SGLang imports a target's module to hook it.  A process that has not loaded the scheduler (the detokenizer) runs no
    batch, and is spared that.
    """
    if SCHEDULER not in sys.modules:
        return
    try:
        _register()
    except Exception:
        logger.exception("nsysk3's markers are off in this process")


def _register() -> None:
    import torch

    registry = importlib.import_module(HOOK_REGISTRY)
    names = ",".join(target.marker for target in TARGETS)
    proof = f"nsysk3={__version__} sglang={sglang_version()} markers={names}"
    hooks = Hooks(torch.cuda.nvtx, read_facts, proof, torch.compiler.is_compiling)
    kinds = {"before": registry.HookType.BEFORE, "after": registry.HookType.AFTER, "around": registry.HookType.AROUND}
    for target in TARGETS:
        registry.HookRegistry.register(target.path, getattr(hooks, target.hook), kinds[target.kind])
    logger.info("nsysk3 %s puts markers into traces of this process", __version__)
