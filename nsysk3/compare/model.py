"""The shape of a comparison: what ``nsysk3 compare --json`` prints and every renderer reads.

docs/comparison.schema.json is made from these models: ``schema_text()``.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

Scope = Literal["window", "forward", "1k_tokens"]
Unit = Literal["ns", "count", "share"]
Group = Literal[
    "headline", "forward", "comm", "allreduce", "scatter", "p2p", "stage", "time", "launches", "apart"
]  # fmt: skip
Verdict = Literal["lower", "higher", "no difference shown", "not enough samples", "not known"]
Status = Literal["same", "differs", "not known"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Layout(_Model):
    """How the GPUs of a run were divided.  Null: nothing says."""

    pp: int | None = Field(description="Pipeline stages.")
    tp: int | None = Field(description="Tensor-parallel ranks of a stage.")
    ep: int | None = Field(description="Expert-parallel ranks.")
    ranks: int = Field(description="Ranks in the traces.")
    source: Literal["manifest", "inferred"] = Field(description="inferred: from the ranks and stages of the trace.")
    text: str = Field(description="Such as PP8 / TP4 / EP4.")
    note: str | None = Field(description="What is doubtful about it.")


class RunSide(_Model):
    """One of the runs."""

    label: str = Field(description="As --label says.")
    layout: Layout
    manifest: bool = Field(description="Whether the run has a manifest.")
    simulated: str | None = Field(description="Set when no GPU made the traces.")
    window: str = Field(description="The window used.")
    window_reason: str | None = Field(description="Why it is not the one asked for.")
    stable_ranks: int = Field(description="Ranks in the medians.")
    left_out: list[str] = Field(description="Ranks that are not, with the reason.")
    forwards: float | None = Field(description="Whole forwards in the window, median over stable ranks.")
    tokens: float | None = Field(description="Input tokens of those forwards, median over stable ranks.")
    gpu_name: str | None = Field(description="GPU model.")
    clock_uncertainty_ns: int | None = Field(description="Largest uncertainty of a time difference between reports.")


class Fact(_Model):
    """Something two runs should have in common."""

    name: str = Field(description="Where the manifest has it.")
    label: str = Field(description="What it is called.")
    base: str | None = Field(description="Value of the base.")
    other: str | None = Field(description="Value of the other run.")
    status: Status = Field(description="Whether the two agree.")


class Comparability(_Model):
    """What two runs have in common besides PP and TP, and what they do not."""

    base: str = Field(description="Label.")
    other: str = Field(description="Label.")
    facts: list[Fact]
    differences: list[str] = Field(description="What differs besides PP and TP, such as EP4 -> EP2.")
    unknown: list[str] = Field(description="Labels of facts that nothing tells for one run or both.")
    single_variable: bool | None = Field(
        description="True: only PP/TP differ or, at the same layout, at most one setting; null: not known."
    )
    same_layout: bool | None = Field(description="Null where a layout is not known.")
    paired: bool = Field(description="Rank k is held against rank k: same layout, same ranks.")
    summary: list[str] = Field(description="The same in words.")


class Value(_Model):
    """A metric of one run: median over stable ranks (of each rank's median over its forwards, where it has samples)."""

    value: float | None = Field(description="In the row's unit.")
    low: float | None = Field(description="Lower end of the bootstrap 95 % interval.")
    high: float | None = Field(description="Upper end.")
    ranks: int = Field(description="Ranks with a value.")
    forwards: int = Field(description="Forwards that were samples; 0 where each rank gives one number.")
    n: int = Field(description="Samples: ranks x forwards that have a value.")
    reason: str | None = Field(description="Why the value or its interval is null.")


class Delta(_Model):
    """The change of one metric from one run to another."""

    base: str = Field(description="Label.")
    other: str = Field(description="Label.")
    change: float | None = Field(description="other - base.")
    low: float | None = Field(description="Lower end of its bootstrap 95 % interval.")
    high: float | None = Field(description="Upper end.")
    change_share: float | None = Field(description="other / base - 1; null where the base is 0.")
    low_share: float | None = Field(description="Lower end of the interval of change_share.")
    high_share: float | None = Field(description="Upper end.")
    verdict: Verdict = Field(description="Whether the interval of the change excludes 0, and on which side.")
    like_for_like: bool = Field(description="False: the two values do not measure the same thing.")
    reason: str | None = Field(description="Why something is null, or what weakens it.")

    @property
    def doubted(self) -> bool:
        """Whether there is a change but nothing to say of it: the two values do not measure the same thing."""
        return not self.like_for_like and self.change is not None and self.verdict == "not known"


class Row(_Model):
    """One metric per window, per forward or per 1,000 input tokens, of every run."""

    metric: str = Field(description="Name, as docs/metrics.md defines it.")
    label: str = Field(description="What pages call it.")
    unit: Unit = Field(description="Of values and changes.")
    group: Group = Field(
        description="headline: first table; apart: not like for like; comm: of those that are apart across PP degrees, "
        "where all runs have one."
    )
    scope: Scope = Field(description="Per what.")
    better: Literal["lower", "higher"] | None = Field(description="Which way is good, null where neither.")
    samples: str = Field(description="What was sampled.")
    values: list[Value] = Field(description="Base first, then the others.")
    deltas: list[Delta] = Field(description="Each other run against the base.")
    steps: list[Delta] = Field(description="Each run against the one before it; empty for two runs.")
    why_apart: str | None = Field(description="Why not like for like, where some delta is not.")
    note: str | None = Field(description="What a reader must know.")

    @property
    def doubted(self) -> bool:
        """Whether a change of it is."""
        return any(delta.doubted for delta in (*self.deltas, *self.steps))


class Step(_Model):
    """Neighbours on a ladder of runs."""

    base: str = Field(description="Label.")
    other: str = Field(description="Label of the next deeper.")
    comparability: Comparability


class Outcome(_Model):
    """What a gate of --fail-on found for one of the other runs."""

    gate: str = Field(description="The expression.")
    state: Literal["passed", "failed", "undecided"] = Field(
        description="failed: the whole interval lies beyond the limit; undecided, which fails nothing: see reason."
    )
    reason: str | None = Field(description="Why it is undecided, or what weakens it.")
    text: str = Field(description="All of it in words, as stderr has it.")
    base: str | None = Field(description="Label; null where the comparison has no such row.")
    other: str | None = Field(description="Label; null like base.")
    metric: str = Field(description="Of the expression.")
    scope: Scope | None = Field(description="Of the row that was judged; null where there is none.")
    of: Literal["share", "change", "value"] = Field(
        description="What value, low, high and limit are: share: the relative change, 0.1 for 10 %; change: the "
        "absolute one; value: the other run's own number, both in the row's unit (ns, count or share)."
    )
    value: float | None = Field(description="What the comparison has.")
    low: float | None = Field(description="Lower end of its bootstrap 95 % interval.")
    high: float | None = Field(description="Upper end.")
    side: Literal["<", ">"] = Field(description="On which side of the limit it fails.")
    limit: float = Field(description="The threshold of the expression.")


class Comparison(_Model):
    """Two runs, or a ladder of them."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="Of this document.")
    nsysk3_version: str = Field(description="What made it.")
    base: RunSide
    others: list[RunSide]
    comparability: list[Comparability] = Field(description="Each other run against the base.")
    ladder: list[Step] = Field(description="Each run against the one before it; empty for two runs.")
    rows: list[Row]
    verdict: list[str] = Field(description="Two sentences: what changed, and what limits that.")
    notes: list[str] = Field(description="What a reader must know.")
    gates: list[Outcome] = Field(
        default_factory=list, description="Outcomes of --fail-on, one a gate and other run; empty without."
    )

    @property
    def labels(self) -> list[str]:
        """Labels of all runs, base first."""
        return [self.base.label, *(other.label for other in self.others)]

    def row(self, metric: str, scope: Scope | None = None) -> Row | None:
        """The row of a metric; without ``scope`` per forward where every run has it, else the first there is.

        A row per window of which something can be said goes before one per forward of which nothing can.
        """
        found = [row for row in self.rows if row.metric == metric and scope in (None, row.scope)]
        whole = [row for row in found if row.scope == "forward" and all(v.value is not None for v in row.values)]
        if whole and whole[0].doubted:
            windows = [row for row in found if row.scope == "window" and not row.doubted]
            whole = [row for row in windows if all(v.value is not None for v in row.values)] or whole
        return next(iter([*whole, *found] if scope is None else found), None)

    def to_json(self) -> str:
        """The document as text."""
        return self.model_dump_json(indent=1) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema of the document."""
    return Comparison.model_json_schema(mode="serialization")


def schema_text() -> str:
    """The same as docs/comparison.schema.json has it."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"
