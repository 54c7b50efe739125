"""``nsysk3.toml``: where to run a server, which one, under what load, how to capture it, and how to read the traces.

Every setting has a place here, a name in the environment (``NSYSK3_CLUSTER_PORT`` for ``[cluster] port``) and most have
an option on the command line.  The command line wins over the environment, the environment over the file, the file over
the defaults below.  docs/launching.md describes each.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from nsysk3.errors import InputError
from nsysk3.run.closest import closest

CONFIG_NAME = "nsysk3.toml"
PREFIX = "NSYSK3_"
# The one name that is older than this file: analyze and export know it too.
_ALIASES = {"NSYSK3_NSYS": ("nsys", "path")}
# Variables that are no settings: of nsysk3, its plugin and kernels, and its tests.
_OTHERS = {
    "NSYSK3_CACHE", "NSYSK3_CHROMIUM", "NSYSK3_CONFIG", "NSYSK3_DEBUG", "NSYSK3_DISPATCH", "NSYSK3_KEEPER",
    "NSYSK3_MARKERS", "NSYSK3_OPS_CACHE", "NSYSK3_RUN", "NSYSK3_SGLANG_WHEELS", "NSYSK3_SP", "NSYSK3_UPDATE",
    "NSYSK3_WORKLOAD_TOKEN",
}  # fmt: skip
# Options that are called otherwise than the settings they stand for.
_OPTIONS = {"container.cli": "--container-cli", "model.path": "--model"}
# Longest wait for a Dask worker while there is none, s.
PATIENCE_S = 60.0
# Files that come with nsysk3, found by their bare names.
_EXAMPLES = Path(__file__).parent.parent / "launch" / "examples"


def _no_nul(text: str) -> str:
    """No command line, path or environment can hold a NUL."""
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


Text = Annotated[str, AfterValidator(_no_nul)]
Name = Annotated[str, StringConstraints(min_length=1), AfterValidator(_no_nul)]
Variable = Annotated[str, StringConstraints(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
Seconds = Annotated[float, Field(gt=0, le=10**7)]  # what every clock can count to


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: object, info: ValidationInfo) -> object:
        """Python counts true as 1; whoever writes it means no number."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("switch", "takes neither true nor false")
        return value


class Cluster(_Section):
    """The machines and how to reach them."""

    hosts: list[Name] = Field(
        default=["localhost"], description="Machines in the order of their node ranks; the first serves."
    )
    launcher: Literal["auto", "local", "ssh", "srun"] = Field(
        default="auto", description="How commands get there; auto: local when the only host is this machine, else ssh."
    )
    gpus_per_host: int | None = Field(default=None, ge=1, description="GPUs used on each host; default: all there are.")
    address: Name | None = Field(
        default=None, description="What the other hosts call the first one; default: its name in hosts."
    )
    interface: Name | None = Field(
        default=None, description="Network interface of the control traffic: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."
    )
    port: int = Field(default=30000, ge=1, le=65535, description="Port of the server's HTTP on the first host.")
    dist_port: int = Field(
        default=20000, ge=1, le=65535, description="Port on the first host where the nodes of a server meet."
    )
    scratch: Name = Field(
        default="/tmp", pattern="^/", description="Folder on each host; a run uses one of its own in it and removes it."
    )
    python: Name = Field(default="python3", description="Python 3.8 or newer on each host that watches over the run.")
    ssh_options: list[Text] = Field(default=[], description="Options given to ssh before the host's name.")

    @field_validator("hosts")
    @classmethod
    def _each_once(cls, hosts: list[str]) -> list[str]:
        if not hosts:
            raise PydanticCustomError("none", "names no host")
        for host in hosts:
            if hosts.count(host) > 1:
                raise PydanticCustomError("twice", "{host} is there twice", {"host": host})
        return hosts


class Container(_Section):
    """The container that the server runs in, if any."""

    cli: Literal["docker", "podman"] | None = Field(
        default=None, description="Program that runs it; default: no container."
    )
    image: Name | None = Field(default=None, description="Name of the image.")
    digest: Name | None = Field(
        default=None,
        pattern="^sha256:.",
        description="What the image must be on every host: sha256:... of the image or of its repository.",
    )
    options: list[Text] = Field(default=[], description="Options of `docker run`: devices, shm size, mounts.")


class Model(_Section):
    """The model that is served."""

    path: Name | None = Field(default=None, description="Folder of the model, the same on every host.")


