"""Who does the steps: this process, or a team of others that can lose members."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.run.inputs import TraceInput
from nsysk3.run.remote import RemotePath
from nsysk3.run.scratch import NoRoomError, to_its_end
from nsysk3.run.words import counted
from nsysk3.scale import wire
from nsysk3.scale.shelf import Shelf, memory_share
from nsysk3.scale.work import Done, Say, Step, peak

# A report whose worker died is given to another so often.
RETRIES = 2
# Of the machine's memory, what states may take before they are written to scratch files.
_HELD_SHARE = 0.25


@dataclass
class Account:
    """What the steps cost: bytes that travelled, the most memory of each worker (bytes), steps done again."""

    sent: int = 0
    received: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    repeated: int = 0

    def __str__(self) -> str:
        """One line, as a terminal shows it."""
        again = f"; {counted(self.repeated, 'step')} done again" if self.repeated else ""
        most = max(self.peaks.values(), default=0)
        return (
            f"{counted(len(self.peaks), 'worker')}: {self.sent / 1e6:,.1f} MB sent, "
            f"{self.received / 1e6:,.1f} MB received, at most {most / 2**30:.2f} GiB in a worker, "
            f"{peak() / 2**30:.2f} GiB here{again}"
        )


@dataclass(frozen=True)
class Answers:
    """What a step gave, by report, and the reports that it could not be done on."""

    out: dict[int, Any]
    lost: dict[int, NsysK3Error]


class Crew(ABC):
    """Does one step on every report of a run, and keeps each report's state for the next step.

    A crew serves one run at a time: ``begin`` forgets what was before.  Closing it removes all scratch files; so does
    the end of the process, where it was forgotten.
    """

    def __init__(self) -> None:
        self.account = Account()
        self.steps = 0
        self._closed = False

    def begin(self) -> None:
        """Start over with the first step.  Raises InputError where the crew is closed."""
        if self._closed:
            raise InputError("this crew is closed: nsysk3.crew_of() makes another")
        self.steps = 0

    def reachable(self, trace: TraceInput) -> TraceInput:
        """The trace by a path that means the same to every worker."""
        return trace

    @abstractmethod
    def run(self, step: Step, told: Mapping[int, Any], titles: Mapping[int, str], say: Say) -> Answers:
        """Do ``step`` on the reports of ``told``, with what each is told; ``titles``: what to say meanwhile.

        Raises MissingToolError where no report can be worked on, for want of workers or of room.
        """

    def close(self) -> None:
        """Let the workers go and remove all scratch files, a second Ctrl-C or not."""
        self._closed = True
        to_its_end(self._close)

    @abstractmethod
    def _close(self) -> None:
        """What ``close`` has to do; again is no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Alone(Crew):
    """This process, one report after the other."""

    def __init__(self, hold: int | None = None) -> None:
        super().__init__()
        self._shelf = Shelf(hold=memory_share(_HELD_SHARE) if hold is None else hold)

    def run(self, step: Step, told: Mapping[int, Any], titles: Mapping[int, str], say: Say) -> Answers:
        """See Crew."""
        answers = Answers({}, {})
        for report, each in told.items():
            say(titles[report])
            state = self._shelf.get(report, self.steps - 1) if self.steps else {}
            if state is None:
                raise MissingToolError("scratch files went away while they were needed: who cleans $TMPDIR?")
            try:
                state, answers.out[report] = step(state, each, say)
            except NoRoomError:
                raise
            except NsysK3Error as error:
                answers.lost[report] = error
            else:
                self._shelf.put(report, self.steps, state)
            del state
        self.account.peaks["here"] = peak()
        self.steps += 1
        return answers

    def _close(self) -> None:
        self._shelf.close()


class Team(Crew):
    """Other processes, one step of one report at a time each.

    A member that dies takes no report along: another makes that report's state again from its source.
    """

    # Whether every member sees what any has put on its shelf.
    shared = False
    retries = RETRIES

    def __init__(self) -> None:
        super().__init__()
        self._reports: int | None = None  # of the step under way
        self._titles: Mapping[int, str] = {}
        self._calls: dict[int, list[bytes]] = defaultdict(list)
        self._holder: dict[int, str] = {}

    def begin(self) -> None:
        """See Crew."""
        super().begin()
        self._calls.clear()
        self._holder.clear()

    def reachable(self, trace: TraceInput) -> TraceInput:
        """See Crew."""
        if isinstance(trace.path, RemotePath) and trace.path.url.startswith("memory:"):
            raise InputError(
                f"{trace.path}: memory:// is known to one process only: analyze it without --workers and --scheduler"
            )
        return trace

    @abstractmethod
    def members(self) -> Sequence[str]:
        """Who can be given work, by name.  Raises MissingToolError where nobody can, and nobody will."""

    @abstractmethod
    def give(self, member: str, report: int, number: int, calls: Sequence[bytes]) -> None:
        """Let a member do a step (see work)."""

    @abstractmethod
    def answered(self) -> Iterator[tuple[str, int, Done | None]]:
        """Wait for answers: (member it was given to, report, answer; None where the member died)."""

    def run(self, step: Step, told: Mapping[int, Any], titles: Mapping[int, str], say: Say) -> Answers:
        """See Crew."""
        answers = Answers({}, {})
        self._reports, self._titles = len(told), titles
        for report, each in told.items():
            self._calls[report].append(wire.dumps((step, each)))
        waiting = list(told)
        whole: set[int] = set()  # to be made from the source
        died: Counter[int] = Counter()
        busy: dict[str, int] = {}
        while waiting or busy:
            members = self.members()  # also while all are busy: they may be gone
            for member in [each for each in members if each not in busy]:
                chosen = self._next(member, waiting, members)
                if chosen is None:
                    continue
                waiting.remove(chosen)
                calls = self._calls[chosen] if chosen in whole else self._calls[chosen][-1:]
                self.account.sent += sum(map(len, calls))
                busy[member] = chosen
                self.give(member, chosen, self.steps, calls)
            for member, report, done in self.answered():
                busy.pop(member, None)
                if done is None:
                    died[report] += 1
                    if died[report] > self.retries:
                        answers.lost[report] = self._gave_up()
                        continue
                elif not done.missing:
                    self.account.peaks[done.worker] = max(done.peak, self.account.peaks.get(done.worker, 0))
                if done is None or done.missing:
                    self.account.repeated += 1
                    self._holder.pop(report, None)
                    whole.add(report)
                    waiting.append(report)
                elif isinstance(error := done.raised, NoRoomError):
                    raise NoRoomError(f"{done.worker}: {error}")
                elif error is not None:
                    answers.lost[report] = error
                else:
                    assert done.out is not None
                    self.account.received += len(done.out)
                    self._holder[report] = member
                    answers.out[report] = wire.loads(done.out)
                    say(f"{titles[report]}: {len(answers.out)} of {len(told)}")
        self.steps += 1
        return answers

    def _next(self, member: str, waiting: Sequence[int], members: Sequence[str]) -> int | None:
        """The report to give a member: one whose state it has, else one whose state nobody has."""
        if self.shared:
            return next(iter(waiting), None)
        mine = next((report for report in waiting if self._holder.get(report) == member), None)
        lost = (report for report in waiting if self._holder.get(report) not in members)
        return mine if mine is not None else next(lost, None)

    def _gave_up(self) -> NsysK3Error:
        most = max(self.account.peaks.values(), default=0) / 2**30
        return MissingToolError(
            f"every worker that took it died (killed for want of memory? others had up to {most:.1f} GiB): give it one "
            "with more memory, or leave it out"
        )
