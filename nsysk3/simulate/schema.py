"""The tables of Nsight exports: column names and declared types, as real files of each version have them."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from nsysk3.simulate.config import no_such

# What is asked for on the command line, and the version whose tables are written.
VERSIONS = {"2022.4": "2022.4", "2023.4": "2023.4", "2024.2": "2024.2", "2025.3": "2025.3", "2026.x": "2026.2"}
# Product version, schema version.
PRODUCTS = {
    "2022.4": ("2022.4.2.1", "3.0.0"),
    "2023.4": ("2023.4.4.54", "3.7.2"),
    "2024.2": ("2024.2.3.38", "3.11.1"),
    "2025.3": ("2025.3.2.0", "3.20.3"),
    "2026.2": ("2026.2.1.210", "3.25.0"),
}


def version_of(asked: str) -> str:
    """The version that ``--schema`` means.  Raises InputError for one that is not known."""
    if asked in PRODUCTS:
        return asked
    if asked not in VERSIONS:
        raise no_such("--schema", asked, VERSIONS)
    return VERSIONS[asked]


@cache
def tables(version: str) -> dict[str, dict[str, str]]:
    """Table to column to declaration (``INTEGER NOT NULL``), in the file's order."""
    stored = json.loads(files("nsysk3.simulate").joinpath("schema.json").read_text("utf-8"))
    return {
        table: dict(column.split(" ", 1) for column in declared.split(", "))
        for table, declared in stored[version].items()
    }


def create_statements(version: str) -> list[str]:
    """CREATE TABLE for every table of a version."""
    return [
        f"CREATE TABLE {table} ({', '.join(f'{name} {kind}' for name, kind in columns.items())})"
        for table, columns in tables(version).items()
    ]
