"""NVTX markers and the capture, as nsysk3's SGLang plugin has them: the same hooks, called by this engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from nsysk3 import __version__
from nsysk3.ops.pytorch import torch
from nsysk3.plugin import SWITCH
from nsysk3.plugin.capture import ACTIVITY, stop_in_order
from nsysk3.plugin.hooks import Hooks
from nsysk3.plugin.ranges import Nvtx, Ranges
from nsysk3.plugin.rank import Facts
from nsysk3.workload.devices import cuda
from nsysk3.workload.host_nvtx import find_host_nvtx
from nsysk3.workload.scheduler import MicroBatch

logger = logging.getLogger("nsysk3.workload")
Result = TypeVar("Result")
_PROOF = f"nsysk3={__version__} engine=torch markers=forward,mb,send,recv,window,stop"


class Marks:
    """One rank's markers, nothing but a call where they are off, and its part in a capture.

    The hooks read SGLang's objects, so what they read of them stands here: a scheduler with its forward count, model
    and slots, and a batch.
    """

    def __init__(
        self, facts: Facts, model: torch.nn.Module, device: torch.device, host_group: Any, slots: int,
        on_stopped: Callable[[], None],
    ) -> None:  # fmt: skip
        self._facts, self._cuda, self._slots, self._on_stopped = facts, device.type == "cuda", slots, on_stopped
        nvtx = find_nvtx(device) if os.environ.get(SWITCH) == "1" else None
        kind = Hooks if self._cuda else _HostHooks
        self._hooks = kind(nvtx, lambda: facts, lambda: _PROOF, torch.compiler.is_compiling) if nvtx else None
        self._scheduler = SimpleNamespace(
            forward_ct=0, tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)), mbs=[],
            cur_batch_for_debug=None,
        )  # fmt: skip
        self._manager = SimpleNamespace(
            profiler_activities=[ACTIVITY], profile_in_progress=False, dp_tp_cpu_group=host_group
        )
        self._steps_left: int | None = None

    def receive(self, batch: MicroBatch, work: Callable[[], Result]) -> Result:
        """A receive of activations, for the forward that comes next."""
        if self._hooks is None:
            return work()
        mark = self._scheduler.cur_batch_for_debug = object()
        self._scheduler.mbs = [mark if slot == batch.slot else None for slot in range(self._slots)]
        return cast(Result, self._hooks.receive(lambda *_: work(), self._scheduler, "proxy"))

    def receive_results(self, work: Callable[[], Result]) -> Result:
        """A receive of tokens."""
        if self._hooks is None:
            return work()
        return cast(Result, self._hooks.receive(lambda *_: work(), self._scheduler, "output"))

    def send(self, kind: str, tensors: Mapping[str, torch.Tensor], work: Callable[[], Result]) -> Result:
        """A send: ``proxy`` of activations, ``output`` of tokens."""
        if self._hooks is None:
            return work()
        return cast(Result, self._hooks.send(lambda *_: work(), self._scheduler, tensors, True, kind))

    def forward(self, batch: MicroBatch, work: Callable[[], Result]) -> Result:
        """A forward, by SGLang's count of them."""
        if self._hooks is None:
            return work()
        hooks, extends = self._hooks, batch.mode == "extend"
        mode = SimpleNamespace(name=batch.mode.upper(), is_extend=lambda: extends)
        said = SimpleNamespace(forward_mode=mode, reqs=batch.pieces, extend_num_tokens=batch.tokens)
        self._scheduler.forward_ct = batch.number - 1

        def body(*_: Any) -> Result:
            self._scheduler.forward_ct = batch.number
            hooks.profile_step(None)
            return work()

        hooks.launch_batch(self._scheduler, batch.slot)
        return cast(Result, hooks.run_batch(body, self._scheduler, said))

    def after_forward(self) -> None:
        """Count a forward of the capture, and end it with the last."""
        if self._steps_left is not None:
            self._steps_left -= 1
            if not self._steps_left:
                self.stop()

    def start(self, steps: int | None) -> None:
        """Open a capture of ``steps`` forwards of this rank; None until told to stop."""
        self._manager.profile_in_progress, self._steps_left = True, steps
        if self._first_on_node:
            if self._cuda:
                cuda.cudart().cudaProfilerStart()
            else:
                logger.info("no GPU: a capture by cudaProfilerApi does not open; the window is marked only")
        if self._hooks is not None:
            self._hooks.start_profile(None)

    def stop(self) -> None:
        """End the capture: by the node's last stage, once its GPUs are done; no more than told when none is open."""
        if self._manager.profile_in_progress:
            if self._hooks is not None:
                self._hooks.stop_profile(self._stop, self._manager)
            elif self._cuda:
                stop_in_order(self._facts, self._manager, lambda: self._stop(self._manager), _quiet.quietly)
            self._manager.profile_in_progress, self._steps_left = False, None
        self._on_stopped()

    @property
    def _first_on_node(self) -> bool:
        return self._facts.device == 0

    def _stop(self, manager: Any) -> None:
        if self._cuda and self._first_on_node and ACTIVITY in manager.profiler_activities:
            cuda.cudart().cudaProfilerStop()


class _HostHooks(Hooks):
    """Where there is no GPU there is nothing to wait for."""

    def stop_profile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._capturing = False
        self.ranges.end(self._window)
        self._window = None
        return original(*args, **kwargs)


def find_nvtx(device: torch.device) -> Nvtx | None:
    """NVTX of torch on GPUs, the profiler's own elsewhere; None where no profiler is there to see anything."""
    if device.type == "cuda":
        return cast(Nvtx, cuda.nvtx)
    try:
        return find_host_nvtx()
    except OSError as error:
        logger.warning("no markers: %s", error)
        return None


_quiet = Ranges(cuda.nvtx)
