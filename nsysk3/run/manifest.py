"""``run.json``: what was run, on what, how, and how far it got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsysk3.errors import InputError

MANIFEST_NAME = "run.json"


class RankEntry(BaseModel):
    """Where one rank ran.  ``host`` and ``device`` (CUDA ordinal on the node) find it in a trace."""

    model_config = ConfigDict(extra="allow")

    world_rank: int
    host: str
    device: int
    pp: int = 0
    tp: int = 0
    ep: int | None = None


class Topology(BaseModel):
    """The parallel layout: ``pp`` stages of ``tp`` ranks."""

    model_config = ConfigDict(extra="allow")

    pp: int = Field(ge=1)
    tp: int = Field(ge=1)
    ep: int = Field(default=1, ge=1)
    nnodes: int = Field(default=1, ge=1)


class Manifest(BaseModel):
    """A run directory's manifest; fields that this version does not know are kept."""

    model_config = ConfigDict(extra="allow")

    schema_version: int = 1
    run_id: str | None = None
    status: str = "unknown"
    engine: str | None = None
    simulated: str | None = Field(default=None, description="Set when no GPU made these traces; says what did.")
    topology: Topology | None = None
    hosts: list[str] = Field(default_factory=list)
    ranks: list[RankEntry] = Field(default_factory=list)
    server: dict[str, Any] = Field(default_factory=dict)
    load: dict[str, Any] = Field(default_factory=dict)
    nsys: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    times: dict[str, Any] = Field(default_factory=dict)


def read_manifest(run_dir: Path) -> Manifest | None:
    """The manifest of a run directory, None where there is none.  Raises InputError when it cannot be understood."""
    path = run_dir / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not a readable JSON manifest ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where}: {first['msg']}") from error
