"""``nsysk3 cleanup RUN``: end what a run left behind, and let its ``run.json`` say how it ended."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nsysk3.errors import InputError
from nsysk3.launch.journal import is_alive, settle
from nsysk3.launch.leftovers import end_leftovers, find_leftovers
from nsysk3.launch.request import is_run_id
from nsysk3.launch.transport import RUN_ID
from nsysk3.run.config import Cluster, Container, Settings
from nsysk3.run.manifest import ENDED, MANIFEST_NAME, Manifest, read_manifest

# What a write that was cut short leaves beside the file that it was to become (nsysk3.run.files), and an export.
_PARTIAL = re.compile(r"\..+\.(?:json|txt|nsys-rep|sqlite|jsonl|log|csv|html|parquet)\.\w{8}|\.nsysk3-\w{8}\.part")
# A run that is told to end needs its server's grace and Nsight's.
END_S = 180.0


def clean_up(run: str, settings: Settings, *, say: Callable[[str], None]) -> list[str]:
    """End everything of a run on its hosts, and give a line for each thing that could not be ended.

    Args:
        run: a run directory, whose manifest tells hosts, folders and containers; or a run's id, when ``settings`` must.
        settings: how to reach the hosts; hosts named there win over the manifest's.
        say: told what is done, a line each.

    Raises InputError when there is no such run, or nothing tells where it ran.
    """
    folder = Path(run)
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None and folder.exists():
        raise InputError(f"{run}: no {MANIFEST_NAME} here; give a run directory, or a run's id with --hosts")
    if manifest is None and not is_run_id(run):
        raise InputError(
            f"{run}: no such run directory, nor a run's id such as pp8-20260821-120208-3f9a (run.json has it as "
            "run_id); give either, an id with --hosts or --config"
        )
    if manifest and manifest.simulated:
        raise InputError(f"{run}: was simulated, nothing of it ever ran on a host")
    run_id = manifest.run_id if manifest else run
    if not run_id:
        raise InputError(f"{run}: its manifest has no run_id: nsysk3 did not launch it")
    if RUN_ID.fullmatch(run_id) is None:
        raise InputError(f"{run}: its manifest's run_id {run_id!r} is not one that nsysk3 gives")
    if manifest is None:
        say(f"no directory {run} here: taken as the id of a run on {', '.join(settings.cluster.hosts)}")
    else:
        _end_launcher(manifest, say)
        settings = _as_it_ran(manifest, settings)
    names = settings.cluster.hosts
    for each in find_leftovers(settings, run_id, names):
        say(f"{each.host}: {each.kind} {each.what}")
    left = [f"{each.host}: {each.kind} {each.what}" for each in end_leftovers(settings, run_id, names)]
    if not left:
        say(f"nothing of {run_id} is left on {', '.join(names)}")
        if manifest:
            _remove_partial(folder)
            if step := settle(folder):
                say(f"{folder}/{MANIFEST_NAME}: was killed at step {step}, and now says so")
    return left


def _end_launcher(manifest: Manifest, say: Callable[[str], None]) -> None:
    """Ask the nsysk3 of a run that still goes on to end it, and wait for that."""
    extra = manifest.model_extra or {}
    who = extra.get("launcher")
    if not isinstance(who, dict) or (manifest.status in ENDED and extra.get("cleaned") is not None):
        return  # whoever launched it goes on with something else
    if manifest.status not in ENDED and who.get("host") not in (None, platform.node()):
        say(f"the run was launched on {who['host']}: if it still goes on there, it will fail now")
    if not is_alive(who) or who.get("pid") == os.getpid():
        return
    say(f"the run goes on (process {who['pid']}): it is told to end")
    with suppress(ProcessLookupError, PermissionError):
        os.kill(who["pid"], signal.SIGTERM)
    end = time.monotonic() + END_S
    while is_alive(who) and time.monotonic() < end:
        time.sleep(0.2)


def _remove_partial(folder: Path) -> None:
    """Remove half-written files from a run directory."""
    for path in list(folder.rglob(".*")):
        if not _PARTIAL.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _as_it_ran(manifest: Manifest, settings: Settings) -> Settings:
    """The settings with what the manifest knows better: hosts, launcher, folders, container tool."""
    told = (manifest.model_extra or {}).get("cluster")
    ran: dict[str, Any] = told if isinstance(told, dict) else {}
    names = settings.cluster.hosts if settings.cluster.hosts != Cluster().hosts else manifest.hosts
    known: dict[str, Any] = {key: ran[key] for key in ("launcher", "scratch", "python") if key in ran}
    if not settings.cluster.ssh_options and ran.get("ssh_options"):
        known["ssh_options"] = ran["ssh_options"]
    try:
        cluster = Cluster.model_validate(
            {**settings.cluster.model_dump(), **known, "hosts": list(names) or settings.cluster.hosts}
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{MANIFEST_NAME}: cluster.{where}: {first['msg']}") from error
    container = settings.container
    if manifest.container and manifest.container.get("cli") in ("docker", "podman"):
        container = Container(cli=manifest.container["cli"])
    return settings.model_copy(update={"cluster": cluster, "container": container})
