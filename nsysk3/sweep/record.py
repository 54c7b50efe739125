"""``metadata/sweep.json``: what a sweep was asked for, what each layout's service was, and how far it got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsysk3.errors import InputError
from nsysk3.run.config import Settings
from nsysk3.run.files import write_text
from nsysk3.run.manifest import Cause
from nsysk3.run.redact import redact, redact_argv
from nsysk3.sweep.folder import Folder
from nsysk3.sweep.matrix import Layout

# Settings that change nothing a repeat measures; the requests and the concurrency are the matrix' own.
_APART = (
    "cluster.launcher", "cluster.address", "cluster.port", "cluster.dist_port", "cluster.scratch", "cluster.python",
    "cluster.ssh_options", "server.start_timeout_s", "server.stop_timeout_s", "load.request_timeout_s",
    "load.concurrency", "load.requests", "window.", "nsys.",
)  # fmt: skip


class Start(BaseModel):
    """One start of a layout's service."""

    model_config = ConfigDict(extra="allow")

    attempt: int
    run_id: str | None = None
    started: str | None = None
    startup_s: float | None = Field(default=None, description="Seconds from the start to a healthy server.")
    ended: str | None = None
    status: Literal["running", "done", "failed", "interrupted"] = "running"
    cause: Cause | None = None
    notes: list[str] = Field(default_factory=list)


class LayoutRecord(BaseModel):
    """One layout and what its server said about itself."""

    model_config = ConfigDict(extra="allow")

    pp: int = Field(ge=1)
    tp: int = Field(ge=1)
    ep: int = Field(default=1, ge=1)
    args: list[str] = Field(default_factory=list, description="What this layout's server got besides.")
    starts: list[Start] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict, description="What /server_info said that must not differ.")
    micro_batch: dict[str, Any] = Field(default_factory=dict)
    not_measured: dict[str, str] = Field(default_factory=dict, description="Null columns and why.")

    @property
    def layout(self) -> Layout:
        """As a layout."""
        return Layout(self.pp, self.tp, self.ep, tuple(self.args))


class Merged(BaseModel):
    """A sweep that was merged as a baseline, and how its settings compare."""

    model_config = ConfigDict(extra="allow")

    folder: str
    run_id: str | None = None
    same: list[str] = Field(default_factory=list)
    accepted: list[str] = Field(default_factory=list, description="Differences that --accept let pass.")
    not_known: list[str] = Field(default_factory=list)


class Record(BaseModel):
    """All of it; fields that this version does not know are kept."""

    model_config = ConfigDict(extra="allow")

    schema_version: int = 1
    nsysk3_version: str | None = None
    run_id: str | None = None
    status: Literal["running", "done", "failed", "interrupted"] = "running"
    created: str | None = None
    updated: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict, description="By dotted name, secrets left out.")
    requests: int | None = Field(default=40, ge=1, description="Of a repeat; null where there is no such file.")
    concurrency: list[int] = Field(default_factory=list)
    repeats: int = Field(default=3, ge=1)
    layouts: list[LayoutRecord] = Field(default_factory=list)
    accepted: list[str] = Field(default_factory=list, description="Items in which baselines may differ.")
    merged: list[Merged] = Field(default_factory=list, description="Filled in by reports.")
    not_measured: dict[str, str] = Field(default_factory=dict, description="Null columns and why.")
    notes: list[str] = Field(default_factory=list)

    def of(self, layout: Layout) -> LayoutRecord | None:
        """The record of a layout, whatever its arguments."""
        return next((each for each in self.layouts if each.layout.key == layout.key), None)

    def items(self) -> dict[str, Any]:
        """What must be equal for repeats to be comparable, by name."""
        known = {} if self.requests is None else {"requests": self.requests}
        return {name: value for name, value in self.settings.items() if not name.startswith(_APART)} | known


def flat_settings(settings: Settings) -> dict[str, Any]:
    """Every setting by its dotted name, as it may be kept: secrets are left out."""
    found: dict[str, Any] = {}
    for section, values in settings.model_dump(mode="json").items():
        for name, value in values.items():
            if section == "env":
                value = redact(name, str(value))
            elif isinstance(value, list):
                value = redact_argv([str(each) for each in value])
            found[f"{section}.{name}"] = value
    return found


def read_record(folder: Folder) -> Record | None:
    """The record of a sweep, None where there is none.  Raises InputError when it cannot be understood."""
    path = folder.manifest
    if not path.is_file():
        return None
    try:
        return Record.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not readable JSON ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where}: {first['msg']}") from error


def write_record(folder: Folder, record: Record) -> None:
    """Write it so that whoever reads it meanwhile gets the old or the new one whole."""
    make_room(folder.manifest)
    write_text(folder.manifest, record.model_dump_json(indent=1, exclude_defaults=True) + "\n")


def make_room(path: Path) -> None:
    """The folder of a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent}: cannot be made ({error.strerror})") from error
