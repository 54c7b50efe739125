"""``run.json``: what was run, on what, how, and how far it got."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from nsysk3.errors import InputError
from nsysk3.run.files import write_text
from nsysk3.run.remote import AnyPath
from nsysk3.run.words import ranks_in_words

MANIFEST_NAME = "run.json"
_SAID_NAME = "server_info.json"
# What a server decides by itself where nobody asked, and which a comparison must know.
SAID = ("moe_runner_backend", "moe_a2a_backend", "attention_backend", "disable_radix_cache", "mem_fraction_static")

# How far a run got, in order, then how it can end.  docs/launching.md says what each means.
Status = Literal[
    "planned", "preflight", "starting", "healthy", "warming", "loading", "window", "draining", "stopping", "collecting",
    "exported", "analysed", "done", "failed", "interrupted",
]  # fmt: skip
ENDED: frozenset[Status] = frozenset({"done", "failed", "interrupted"})


class RankEntry(BaseModel):
    """Where one rank ran.  ``host`` and ``device`` (CUDA ordinal on the node) find it in a trace."""

    model_config = ConfigDict(extra="allow")

    world_rank: int = Field(ge=0, description="Rank in the run.")
    host: str = Field(description="As in hosts.")
    device: int = Field(ge=0, description="CUDA ordinal on that host.")
    pp: int = Field(default=0, ge=0, description="Stage.")
    tp: int = Field(default=0, ge=0, description="Rank in the tensor-parallel group.")
    ep: int | None = Field(default=None, description="Rank in the expert-parallel group.")


class Topology(BaseModel):
    """The parallel layout: ``pp`` stages of ``tp`` ranks."""

    model_config = ConfigDict(extra="allow")

    pp: int = Field(ge=1, description="Pipeline stages.")
    tp: int = Field(ge=1, description="Ranks of a stage.")
    ep: int = Field(default=1, ge=1, description="Expert-parallel groups.")
    nnodes: int = Field(default=1, ge=1, description="Hosts.")


class Cause(BaseModel):
    """Why a run did not finish: the status it had reached, what went wrong and the way out."""

    model_config = ConfigDict(extra="allow")

    step: str = Field(description="The status it had reached.")
    kind: str = Field(description="What it was recognised as: oom, watchdog, nccl, interrupted, ...; else unknown.")
    message: str = Field(description="What went wrong.")
    advice: str | None = Field(default=None, description="The way out.")


class HostClock(BaseModel):
    """Clock of a host against that of the machine that launched the run, as round trips told."""

    model_config = ConfigDict(extra="allow")

    host: str = Field(description="As in hosts.")
    offset_ns: int = Field(description="Clock of the host minus that of the launching machine.")
    uncertainty_ns: int = Field(ge=0, description="The true offset is within so much of it.")
    when: str | None = Field(default=None, description="preflight, or after the window: the two tell the drift.")


class Feature(BaseModel):
    """Something that was asked of the server and that it may have declined."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="SGLANG_K3_SP_COLLECTIVE, SGLANG_K3_SP_ATTN_RES, NSYSK3_SP, NSYSK3_MARKERS.")
    requested: bool = Field(description="Asked of the server by its environment.")
    active: bool | None = Field(default=None, description="Null where nothing in logs or trace says so.")
    fell_back: bool | None = Field(default=None, description="Requested, and something else was used.")
    reason: str | None = Field(default=None, description="The server's own words, or why nobody knows.")


class Manifest(BaseModel):
    """A run directory's manifest; fields that this version does not know are kept."""

    model_config = ConfigDict(extra="allow")

    schema_version: int = Field(default=1, description="Of this file.")
    run_id: str | None = Field(default=None, description="Names the run on its hosts, as `nsysk3 cleanup` takes it.")
    status: str = Field(
        default="unknown", description="How far it got (docs/launching.md lists all); other tools may write others."
    )
    cause: Cause | None = Field(default=None, description="Set when status is failed or interrupted.")
    engine: str | None = Field(default=None, description="sglang, torch, or simulate.")
    simulated: str | None = Field(default=None, description="Set when no GPU made these traces; says what did.")
    topology: Topology | None = None
    hosts: list[str] = Field(default_factory=list, description="In the order of their node ranks.")
    ranks: list[RankEntry] = Field(default_factory=list)
    server: dict[str, Any] = Field(
        default_factory=dict, description="What was asked of it: arguments, environment, model, image; no secret."
    )
    server_said: dict[str, Any] = Field(
        default_factory=dict,
        description="What the server said it runs, of server_info.json beside it: backends, memory.",
    )
    load: dict[str, Any] = Field(
        default_factory=dict, description="Lengths, concurrency, requests, seed, client; SGLang's names."
    )
    nsys: dict[str, Any] = Field(default_factory=dict, description="Options of the capture, forwards wanted.")
    versions: dict[str, Any] = Field(default_factory=dict, description="nsysk3, server, nsys, driver, where known.")
    times: dict[str, Any] = Field(default_factory=dict, description="When each status was reached, UTC.")
    container: dict[str, Any] | None = Field(default=None, description="Program, image, digest, options; null without.")
    clocks: list[HostClock] | None = None
    features: list[Feature] | None = None
    notes: list[str] | None = Field(default=None, description="What a reader of the run should know, a line each.")

    @field_validator("ranks")
    @classmethod
    def _each_once(cls, ranks: list[RankEntry]) -> list[RankEntry]:
        counts = Counter(entry.world_rank for entry in ranks)
        if twice := [rank for rank, count in counts.items() if count > 1]:
            raise PydanticCustomError("twice", "{which} listed more than once", {"which": ranks_in_words(twice)})
        return ranks


def read_manifest(run_dir: AnyPath) -> Manifest | None:
    """The manifest of a run directory, None where there is none.  Raises InputError when it cannot be understood."""
    path = run_dir / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        manifest = Manifest.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not a readable JSON manifest ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        why = "must be a JSON object, {...}" if first["type"] in ("model_type", "dict_type") else first["msg"]
        raise InputError(f"{path}: {where}: {why}" if where else f"{path}: {why}") from error
    return manifest.model_copy(update={"server_said": _said(run_dir) | manifest.server_said})


def _said(run_dir: AnyPath) -> dict[str, Any]:
    """What the running server said of itself; nothing where it was not kept or cannot be read."""
    try:
        info = json.loads((run_dir / _SAID_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    values = info if isinstance(info, dict) else {}
    return {name: values[name] for name in SAID if isinstance(values.get(name), str | int | float)}


def write_manifest(run_dir: Path, manifest: Manifest) -> None:
    """Write ``run.json`` so that whoever reads it meanwhile gets the old or the new one whole."""
    write_text(run_dir / MANIFEST_NAME, manifest.model_dump_json(indent=1, exclude_none=True) + "\n")
