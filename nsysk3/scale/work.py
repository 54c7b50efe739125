"""One step on one report, wherever it runs."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.run.scratch import NoRoomError, scratch_under
from nsysk3.scale import wire
from nsysk3.scale.shelf import Shelf, State

Say = Callable[[str], None]
# From the state of a report and what the step is told to its next state and what the others need to know.
Step = Callable[[State, Any, Say], tuple[State, Any]]

# Of errors, the most special first.
_KINDS = (NoRoomError, MissingToolError, InputError)


@dataclass(frozen=True)
class Done:
    """What a worker answers.

    ``out``: the step's answer (see wire), None where there is none: because of ``error`` (its kind and text), or
    because the state before the step is not where this worker looks and has to be made again (``missing``).
    ``worker``, ``peak``: who answers, and the most memory it ever had, bytes.
    """

    out: bytes | None
    error: tuple[type[NsysK3Error], str] | None
    missing: bool
    worker: str
    peak: int

    @property
    def raised(self) -> NsysK3Error | None:
        """``error`` as it was."""
        return None if self.error is None else self.error[0](self.error[1])


def work(shelf: Shelf, report: int, number: int, calls: Sequence[bytes]) -> Done:
    """Do step ``number`` of a report.

    ``calls``: (step, arguments) as bytes, of that step alone, or of all from the first to it, which makes the report's
    state again from its source.
    """
    first = number + 1 - len(calls)
    state: State | None = {} if first == 0 else shelf.get(report, number - 1)
    if state is None:
        return Done(None, None, True, name(), peak())
    out: Any = None
    before = scratch_under.set(shelf.folder)
    try:
        for call in calls:
            step, told = wire.loads(call)
            state, out = step(state, told, _silent)
        shelf.put(report, number, state)
    except NsysK3Error as error:
        kinds = (kind for kind in _KINDS if isinstance(error, kind))  # of no class that the other side lacks
        return Done(None, (next(kinds, InputError), str(error)), False, name(), peak())
    except MemoryError:
        return Done(None, (MissingToolError, "not enough memory for it on its worker"), False, name(), peak())
    finally:
        scratch_under.reset(before)
    del state
    return Done(wire.dumps(out), None, False, name(), peak())


def name() -> str:
    """This process among all: host and process number."""
    return f"{socket.gethostname()}:{os.getpid()}"


def peak() -> int:
    """Most memory that this process ever had, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tell(text: str) -> None:
    """Say on stderr what holds the run up."""
    print(f"nsysk3: {text}", file=sys.stderr, flush=True)


def _silent(_: str) -> None:
    pass
