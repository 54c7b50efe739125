"""What the plugin does when SGLang runs a batch, crosses a stage boundary or opens and closes a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsysk3.plugin.capture import stop_in_order
from nsysk3.plugin.layers import Wrapped, wrap_layers
from nsysk3.plugin.ranges import Nvtx, Ranges
from nsysk3.plugin.rank import Facts

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Hooks:
    """One scheduler process's markers.

    Every method is a hook as SGLang's HookRegistry calls it: ``self`` of the hooked method is the first of ``args``.
    Whatever goes wrong in here, the hooked method runs, and runs once.
    """

    def __init__(
        self,
        nvtx: Nvtx,
        facts: Callable[[], Facts],
        proof: str,
        is_compiling: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ranges = Ranges(nvtx)
        self._read_facts = facts
        self._facts: Facts | None = None
        self._proof = proof
        self._is_compiling = is_compiling
        self._model: Any = None
        self._wrapped = Wrapped()
        self._forward = ""  # the text of the open forward range, if any
        self._micro_batch: int | None = None
        self._window: Any = None

    def run_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around Scheduler.run_batch: the forward's range, with the rank mark in it."""
        text = self.ranges.quietly(self._forward_text, args, kwargs)
        opened = text is not None and self._open(text)
        try:
            return original(*args, **kwargs)
        finally:
            if opened:
                self._forward = ""
                self.ranges.pop()

    def launch_batch(self, *args: Any, **kwargs: Any) -> None:
        """Before SchedulerPPMixin._pp_launch_batch: which micro-batch slot the next forward fills."""
        self._micro_batch = self.ranges.quietly(_argument, args, kwargs, 1, "mb_id")

    def send(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a send to the next stage: ``pp.send`` for activations, ``pp.send_<kind>`` for anything else."""
        return self.ranges.around(self._send_text, original, args, kwargs)

    def receive(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a receive from the stage before, blocking on the host until the message is announced."""
        return self.ranges.around(self._receive_text, original, args, kwargs)

    def start_profile(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """After the capture was opened.  Marks and ranges from before it are lost: say them again."""
        self.ranges.quietly(self._opened)

    def stop_profile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the capture's end: let the GPUs finish first, and leave no range half open.

        SGLang stops a capture of so many steps at the start of the forward after them, which is not in the window.
        """
        forward = self._forward
        if forward:
            self.ranges.pop()
        self.ranges.end(self._window)
        self._window = None
        facts = self.ranges.quietly(self._known)
        try:
            return stop_in_order(facts, args[0], lambda: original(*args, **kwargs), self.ranges.quietly)
        finally:
            if forward and not self.ranges.push(forward):
                self._forward = ""

    def _open(self, text: str) -> bool:
        opened = self.ranges.push(text)
        self._forward = text if opened else ""
        self.ranges.mark(self._rank_text())
        return opened

    def _opened(self) -> None:
        # A start comes with a request or inside run_batch, whose range Nsight has then not seen begin.
        if self._forward:
            self.ranges.pop()
        self.ranges.end(self._window)
        self._window = self.ranges.start("nsysk3.prefill_window")
        self.ranges.mark(self._rank_text())
        if self._forward and not self.ranges.push(self._forward):
            self._forward = ""

    def _forward_text(self, args: Args, kwargs: Kwargs) -> str:
        scheduler, batch = args[0], _argument(args, kwargs, 1, "batch")
        self.ranges.quietly(self._wrap, scheduler)
        stage, slot = self._known().pp, self._micro_batch
        mode = batch.forward_mode
        requests = len(batch.reqs)
        tokens = batch.extend_num_tokens if mode.is_extend() else requests
        said = f"nsysk3.forward {scheduler.forward_ct + 1}"
        if slot is not None:
            said += f" mb={slot}"
        return f"{said} stage={stage} mode={mode.name.lower()} reqs={requests} tokens={tokens}"

    def _wrap(self, scheduler: Any) -> None:
        model = scheduler.tp_worker.model_runner.model
        if model is not self._model:
            self._model = model  # first, so that a model that cannot be wrapped is not tried at every forward
            self._wrapped = wrap_layers(model, self.ranges, self._is_compiling)

    def _known(self) -> Facts:
        if self._facts is None:
            self._facts = self._read_facts()
        return self._facts

    def _rank_text(self) -> str:
        facts = self.ranges.quietly(self._known) or Facts()
        return facts.text(f"{self._proof} layers={self._wrapped.text}")

    def _send_text(self, args: Args, kwargs: Kwargs) -> str:
        scheduler = args[0]
        kind = _argument(args, kwargs, 3, "msg_type", "default")
        tensors = _argument(args, kwargs, 1, "tensor_dict")
        size = sum(each.numel() * each.element_size() for each in tensors.values() if hasattr(each, "element_size"))
        said = f" forward={scheduler.forward_ct}{_slot(self._micro_batch)}" if kind == "proxy" else ""
        return f"{_boundary('pp.send', kind)}{said} bytes={size}"

    def _receive_text(self, args: Args, kwargs: Kwargs) -> str:
        scheduler = args[0]
        kind = _argument(args, kwargs, 1, "expected_kind", "default")
        if kind != "proxy":
            return _boundary("pp.recv", kind)
        # SGLang receives before it launches: this is for the next forward, and the slot is the current batch's.
        slot = self.ranges.quietly(_slot_of_current, scheduler)
        return f"pp.recv forward={scheduler.forward_ct + 1}{_slot(slot)}"


def _argument(args: Args, kwargs: Kwargs, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _slot(slot: int | None) -> str:
    return "" if slot is None else f" mb={slot}"


def _slot_of_current(scheduler: Any) -> int | None:
    current = scheduler.cur_batch_for_debug
    return next((slot for slot, batch in enumerate(scheduler.mbs) if batch is current), None)


def _boundary(name: str, kind: str) -> str:
    return name if kind == "proxy" else f"{name}_{kind}"
