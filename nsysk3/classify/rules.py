"""Loads kernel rules and applies them to kernel names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from nsysk3.classify.gputrc2graph import read_gputrc2graph
from nsysk3.classify.rule import COMM_ROLES, ROLES, Rule, compile_pattern
from nsysk3.errors import InputError

# Demangled template names reach 100 kB and more; every name known is decided by its beginning, and the cap bounds what
# a slow regular expression can cost.
SEARCHED_CHARACTERS = 4096

_REQUIRED_KEYS = ("pattern", "category", "role")
_KEYS = (*_REQUIRED_KEYS, "note")

_NCCL_OPS = {
    "ncclAllReduce": ("allreduce", "AR"),
    "ncclReduceScatter": ("reduce_scatter", "RS"),
    "ncclAllGather": ("all_gather", "AG"),
    "ncclAllGatherV": ("all_gather", "AG"),
    "ncclAlltoAll": ("all_to_all", "ALLTOALL"),
    "ncclAllToAll": ("all_to_all", "ALLTOALL"),
    "ncclAllToAllv": ("all_to_all", "ALLTOALL"),
    "ncclSend": ("p2p", "SENDRECV"),
    "ncclRecv": ("p2p", "SENDRECV"),
    "ncclBroadcast": ("broadcast", "BCAST"),
    "ncclBcast": ("broadcast", "BCAST"),
    "ncclReduce": ("comm_other", "REDUCE"),
    "ncclGather": ("comm_other", "GATHER"),
    "ncclScatter": ("comm_other", "SCATTER"),
    "ncclPutSignal": ("comm_other", "PUT_SIGNAL"),
    "ncclSignal": ("comm_other", "PUT_SIGNAL"),
    "ncclWaitSignal": ("comm_other", "WAIT_SIGNAL"),
}


@dataclass(frozen=True)
class Match:
    """The verdict on one kernel name; `rule` is None when no rule matched (role compute, category UNCLASSIFIED)."""

    role: str
    category: str
    rule: Rule | None


UNCLASSIFIED = Match("compute", "UNCLASSIFIED", None)


@dataclass(frozen=True)
class Hit:
    """One rule that matches a name: its place in the whole ordered list (from 1) and the part of the name it met."""

    index: int
    rule: Rule
    text: str
    span: tuple[int, int]

    def __str__(self) -> str:
        begin, end = self.span
        return (
            f"rule {self.index} ({self.rule.source}) {self.rule.category}/{self.rule.role}"
            f" {self.rule.pattern!r} matches {self.text[begin:end]!r} at {begin}-{end}"
        )


@dataclass(frozen=True)
class Explanation:
    """Why a name is classified as it is: the name as searched, the verdict, the winning rule and those it beat."""

    name: str
    match: Match
    winner: Hit | None
    also: tuple[Hit, ...]

    def __str__(self) -> str:
        lines = [f"name      {self.name!r}", f"verdict   {self.match.category}, role {self.match.role}"]
        lines.append(f"because   {self.winner or 'no rule matches'}")
        if self.winner and self.winner.rule.note:
            lines.append(f"note      {self.winner.rule.note}")
        if self.winner and self.winner.rule.role != self.match.role:
            lines.append("role      taken from the shipped rules, which know this kernel as communication")
        lines += [f"also      {hit}" for hit in self.also]
        return "\n".join(lines)


class RuleSet:
    """An ordered list of rules, the user's first; the first one that matches a name wins.

    `rules` are the rules in order and `notes` what was left out while loading, one line each.  Raises InputError when
    a rule's pattern is not a regular expression.
    """

    def __init__(self, rules: Iterable[Rule], notes: Iterable[str] = ()) -> None:
        self.rules = tuple(rules)
        self.notes = tuple(notes)
        self._compiled = [
            (index, rule, compile_pattern(rule.pattern, rule.source)) for index, rule in enumerate(self.rules, start=1)
        ]

    @classmethod
    def load(cls, user_file: Path | None = None) -> RuleSet:
        """The shipped rules, after those of `user_file` if one is given.

        A user's file is TOML like the shipped one, or a gputrc2graph category file (told by `.json` or a leading
        brace).  Raises InputError, naming the file and the rule, for a file that cannot be read or used.
        """
        rules = list(_shipped())
        if user_file is None:
            return cls(rules)
        text = _read_text(user_file)
        if user_file.suffix.lower() == ".json" or text.lstrip().startswith("{"):
            user_rules, notes = read_gputrc2graph(text, str(user_file))
            return cls(user_rules + rules, notes)
        return cls(_read_toml(text, str(user_file)) + rules)

    def match(self, short: str, demangled: str | None) -> Match:
        """The role and category of a kernel with this short name and, when the trace has it, this demangled name.

        Each rule is tried on the demangled name and then on the short one.  Never raises: a name that no rule
        matches is compute, UNCLASSIFIED.
        """
        hits = self._hits(short, demangled)
        return self._verdict(next(hits, None), hits)

    def explain(self, name: str) -> Explanation:
        """Why `name` (best given demangled) gets its verdict; `str()` of the result is fit for a terminal."""
        hits = list(self._hits(name, None))
        winner = hits[0] if hits else None
        return Explanation(name[:SEARCHED_CHARACTERS], self._verdict(winner, hits[1:]), winner, tuple(hits[1:]))

    def _hits(self, short: str, demangled: str | None) -> Iterator[Hit]:
        names = dict.fromkeys(name[:SEARCHED_CHARACTERS] for name in (demangled, short) if name)
        for index, rule, regex in self._compiled:
            for name in names:
                if found := regex.search(name):
                    yield Hit(index, rule, name, found.span())
                    break

    @staticmethod
    def _verdict(winner: Hit | None, later: Iterable[Hit]) -> Match:
        if winner is None:
            return UNCLASSIFIED
        role = winner.rule.role
        if winner.rule.shipped_role_wins:
            shipped = next((hit.rule.role for hit in later if not hit.rule.shipped_role_wins), role)
            role = shipped if shipped in COMM_ROLES or shipped == "fused" else role
        return Match(role, winner.rule.category, winner.rule)


def nccl_op_role(op_name: str) -> tuple[str, str] | None:
    """Role and category of an NCCL operation by the name of its NVTX range (`ncclAllReduce`, `ncclSend`, ...).

    For kernels whose symbol does not tell (`ncclDevKernel_Generic`) and for collectives that run as copies.  None for
    a range that moves no data, such as `ncclGroupStart` or `ncclCommInitRank`.
    """
    return _NCCL_OPS.get(op_name)


@cache
def _shipped() -> tuple[Rule, ...]:
    text = resources.files("nsysk3.classify").joinpath("rules.toml").read_text(encoding="utf-8")
    return tuple(_read_toml(text, "nsysk3 rules.toml"))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: a rules file must be UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise InputError(f"{file}: cannot read the rules file: {error.strerror}") from None


def _read_toml(text: str, file: str) -> list[Rule]:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{file}: not valid TOML: {error}") from None
    tables = document.get("rule")
    if not isinstance(tables, list) or not tables or len(document) != 1:
        raise InputError(f"{file}: a rules file holds [[rule]] tables and nothing else")
    return [_rule_of_table(table, f"{file} rule {number}") for number, table in enumerate(tables, start=1)]


def _rule_of_table(table: object, source: str) -> Rule:
    if not isinstance(table, dict):
        raise InputError(f"{source}: must be a [[rule]] table")
    if unknown := [key for key in table if key not in _KEYS]:
        raise InputError(f"{source}: unknown key {unknown[0]!r}; a rule has {', '.join(_KEYS)}")
    for key in _REQUIRED_KEYS:
        if key not in table:
            raise InputError(f"{source}: missing key {key!r}")
    for key, value in table.items():
        if not isinstance(value, str) or not (value or key == "note"):
            raise InputError(f"{source}: {key} must be non-empty text, not {value!r}")
    if table["role"] not in ROLES:
        raise InputError(f"{source}: unknown role {table['role']!r}; one of {', '.join(ROLES)}")
    return Rule(table["pattern"], table["category"], table["role"], source, table.get("note", ""))
