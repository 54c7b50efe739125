"""What the plugin does when SGLang runs a batch, crosses a stage boundary or opens and closes a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsysk3.plugin.capture import capturing, stop_in_order
from nsysk3.plugin.layers import Wrapped, wrap_layers
from nsysk3.plugin.ranges import Nvtx, Ranges, logger
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
        proof: Callable[[], str],
        is_compiling: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ranges = Ranges(nvtx)
        self._read_facts = facts
        self._facts: Facts | None = None
        self._read_proof = proof
        self._proof = ""
        self._is_compiling = is_compiling
        self._model: Any = None
        self._wrapped = Wrapped()
        self._next_forward: str | None = None  # the forward whose range is not open yet
        self._in_forward = False
        self._micro_batch: int | None = None
        self._capturing = False
        self._window: Any = None

    def run_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around Scheduler.run_batch: names the forward, whose range ``profile_step`` opens, and closes it."""
        self._next_forward = self.ranges.quietly(self._forward_text, args, kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            self._next_forward = None
            if self._in_forward:
                self._in_forward = False
                self.ranges.pop()

    def profile_step(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """After SGLang's profiler has decided, in run_batch, whether to start or stop before this forward.

        Only here is the forward inside the capture exactly when its range is.
        """
        text, self._next_forward = self._next_forward, None
        if text is None or self._in_forward:
            return
        # Other ranks can be told to start before the first GPU's process has opened the capture, and marks of that
        # time are lost: the window opens, and the rank is named, with the forward.
        if self._capturing and self._window is None:
            self._window = self.ranges.start("nsysk3.prefill_window")
        self._in_forward = self.ranges.push(text)
        self.ranges.quietly(self._mark_rank)

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
        """After the capture was opened: its window starts with the next forward."""
        self._capturing = True
        self.ranges.quietly(self._mark_rank)

    def stop_profile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the capture's end: close the window and let the GPUs finish first."""
        if not self.ranges.quietly(capturing, args[0]):  # SGLang asks again at every forward after the last step
            return original(*args, **kwargs)
        self._capturing = False
        self.ranges.end(self._window)
        self._window = None
        facts = self.ranges.quietly(self._known)
        return stop_in_order(facts, args[0], lambda: original(*args, **kwargs), self.ranges.quietly)

    def _forward_text(self, args: Args, kwargs: Kwargs) -> str:
        scheduler, batch = args[0], _argument(args, kwargs, 1, "batch")
        self.ranges.quietly(self._wrap, scheduler)
        facts, slot = self.ranges.quietly(self._known), self._micro_batch
        mode = batch.forward_mode
        requests = len(batch.reqs)
        tokens = batch.extend_num_tokens if mode.is_extend() else requests
        said = f"nsysk3.forward {scheduler.forward_ct + 1}"
        said += _slot(slot) + (f" stage={facts.pp}" if facts else "")
        return f"{said} mode={mode.name.lower()} reqs={requests} tokens={tokens}"

    def _wrap(self, scheduler: Any) -> None:
        model = scheduler.tp_worker.model_runner.model
        if model is not self._model:
            self._model = model  # first, so that a model that cannot be wrapped is not tried at every forward
            self._wrapped = wrap_layers(model, self.ranges, self._is_compiling)

    def _known(self) -> Facts:
        if self._facts is None:
            self._facts = self._read_facts()
        return self._facts

    def _mark_rank(self) -> None:
        facts = self._known()  # no mark rather than one that gives every rank the same name
        if not self._proof:
            self._proof = self.ranges.quietly(self._read_proof) or "markers=unknown"
            logger.info("%s", facts.text(self._proof))
        self.ranges.mark(facts.text(f"{self._proof} layers={self._wrapped.text}"))

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