class Server(_Section):
    """The server and its command."""

    engine: Literal["sglang", "torch"] = Field(
        default="sglang", description="sglang, or torch: nsysk3's own K3-shaped prefill, which needs no model."
    )
    python: Name = Field(default="python3", description="Python of the server, on each host or in the container.")
    command: list[Text] | None = Field(
        default=None, min_length=1, description="In place of `PYTHON -m sglang.launch_server` or `... nsysk3.workload`."
    )
    args: list[Text] = Field(default=[], description="Arguments of the server besides those that nsysk3 gives it.")
    start_timeout_s: Seconds = Field(default=1800, description="Longest wait for a healthy server, seconds.")
    stop_timeout_s: Seconds = Field(
        default=60, description="Longest wait for the server to end when told to, seconds; then it is killed."
    )
    markers: bool = Field(default=True, description="nsysk3's NVTX markers in the server (NSYSK3_MARKERS=1).")
    sp: Literal["off", "sglang", "nsysk3"] = Field(
        default="off", description="Sequence-parallel collectives: none, SGLang's own, or those of nsysk3.ops."
    )


class Load(_Section):
    """The requests."""

    input_len: int = Field(default=16384, ge=1, description="Tokens of a prompt.")
    output_len: int = Field(default=1, ge=1, description="Tokens generated; with 1 there is no decode.")
    concurrency: int = Field(default=8, ge=1, description="Requests under way at once.")
    chunk: int = Field(default=8192, ge=1, description="Tokens of a prefill chunk (--chunked-prefill-size).")
    requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests of a load; default: 5 x concurrency, or what the window needs.",
    )
    warmup: int = Field(default=8, ge=0, description="Requests sent before anything is measured.")
    seed: int = Field(default=1, ge=0, description="Of the random token ids; the server's --random-seed too.")
    client: Literal["builtin", "sglang"] = Field(
        default="builtin", description="What sends them: nsysk3, or sglang.benchmark.serving on the first host."
    )
    request_timeout_s: Seconds = Field(default=600, description="Longest wait for one answer, seconds.")


class Window(_Section):
    """The capture."""

    forwards: int = Field(default=16, ge=1, description="Forwards of the first stage to have whole in the window.")
    overhead: Literal["load", "server", "off"] = Field(
        default="load",
        description="Measure the profiler: load without capture on the same server; also on one without nsys; no.",
    )


class Nsys(_Section):
    """Nsight Systems."""

    path: Name | None = Field(
        default=None, description="nsys on each host or in the container; default: the one on PATH."
    )
    options: list[Text] = Field(default=[], description="Options of `nsys profile` besides nsysk3's.")
    library_path: Name | None = Field(
        default=None, description="Folder of libdw and libelf for the importer, where nsys leaves only a .qdstrm."
    )


class Analyze(_Section):
    """What reading traces takes where the command line does not say; files are looked for from the current folder."""

    window: str = Field(default="capture", description="capture, prefill, steady, or START:END.")
    rules: str | None = Field(default=None, description="File of kernel rules to try before the shipped ones.")
    layer_regex: str | None = Field(default=None, description="Finds layers in NVTX range names.")
    nccl_tests: list[str] = Field(default=[], description="Logs of nccl-tests on the same machines.")
    workers: int = Field(default=1, ge=1, le=1024, description="Processes of this machine that read reports.")
    scheduler: Name | None = Field(
        default=None, description="Dask scheduler, tcp://host:port, whose workers read reports instead."
    )
    patience_s: Seconds = Field(
        default=PATIENCE_S,
        description="Longest wait for a Dask worker while there is none, seconds; then the run is given up.",
    )
    cache: bool = Field(default=False, description="Keep what is read of reports for the next analysis of the same.")


class Report(_Section):
    """Pages."""

    lang: Literal["en", "zh"] = Field(default="en", description="Their language.")


class Settings(_Section):
    """All of ``nsysk3.toml``."""

    cluster: Cluster = Cluster()
    container: Container = Container()
    env: dict[Variable, Text] = Field(
        default={}, description="Environment of the server on every host: NCCL_*, GLOO_* ..."
    )
    model: Model = Model()
    server: Server = Server()
    load: Load = Load()
    window: Window = Window()
    nsys: Nsys = Nsys()
    # How a run is read is no part of how it was made: records of runs and sweeps leave it out.
    analyze: Analyze = Field(default=Analyze(), exclude=True)
    report: Report = Field(default=Report(), exclude=True)


