"""The export step: a `.nsys-rep` becomes SQLite or a directory of Parquet files, by the user's own nsys.

Exports are kept beside the report as `<stem>.nsysk3.sqlite` (never `<stem>.sqlite`, which may be the user's) with a
small JSON file that says what they were made from.  Where the report's folder cannot be written they go to the cache
directory, `$NSYSK3_CACHE` or the platform's.
"""

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.run.files import cache_folder
from nsysk3.run.inputs import CACHE_MARK
from nsysk3.trace.child import run_child

Kind = Literal["sqlite", "parquetdir"]

_SUFFIX: dict[Kind, str] = {"sqlite": ".nsysk3.sqlite", "parquetdir": ".nsysk3_pqtdir"}
_META_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # the second up to 2022.4; nsys writes it last
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_HASH_BLOCK = 128 * 1024
_HASH_BLOCKS = 64

_NEWER = re.compile(r"created in Nsight Systems version \(([^)]*)\),? *newer than your current version \(([^)]*)\)")
_DISK_FULL = re.compile(r"disk is full|no space left|quota exceeded|error writing bytes", re.IGNORECASE)
_DAMAGED = re.compile(r"magic number mismatch|cannot read from stream|version tag is not found", re.IGNORECASE)
_NOISE = re.compile(r"^\[?libprotobuf|^Dynamic exception type|^std::exception::what")


@dataclass(frozen=True)
class Nsys:
    """An nsys that runs on this machine and what its help says it can do.

    Attributes:
        path: the executable.
        version: as it prints it, such as `2024.2.3.38-242334140272v0`.
        supports_blobs: `export` has `--include-blobs`, without which NCCL payloads are left out.
        supports_parquetdir: `export` can write a directory of Parquet files.
    """

    path: Path
    version: str
    supports_blobs: bool
    supports_parquetdir: bool


def find_nsys(explicit: str | Path | None = None) -> Nsys:
    """Find nsys: `explicit` (`--nsys`), else `$NSYSK3_NSYS`, else PATH.

    One that was asked for and does not run is an error; the next place is not tried in silence.

    Raises:
        MissingToolError: there is none, or it does not run.
    """
    for source, name in (("--nsys", explicit), ("$NSYSK3_NSYS", os.environ.get("NSYSK3_NSYS")), ("", "nsys")):
        if not name:
            continue
        found = shutil.which(str(name))
        if found:
            return _probe(Path(found))
        if source:
            raise MissingToolError(f"{source} {_show(name)}: no such program, or not executable")
    raise MissingToolError(
        "no nsys found: install NVIDIA Nsight Systems, or pass --nsys PATH, or export elsewhere with "
        "`nsys export -t sqlite --include-blobs=true FILE`"
    )


def cached_export(rep: Path, kind: Kind = "sqlite", nsys: Nsys | None = None) -> Path | None:
    """Return the export of this very report that is already there, or None.

    It is the one made from the same content (a moved, copied or touched report still counts) with at least the
    options that `nsys` would use; without an `nsys` any options do, so a machine that has none can still read it.

    Raises:
        InputError: the report cannot be read or is empty.
    """
    return _find_cached(rep, _content_key(rep), kind, _options(nsys))


def export_report(
    rep: Path,
    nsys: Nsys,
    *,
    kind: Kind = "sqlite",
    out: Path | None = None,
    progress: Callable[[str], None] | None = None,
    force: bool = False,
) -> Path:
    """Export a report and return the SQLite file or the directory of Parquet files.

    Args:
        rep: the `.nsys-rep`; it is only read.
        nsys: from `find_nsys`.
        kind: what to make.
        out: exactly where to put it; None keeps it in the cache and reuses what is there.
        progress: called with `"37%"` and so on while nsys works.
        force: export again although there is a good one, and replace an existing `out`.

    Raises:
        InputError: the report is missing, unreadable, empty, truncated or corrupt, or `out` exists.
        MissingToolError: nsys is too old for the report or for `kind`, crashed, or found no room to write.
    """
    key = _content_key(rep)
    if kind == "parquetdir" and not nsys.supports_parquetdir:
        raise MissingToolError(f"nsys {nsys.version} has no parquetdir export: use --type sqlite, or a newer nsys")
    if out is not None:
        _check_out(out, kind, force)
        return _export_to(out, rep, nsys, kind, progress, sidecar=None)
    if not force and (cached := _find_cached(rep, key, kind, _options(nsys))):
        return cached
    sidecar: dict[str, object] = {"key": key, "nsys": nsys.version, "options": _options(nsys)}
    refused: OSError | None = None
    for target in _cache_places(rep, key, kind):
        try:
            return _export_to(target, rep, nsys, kind, progress, sidecar)
        except OSError as error:
            refused = error
    raise MissingToolError(
        f"{_show(rep)}: neither its folder nor the cache can be written ({_show(refused)}): "
        "set NSYSK3_CACHE to a folder that can, or pass --out"
    )


