"""A result in memory, on disk and as JSON; it round-trips."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import polars as pl
from pydantic import ValidationError

from nsysk3.errors import InputError, MissingToolError
from nsysk3.result.model import SCHEMA_VERSION, ResultDocument

if TYPE_CHECKING:
    from nsysk3.report.figures import Figures

RESULT_NAME = "result.json"
# Tables small enough for result.json; the others are parquet only.
IN_DOCUMENT = frozenset(
    {
        "budget", "budget_summary", "roles", "categories", "unclassified", "top_kernels", "pipeline", "bandwidth",
        "stragglers", "p2p_unmatched", "layer_rows", "unattributed",
    }
)  # fmt: skip
_AS_CSV = frozenset({"rank_metrics", "nsys_device_metrics"})


@dataclass(frozen=True)
class Result:
    """What one analysis found.

    ``document`` is result.json; ``tables`` are polars frames by name, among them ``rank_metrics`` (one row a rank),
    ``budget`` (rank, bucket, ns), ``roles``, ``categories`` and ``kernels``.  ``.to_pandas()`` of any frame hands it to
    a notebook.
    """

    document: ResultDocument
    tables: Mapping[str, pl.DataFrame]

    def __getattr__(self, name: str) -> pl.DataFrame:
        """Tables read as attributes: ``result.rank_metrics``."""
        tables: Mapping[str, pl.DataFrame] = self.__dict__.get("tables", {})
        if name in tables:
            return tables[name]
        raise AttributeError(f"no table {name!r}; this result has {', '.join(sorted(tables))}")

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self.tables])

    @property
    def figures(self) -> Figures:
        """Plotly figures for notebooks: ``result.figures.time_budget()``."""
        from nsysk3.report.figures import Figures

        return Figures(self)

    def to_json(self) -> str:
        """result.json as text."""
        return self.document.model_dump_json(indent=1) + "\n"

    def save(self, directory: str | Path) -> Path:
        """Write result.json, and every table as parquet (rank and device metrics as CSV too); the directory's path.

        All of it is written beside and then renamed, result.json last: a full disk leaves the folder as it was, and a
        killed command no half file, and no result.json that speaks of tables that are not there.
        """
        out = Path(directory)
        made = False
        try:
            if out.exists() and not out.is_dir():
                raise MissingToolError(f"{out}: results cannot be written here (not a folder)")
            made = not out.exists()
            out.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".nsysk3-", suffix=".part", dir=out, ignore_cleanup_errors=True) as name:
                for file in self._write(Path(name)):
                    file.replace(out / file.name)
        except (OSError, pl.exceptions.PolarsError) as error:  # polars calls a full disk a ComputeError
            if made:
                with suppress(OSError):
                    out.rmdir()
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise MissingToolError(f"{out}: results cannot be written here ({reason})") from error
        return out

    def _write(self, folder: Path) -> list[Path]:
        written = []
        for name, table in self.tables.items():
            written.append(folder / f"{name}.parquet")
            table.write_parquet(written[-1])
            if name in _AS_CSV:
                written.append(folder / f"{name}.csv")
                table.write_csv(written[-1])
        written.append(folder / RESULT_NAME)
        written[-1].write_text(self.to_json(), "utf-8")
        return written

    @classmethod
    def load(cls, directory: str | Path) -> Result:
        """Read what ``save`` wrote.  Raises InputError when it is not there, damaged or of another schema version."""
        out = Path(directory)
        path = out / RESULT_NAME
        try:
            raw = json.loads(path.read_text("utf-8"))
            version = raw.get("schema_version") if isinstance(raw, dict) else None
            if version != SCHEMA_VERSION:
                raise InputError(f"{path}: result schema {version}, this nsysk3 reads {SCHEMA_VERSION}; analyze again")
            document = ResultDocument.model_validate(raw)
            tables = {file.stem: pl.read_parquet(file) for file in sorted(out.glob("*.parquet"))}
        except (OSError, ValueError, ValidationError, pl.exceptions.PolarsError) as error:
            raise InputError(f"{path}: not a readable result ({str(error).splitlines()[0]}); analyze again") from error
        return cls(document, tables)


def rows(table: pl.DataFrame) -> list[dict[str, Any]]:
    """A table as JSON-ready rows."""
    return table.to_dicts()