def load_settings(
    path: Path | None = None,
    *,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings: the file, under the environment, under ``overrides``.

    ``path``: the file, or the name of a shipped example; without one ``$NSYSK3_CONFIG``, else ``./nsysk3.toml`` where
    there is one, else no file.
    ``overrides``: options of the command line by dotted name, ``{"load.chunk": 4096}``; None means not given.
    ``environ``: in place of ``os.environ``.  Raises InputError that names the setting and where it came from.
    """
    environ = os.environ if environ is None else environ
    document, sources = _read(path, environ)
    for variable, (section, name) in _variables().items():
        if text := environ.get(variable, ""):
            _put(document, section, name, _split(section, name, text))
            sources[f"{section}.{name}"] = variable
    _refuse_unknown(environ)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            section, _, name = dotted.partition(".")
            _put(document, section, name, value.value if isinstance(value, Enum) else value)
            sources[dotted] = _OPTIONS.get(dotted, f"--{name}".replace("_", "-"))
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise InputError(_explain(error, sources)) from error


def _read(path: Path | None, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The file as it is, and which file it was under the name ``""``."""
    named = path or (Path(environ["NSYSK3_CONFIG"]) if environ.get("NSYSK3_CONFIG") else None)
    chosen = named or Path(CONFIG_NAME)
    if named is None and not chosen.is_file():
        return {}, {"": "settings"}
    if not chosen.exists() and chosen.parent == Path() and (shipped := _EXAMPLES / f"{chosen.stem}.toml").is_file():
        chosen = shipped
    try:
        document = tomllib.loads(chosen.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{chosen}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{chosen}: not TOML ({error})") from error
    return document, {"": str(chosen)}


def _variables() -> dict[str, tuple[str, str]]:
    """Environment variable of every setting: its section and name."""
    found = dict(_ALIASES)
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= {f"{PREFIX}{section}_{name}".upper(): (section, name) for name in kind.model_fields}
    return found


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """A misspelt variable would be a setting that silently does nothing."""
    known = _variables()
    for variable in sorted(environ):
        if variable not in known and variable.startswith(_sections()):
            raise InputError(f"{variable}: no such setting; {_meant(variable, known)}")


def ignored_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """What to say of each variable that nothing reads, and that is like one that is read: ``NSYSK3_WORKERS``.

    Those that begin with a section's name are refused by load_settings.
    """
    settings = _variables()
    known = sorted(_OTHERS | settings.keys())
    meant = {name.removeprefix(PREFIX): [name] for name in known}
    for variable, (_, name) in settings.items():
        meant.setdefault(name.upper(), []).append(variable)
    for variable in sorted(environ):
        refused = variable.startswith(_sections())
        strange = variable.startswith(PREFIX) and variable not in known and not refused
        if strange and (found := closest(variable.removeprefix(PREFIX), meant)):
            yield f"{variable}: nothing reads it; did you mean {' or '.join(meant[found])}?"


def _sections() -> tuple[str, ...]:
    """What the variables of settings begin with."""
    return tuple({f"{PREFIX}{section}_".upper() for section, _ in _variables().values()})


def _split(section: str, name: str, text: str) -> object:
    """The value of a variable; lists are written as on a command line, hosts also with commas."""
    kind = Settings.model_fields[section].annotation
    if kind is None or "list[" not in str(kind.model_fields[name].annotation):
        return text
    try:
        return text.replace(",", " ").split() if name == "hosts" else shlex.split(text)
    except ValueError as error:
        raise InputError(f"{PREFIX}{section}_{name}".upper() + f": {error}") from error


def _put(document: dict[str, Any], section: str, name: str, value: object) -> None:
    if not name:
        document[section] = value
        return
    table = document.setdefault(section, {})
    if isinstance(table, dict):  # else validation says what is wrong with it
        table[name] = value


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    source = sources.get(".".join(str(part) for part in first["loc"][:2]), sources[""])
    if first["type"] == "extra_forbidden":
        names = [f"{section}.{name}".rstrip(".") for section, name in _variables().values()]
        known = names if "." in where else list(Settings.model_fields)
        return f"{source}: {where}: no such setting; {_meant(where, known)}"
    hidden = isinstance(first["input"], dict | list) or first["loc"][0] == "env"  # the latter may be a secret
    given = "" if hidden or first["type"] == "switch" else f", not {first['input']!r}"
    named = f"{source} ({where})" if source.startswith("-") else f"{source}: {where}"
    return f"{named}: {first['msg'][:1].lower()}{first['msg'][1:]}{given}"


def _meant(word: str, names: Iterable[str]) -> str:
    found = closest(word, names)
    return f"did you mean {found}?" if found else "docs/launching.md lists them"
