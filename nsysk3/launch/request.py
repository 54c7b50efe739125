"""What a command line says about a run, before there is a plan."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nsysk3.errors import InputError
from nsysk3.launch.transport import is_this_machine
from nsysk3.run.config import CONFIG_NAME, Cluster, Settings, load_settings
from nsysk3.run.manifest import MANIFEST_NAME

# What new_run_id gives; those of sweeps, of their layouts and of nccl-bench (nsysk3.sweep); and doctor's.
_RUN_ID = re.compile(
    r"(?:pp\d+|sweep|nccl)-\d{8}-\d{6}-[0-9a-f]{4}(?:-\d+)?|[A-Za-z0-9][A-Za-z0-9._-]*-pp\d+(?:-\d+)?|doctor-[0-9a-f]{8}"
)


def new_run_id(pp: int) -> str:
    """A name for a run that no other has: it marks processes, containers and folders on every host."""
    return f"pp{pp}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def is_run_id(text: str) -> bool:
    """Whether a text has the form of the ids that nsysk3 gives to runs."""
    return _RUN_ID.fullmatch(text) is not None


def read_hosts(text: str | None) -> list[str] | None:
    """Hosts of ``a,b,c``, or of a file that has the first word of each line; None where none are given."""
    if text is None:
        return None
    path = Path(text)
    if path.is_file():
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--hosts {text}: cannot be read ({error})") from error
        hosts = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    elif "/" in text:
        raise InputError(f"--hosts {text}: no such file")
    else:
        hosts = [part.strip() for part in text.split(",") if part.strip()]
    if not hosts:
        raise InputError(f"--hosts {text!r}: names no host")
    return hosts


def with_allocation(settings: Settings) -> Settings:
    """The settings, with the hosts of the Slurm allocation we are in where srun is asked for and no host is named."""
    cluster = settings.cluster
    if cluster.launcher != "srun" or cluster.hosts != Cluster().hosts:
        return settings
    from nsysk3.launch.transport import slurm_hosts

    return settings.model_copy(update={"cluster": cluster.model_copy(update={"hosts": list(slurm_hosts())})})


def other_nsys(
    settings: Settings, config: Path | None, overrides: Mapping[str, object], environ: Mapping[str, str]
) -> Iterator[str]:
    """What to say where NSYSK3_NSYS, which may be meant for exports here, decides on the nsys of the hosts."""
    given = environ.get("NSYSK3_NSYS")
    if not given or environ.get("NSYSK3_NSYS_PATH"):
        return
    without = {name: text for name, text in environ.items() if name != "NSYSK3_NSYS"}
    before = load_settings(config, overrides=overrides, environ=without).nsys.path
    inside, hosts = settings.container.cli is not None, settings.cluster.hosts
    if before == given or (before is None and not inside and all(map(is_this_machine, hosts))):
        return
    replaced = f"{before} of {config or environ.get('NSYSK3_CONFIG') or CONFIG_NAME}" if before else "nsys on PATH"
    yield (
        f"nsys.path: NSYSK3_NSYS={given} replaces {replaced} {'in the container of' if inside else 'on'} every host; "
        "where it is meant for exports here only, unset it and give `nsysk3 analyze --nsys`"
    )


def check_server_words(words: Sequence[str]) -> tuple[str, ...]:
    """Server arguments from behind ``--``; raises InputError for a stray word that was meant for nsysk3."""
    if words and not words[0].startswith("-"):
        raise InputError(f"unexpected argument {words[0]!r}; arguments of the server come after --")
    return tuple(words)


def run_folder(out: Path | None, run_id: str) -> Path:
    """The directory to make for a run.  Raises InputError where something is in it already."""
    folder = out if out is not None else Path("runs") / run_id
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is not a directory")
    if (folder / MANIFEST_NAME).exists():
        raise InputError(f"{folder}: holds a run already; give another --out")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; give another --out")
    return folder
