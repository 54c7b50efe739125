"""The same call on several hosts at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def apart(call: Callable[[], _R]) -> _R:
    """The result of a call that is made in another thread, so that an interruption need not wait for its end."""
    return each([None], lambda _: call())[0]


def each(items: Sequence[_T], call: Callable[[_T], _R]) -> list[_R]:
    """The result of ``call`` for each item, in their order; all calls run at once and are waited for.

    The first error, in the order of the items, is raised once all have ended.  An interruption (Ctrl-C) is raised at
    once: the calls end by themselves, as their hosts are closed.
    """
    results: dict[int, _R] = {}
    errors: dict[int, BaseException] = {}

    def body(index: int) -> None:
        try:
            results[index] = call(items[index])
        except BaseException as error:  # raised again by the caller
            errors[index] = error

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(items))]
