"""What the doctor finds: lines, and what they mean for what one may want to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nsysk3.launch.checks import Check
from nsysk3.run.manifest import HostClock

State = Literal["ok", "warning", "cannot"]
HERE = ""
_STATES: dict[str, State] = {"ok": "ok", "note": "ok", "warning": "warning", "fatal": "cannot"}


@dataclass(frozen=True)
class Line:
    """One fact: ``where`` is a host, HERE is this machine as the reader of traces; ``fix`` is the way out.

    ``brief``: the text in a word or two, for when it is told again as a reason.
    """

    where: str
    name: str
    state: State
    text: str
    fix: str | None = None
    brief: str = ""


@dataclass(frozen=True)
class Ability:
    """Something one may want to do; ``works`` None: it was not looked at.  ``text``: with what, or why not."""

    name: str
    works: bool | None
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """All of it.  ``failed``: what was asked for by name and cannot work."""

    lines: tuple[Line, ...]
    abilities: tuple[Ability, ...]
    clocks: tuple[HostClock, ...] = ()
    failed: tuple[str, ...] = ()

    def works(self, name: str) -> bool:
        """Whether an ability is there."""
        return any(each.works for each in self.abilities if each.name == name)

    def to_document(self) -> dict[str, Any]:
        """For JSON; what is about this machine as the reader of traces has ``where`` null."""
        return {
            "lines": [
                {
                    "where": line.where or None,
                    "name": line.name,
                    "state": line.state,
                    "text": line.text,
                    "fix": line.fix,
                }
                for line in self.lines
            ],
            "abilities": [asdict(each) for each in self.abilities],
            "clocks": [each.model_dump(include={"host", "offset_ns", "uncertainty_ns"}) for each in self.clocks],
            "failed": list(self.failed),
        }


def line_of(check: Check) -> Line:
    """A check of preflight as a line: its problem, which has the way out in it, or what it is."""
    return Line(check.host, check.name, _STATES[check.level], check.problem or check.text, brief=check.text)


def cannot(lines: Iterable[Line], *names: str) -> list[Line]:
    """The lines that forbid something, all or those of some names."""
    return [line for line in lines if line.state == "cannot" and (not names or line.name in names)]
