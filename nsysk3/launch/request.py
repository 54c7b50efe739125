"""What a command line says about a run, before there is a plan."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from nsysk3.errors import InputError
from nsysk3.run.config import Cluster, Settings
from nsysk3.run.manifest import MANIFEST_NAME


def new_run_id(pp: int) -> str:
    """A name for a run that no other has: it marks processes, containers and folders on every host."""
    return f"pp{pp}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


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
