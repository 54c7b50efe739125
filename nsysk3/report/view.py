"""What the sections of a page look at: a result, its tables and the language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from nsysk3.report.blocks import Block, Prose, Section
from nsysk3.report.catalogue import Catalogue
from nsysk3.report.text import clean
from nsysk3.result import Result, ResultDocument

Rows = list[dict[str, Any]]
EMPTY = pl.DataFrame()


@dataclass(frozen=True)
class View:
    """One result in one language."""

    result: Result
    texts: Catalogue

    @property
    def document(self) -> ResultDocument:
        """result.json."""
        return self.result.document

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The result's tables."""
        return self.result.tables

    def table(self, name: str) -> pl.DataFrame:
        """A table, empty where the result has none of that name."""
        return self.tables.get(name, EMPTY)

    def rows(self, name: str) -> Rows:
        """A table as rows."""
        return self.table(name).to_dicts()

    @cached_property
    def world(self) -> dict[int, int]:
        """World rank by row number of the rank, as other tables name it."""
        return {row: rank.world_rank for row, rank in enumerate(self.document.ranks)}

    @cached_property
    def stages(self) -> dict[int, int]:
        """Stage by row number of the rank, of those that have one."""
        pipeline = self.table("pipeline")
        found = dict(pipeline.select("rank", "stage").iter_rows()) if pipeline.height else {}
        named = {row: rank.pp_rank for row, rank in enumerate(self.document.ranks) if rank.pp_rank is not None}
        return {**named, **found}

    @cached_property
    def stable(self) -> list[int]:
        """Row numbers of the stable ranks."""
        return [row for row, rank in enumerate(self.document.ranks) if rank.stable]

    @property
    def no_medians(self) -> Prose | None:
        """What is said in place of numbers over ranks; None where some rank is stable."""
        return None if self.stable else Prose(((self.texts("verdict.no_medians"), self.texts.lang),), kind="note")

    def rank_name(self, rank: int) -> str:
        """``stage 1`` where a stage is one rank, ``stage 1 · rank 5`` where it is several, else ``rank 5``."""
        number, stage = self.world.get(rank, rank), self.stages.get(rank)
        every = list(self.stages.values())
        if stage is None or len(set(every)) < 2:
            return self.texts("ui.rank", rank=number)
        if len(set(every)) == len(every):
            return self.texts("ui.stage", stage=stage)
        return self.texts("ui.stage_rank", stage=stage, rank=number)

    @cached_property
    def members(self) -> dict[str, str]:
        """Which ranks a communicator joins, as text: a reader knows ranks, not addresses."""
        table = self.table("collectives")
        if table.is_empty():
            return {}
        found = table.group_by("communicator").agg(pl.col("rank").unique().sort())
        named = {
            str(name): self.texts("ui.members", ranks=_spans([self.world.get(rank, rank) for rank in ranks]))
            for name, ranks in found.sort("communicator").iter_rows()
        }
        twice = {text for text in named.values() if list(named.values()).count(text) > 1}
        return {name: f"{text} ({clean(name, 40)})" if text in twice else text for name, text in named.items()}

    def group_name(self, group: str) -> str:
        """The analysis' name of a group of ranks in this language."""
        if group.startswith("stage "):
            return self.texts("ui.stage", stage=group.removeprefix("stage "))
        return self.texts("ui.all_ranks") if group == "all ranks" else group

    def section(self, identity: str, *blocks: Block | None) -> Section:
        """A section with its title and lede from the catalogue; absent blocks are left out."""
        return Section(
            identity,
            self.texts(f"section.{identity}.title"),
            self.texts.get(f"section.{identity}.lede", ""),
            tuple(block for block in blocks if block is not None),
        )


def _spans(numbers: list[int]) -> str:
    """Sorted numbers with neighbours drawn together: ``0-3, 8``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in spans)