# --- finding nsys and what it can do


def _probe(path: Path) -> Nsys:
    version = re.search(r"version\s+(\d{4}\.\d+[\w.\-]*)", _ask(path, "--version"))
    if version is None:
        raise MissingToolError(
            f"{_show(path)}: `--version` does not answer like NVIDIA Nsight Systems; pass another --nsys"
        )
    help_text = _ask(path, "export", "--help")
    return Nsys(path, version[1], "--include-blobs" in help_text, "parquetdir" in help_text)


def _ask(path: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingToolError(f"{_show(path)}: cannot be run ({_show(error)}); pass another --nsys") from error
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def _options(nsys: Nsys | None) -> list[str]:
    return ["--include-blobs=true"] if nsys and nsys.supports_blobs else []


# --- the cache


def _content_key(rep: Path) -> str:
    """Name the report's content: its size and a hash of it, of evenly spread blocks where it is large."""
    digest = hashlib.sha256()
    try:
        with rep.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            for offset in _block_offsets(size):
                file.seek(offset)
                digest.update(file.read(_HASH_BLOCK))
    except FileNotFoundError as error:
        raise InputError(f"{_show(rep)}: no such file") from error
    except PermissionError as error:
        raise InputError(f"{_show(rep)}: no permission to read it; ask its owner, or chmod a+r it") from error
    except OSError as error:
        raise InputError(f"{_show(rep)}: cannot be read ({error.strerror})") from error
    if size == 0:
        raise InputError(f"{_show(rep)}: empty, its capture did not finish; capture again, or import its .qdstrm")
    return digest.hexdigest()[:32]


def _block_offsets(size: int) -> Iterable[int]:
    """Every block of a small file; of a large one as many, spread from the first byte to the last."""
    if size <= _HASH_BLOCK * _HASH_BLOCKS:
        return range(0, size, _HASH_BLOCK)
    return (index * (size - _HASH_BLOCK) // (_HASH_BLOCKS - 1) for index in range(_HASH_BLOCKS))


def _cache_places(rep: Path, key: str, kind: Kind) -> tuple[Path, Path]:
    name = rep.stem + _SUFFIX[kind]
    return rep.parent / name, cache_folder() / "exports" / key / name


def _find_cached(rep: Path, key: str, kind: Kind, options: list[str]) -> Path | None:
    for target in _cache_places(rep, key, kind):
        try:
            sidecar = json.loads(_sidecar_path(target).read_bytes())
            same = sidecar["key"] == key and sidecar["bytes"] == _bytes_of(target)
            if same and set(options) <= set(sidecar["options"]):
                return target
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not there, or not one of ours
    return None


def left_behind(export: Path, reports: Iterable[Path]) -> bool:
    """Whether an export is one of ours, of a report that has another name by now: one of ``reports``."""
    if CACHE_MARK not in export.name:
        return False
    try:
        key = json.loads(_sidecar_path(export).read_bytes())["key"]
        return any(_content_key(report) == key for report in reports)
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return False


def _sidecar_path(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _bytes_of(target: Path) -> int:
    """Size of an export, so that one cut short later is not taken for good."""
    if target.is_dir():
        return sum(file.stat().st_size for file in target.iterdir())
    return target.stat().st_size


# --- one export


def _check_out(out: Path, kind: Kind, force: bool) -> None:
    """Refuse to replace what the user did not ask to lose: with `force`, a file or an earlier export directory."""
    if not force and (out.exists() or out.is_symlink()):
        raise InputError(f"{_show(out)} exists: pass --force to replace it, or another --out")
    if out.is_dir() and (kind == "sqlite" or any(file.suffix != ".parquet" for file in out.iterdir())):
        raise InputError(f"{_show(out)} is a directory that no export made: pass another --out")


def _export_to(
    target: Path,
    rep: Path,
    nsys: Nsys,
    kind: Kind,
    progress: Callable[[str], None] | None,
    sidecar: dict[str, object] | None,
) -> Path:
    """Export into a temporary folder beside `target`, check, rename.

    Raises the OSError as it is where the folder cannot be written: the caller has another place.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _part_folder(target.parent) as folder:
            made = Path(folder) / ("export" + _SUFFIX[kind])
            command = [str(nsys.path), "export", f"--type={kind}", "--force-overwrite=true", *_options(nsys)]
            code, lines = run_child([*command, f"--output={made}", str(rep.absolute())], progress)
            if code or _DISK_FULL.search("\n".join(lines)) or not _is_whole(made, kind):
                raise _failure(rep, nsys, code, lines, target.parent)
            _install(made, target, sidecar)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _no_room(rep, target.parent) from error
        if sidecar is None:
            raise InputError(f"{_show(target)}: cannot be written ({error.strerror}); pass another --out") from error
        raise
    return target


def _part_folder(parent: Path) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix=".nsysk3-", suffix=".part", dir=parent, ignore_cleanup_errors=True)


def _is_whole(made: Path, kind: Kind) -> bool:
    """Whether nsys wrote all of it: it can return 0 after a failed write, and leaves the beginning."""
    try:
        if kind == "sqlite":
            return _is_whole_sqlite(made)
        files = list(made.iterdir())
        return any(file.stem in _META_TABLES for file in files) and all(map(_is_whole_parquet, files))
    except OSError:
        return False


def _is_whole_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        header = file.read(100)
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    if header[:16] != b"SQLite format 3\0" or path.stat().st_size != page * int.from_bytes(header[28:32], "big"):
        return False
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name IN (?, ?)"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(query, _META_TABLES).fetchone() is not None
    except sqlite3.Error:
        return False


def _is_whole_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return file.read() == b"PAR1"


def _install(made: Path, target: Path, sidecar: dict[str, object] | None) -> None:
    """Put a finished export in its place; a kill in between leaves no sidecar that vouches for another file."""
    if sidecar is not None:
        _sidecar_path(target).unlink(missing_ok=True)
    if target.is_dir() and not target.is_symlink():
        target.rename(made.with_name("old"))  # goes away with the temporary folder
    made.replace(target)
    if sidecar is not None:
        note = made.with_name("sidecar.json")
        note.write_text(json.dumps({**sidecar, "bytes": _bytes_of(target)}, indent=1) + "\n", encoding="utf-8")
        note.replace(_sidecar_path(target))


# --- what to say when it failed


def _failure(rep: Path, nsys: Nsys, code: int, lines: list[str], folder: Path) -> NsysK3Error:
    """Turn what nsys printed into one line with the way out."""
    text = "\n".join(lines)
    if told := _NEWER.search(text):
        return _too_new(rep, told[1], told[2])
    if _DISK_FULL.search(text):
        return _no_room(rep, folder)
    if damaged := _DAMAGED.search(text):
        return InputError(
            f"{_show(rep)}: truncated or corrupt (nsys: {damaged[0]}); copy it again, or import its .qdstrm again"
        )
    made_by = _report_version(rep)
    if made_by and _release(made_by) > _release(nsys.version):
        return _too_new(rep, made_by, nsys.version)
    if code < 0:
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return MissingToolError(
            f"{_show(rep)}: nsys {nsys.version} was killed by {_signal_name(-code)}{memory}; "
            "try another nsys with --nsys, or export elsewhere"
        )
    said = next((line for line in lines if not _NOISE.search(line)), f"exit code {code} and no export")
    return InputError(
        f"{_show(rep)}: nsys {nsys.version} could not export it ({_show(said)}); "
        "it may be damaged, or made by a newer nsys: try that one with --nsys"
    )


def _too_new(rep: Path, made_by: str, current: str) -> MissingToolError:
    command = f"nsys export -t sqlite --include-blobs=true {shlex.quote(str(rep))}"
    return MissingToolError(
        f"{_show(rep)}: made by nsys {_show(made_by)}, newer than this one ({_show(current)}); "
        f"pass the newer one with --nsys, or export where it is: `{_show(command)}`"
    )


def _no_room(rep: Path, folder: Path) -> MissingToolError:
    return MissingToolError(
        f"{_show(rep)}: no room in {_show(folder)} for its export; free some, or put it elsewhere with "
        "`nsysk3 export --out`"
    )


def _report_version(rep: Path) -> str | None:
    """Read which nsys made a report: the first line says it, or only a build number that the end explains."""
    with rep.open("rb") as file:
        head = file.read(256)
        file.seek(max(0, rep.stat().st_size - 65536))
        tail = file.read()
    if dotted := re.search(rb"Report (\d{4}@[\w@\-]+)", head):
        return dotted[1].decode().replace("@", ".")
    build = re.search(rb"Report (\d+)\.", head)
    named = build and re.search(rb"(\d{4}(?:\.\d+){2,3}):." + build[1], tail, re.DOTALL)
    return named[1].decode() if named else None


def _release(version: str) -> tuple[int, ...]:
    """`2024.2.3.38-...` -> (2024, 2, 3)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("-")[0])[:3])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _show(text: object) -> str:
    """One printable line of something that came from outside."""
    line = "".join(char if char.isprintable() else " " for char in str(text))
    return " ".join(line.split()) if len(line) <= 400 else f"{line[:400]}..."
