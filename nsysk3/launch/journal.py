"""``run.json`` while a run goes on: it says at every moment how far the run is, and at the end how it ended."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsysk3.errors import InputError, InterruptedRunError, MissingToolError, NsysK3Error, RunFailedError
from nsysk3.launch.failures import ServerFailedError
from nsysk3.run.manifest import ENDED, Cause, Feature, HostClock, Manifest, Status, read_manifest, write_manifest

# What `nsysk3 cleanup` makes of a run.
_CLEAN = {"cleaned": True, "left": None, "kept": None}


class Journal:
    """The manifest of a run in a folder, written anew (as a whole, in one move) at every change."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest.model_copy(update={"launcher": launcher(), "cleaned": None, "measured": {}})
        self.step("planned")

    @property
    def status(self) -> str:
        """The step that the run is at, or how it ended."""
        return self._manifest.status

    @property
    def left(self) -> list[str]:
        """What of the run could not be ended."""
        return list((self._manifest.model_extra or {}).get("left") or ())

    @property
    def features(self) -> list[Feature]:
        """What was asked of the server and it may have declined."""
        return list(self._manifest.features or ())

    def step(self, status: Status) -> None:
        """The run has come to this step."""
        self._manifest.status = status
        self._manifest.times[status] = now()
        self._write()

    def update(
        self,
        *,
        server: Mapping[str, Any] | None = None,
        versions: Mapping[str, Any] | None = None,
        measured: Mapping[str, Any] | None = None,
        features: Sequence[Feature] | None = None,
        clocks: Sequence[HostClock] = (),
        notes: Sequence[str] = (),
        **fields: object,
    ) -> None:
        """Add what has become known; ``fields`` are top-level fields that the manifest model does not have."""
        manifest = self._manifest
        manifest.server |= dict(server or {})
        manifest.versions |= dict(versions or {})
        if features is not None:
            manifest.features = list(features) or None
        if clocks:
            manifest.clocks = [*(manifest.clocks or ()), *clocks]
        known = manifest.notes or []
        if fresh := [note for note in dict.fromkeys(notes) if note not in known]:
            manifest.notes = [*known, *fresh]
        extra = manifest.model_extra or {}
        update = dict(fields)
        if measured:
            update["measured"] = {**extra.get("measured", {}), **measured}
        if update:
            self._manifest = manifest.model_copy(update=update)
        self._write()

    def fail(self, error: BaseException) -> None:
        """The run ends here, and why; what could not be written is left, for the error itself matters more."""
        manifest = self._manifest
        if manifest.cause is not None:
            return
        manifest.cause = cause_of(error, manifest.status)
        manifest.status = "interrupted" if manifest.cause.kind == "interrupted" else "failed"
        manifest.times[manifest.status] = now()
        with suppress(NsysK3Error):
            self._write()

    def cleaned(self, left: Sequence[str] = (), kept: Sequence[str] = ()) -> None:
        """Nothing of the run is left on the hosts, but for what could not be ended and what was kept."""
        with suppress(NsysK3Error):
            self.update(cleaned=not left and not kept, left=list(left) or None, kept=list(kept) or None)

    def _write(self) -> None:
        write_manifest(self.folder, self._manifest)


def cause_of(error: BaseException, step: str) -> Cause:
    """An error as the cause of a run's end."""
    if isinstance(error, ServerFailedError):
        return Cause(step=step, kind=error.failure.kind, message=error.failure.message, advice=error.failure.advice)
    if isinstance(error, InterruptedRunError) or not isinstance(error, Exception):
        return Cause(step=step, kind="interrupted", message=f"ended by the user, at step {step}")
    kinds = ((MissingToolError, "environment"), (InputError, "input"), (RunFailedError, "run"), (OSError, "system"))
    kind = next((name for each, name in kinds if isinstance(error, each)), "internal")
    text = " ".join(str(error).split()) or type(error).__name__
    message, _, advice = text.partition("; ")
    return Cause(step=step, kind=kind, message=message, advice=advice or None)


def launcher() -> dict[str, Any]:
    """This process: who writes the manifest, so that others can tell whether it still does."""
    return {"host": platform.node(), "pid": os.getpid(), "began": process_began(os.getpid()), "boot": boot_id()}


def is_alive(who: Mapping[str, Any]) -> bool:
    """Whether the process that ``launcher`` described still runs, on this machine."""
    here = who.get("host") == platform.node() and who.get("boot") == boot_id()
    return here and isinstance(who.get("pid"), int) and process_began(who["pid"]) == who.get("began") is not None


def process_began(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot: with its id it names it for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str | None:
    """This start of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return None


def settle(folder: Path) -> str | None:
    """Give the manifest of a run that was killed its true end; returns the step it had reached, None if it had ended.

    For ``nsysk3 cleanup``, once nothing of the run is left.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.status in ENDED:
        if manifest is not None and (manifest.model_extra or {}).get("cleaned") is not True:
            write_manifest(folder, manifest.model_copy(update=_CLEAN))
        return None
    step = manifest.status
    manifest.cause = Cause(
        step=step,
        kind="killed",
        message=f"nsysk3 itself was killed while {step}, or its machine lost power",
        advice="what it left was ended by `nsysk3 cleanup`; run it again",
    )
    manifest.status = "interrupted"
    manifest.times["interrupted"] = now()
    write_manifest(folder, manifest.model_copy(update=_CLEAN))
    return step


def now() -> str:
    """The time, as manifests write it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
