"""NVTX ranges that can fail without anyone noticing but the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

logger = logging.getLogger("nsysk3.plugin")
Result = TypeVar("Result")


class Nvtx(Protocol):
    """What of torch.cuda.nvtx is used."""

    def range_push(self, msg: str) -> Any: ...  # noqa: D102
    def range_pop(self) -> Any: ...  # noqa: D102
    def range_start(self, msg: str) -> Any: ...  # noqa: D102
    def range_end(self, range_id: Any) -> Any: ...  # noqa: D102
    def mark(self, msg: str) -> Any: ...  # noqa: D102


class Ranges:
    """The calls to NVTX: what they or the texts' makers raise is logged once a cause and goes no further."""

    def __init__(self, nvtx: Nvtx) -> None:
        self._nvtx = nvtx
        self._told: set[str] = set()

    def quietly(self, work: Callable[..., Result], *args: Any) -> Result | None:
        """``work(*args)``, or None where it raises."""
        try:
            return work(*args)
        except Exception as error:
            cause = f"{getattr(work, '__name__', work)}: {type(error).__name__}"
            if cause not in self._told:
                self._told.add(cause)
                logger.warning("nsysk3 marker left out (%s: %s)", cause, error, exc_info=True)
            return None

    def push(self, text: str) -> bool:
        """Open a range on this thread; True when it must be popped."""
        return self.quietly(self._push, text) is True

    def _push(self, text: str) -> bool:
        self._nvtx.range_push(text)
        return True

    def pop(self) -> None:
        """Close the innermost range of this thread."""
        self.quietly(self._nvtx.range_pop)

    def mark(self, text: str) -> None:
        """A moment on this thread."""
        self.quietly(self._nvtx.mark, text)

    def start(self, text: str) -> Any:
        """Open a range that need not nest; its handle goes to ``end`` (None where it could not be opened)."""
        return self.quietly(self._nvtx.range_start, text)

    def end(self, handle: Any) -> None:
        """Close what ``start`` opened."""
        if handle is not None:
            self.quietly(self._nvtx.range_end, handle)

    def around(
        self,
        text: Callable[..., str],
        original: Callable[..., Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Result:
        """``original`` inside a range named ``text(args, kwargs)``; without one where no name can be made."""
        name = self.quietly(text, args, kwargs)
        opened = name is not None and self.push(name)
        try:
            return original(*args, **kwargs)
        finally:
            if opened:
                self.pop()
