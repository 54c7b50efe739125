"""The export step, with scripts that fail the ways nsys fails."""

import errno
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from nsys_reports import lone_report, names, one_line

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.trace import nsys as nsys_module
from nsysk3.trace.nsys import Nsys, cached_export, export_report, find_nsys

GOOD = 'cp "$GOOD_EXPORT" "$output"'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYSK3_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NSYSK3_NSYS", raising=False)


@pytest.fixture
def rep(tmp_path: Path) -> Path:
    """A report in a folder of its own, so that what an export leaves there can be listed."""
    return lone_report(tmp_path)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nsys]:
    """Make an nsys whose `export` runs a shell snippet that sees $output and $input; count its exports."""
    good = tmp_path / "good.sqlite"
    with closing(sqlite3.connect(good)) as connection:
        connection.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    monkeypatch.setenv("GOOD_EXPORT", str(good))

    def make(export: str, help_text: str = "--include-blobs= parquetdir", version: str = "2024.2.3.38-1v0") -> Nsys:
        script = tmp_path / "bin" / "nsys"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"""#!/bin/sh
case "$*" in
  --version) echo "NVIDIA Nsight Systems version {version}"; exit 0;;
  "export --help") echo "{help_text}"; exit 0;;
esac
for word; do case "$word" in --output=*) output=${{word#--output=}};; esac; input=$word; done
echo "$*" >>"{tmp_path}/calls"
{export}
""")
        script.chmod(0o755)
        return find_nsys(script)

    return make


def calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "calls"
    return log.read_text().splitlines() if log.exists() else []


# --- finding nsys


def test_explicit_goes_before_environment_before_path(
    fake: Callable[..., Nsys], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {}
    for name in ("explicit", "env", "path"):
        fake(GOOD, version=f"2024.2.3-{name}")
        (tmp_path / name).mkdir()
        paths[name] = Path(shutil.move(tmp_path / "bin" / "nsys", tmp_path / name / "nsys"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=os.pathsep)
    assert find_nsys().version == "2024.2.3-path"
    monkeypatch.setenv("NSYSK3_NSYS", str(paths["env"]))
    assert find_nsys().version == "2024.2.3-env"
    assert find_nsys(paths["explicit"]) == Nsys(paths["explicit"], "2024.2.3-explicit", True, True)


def test_no_nsys_says_how_to_get_an_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError) as error:
        find_nsys()
    assert "`nsys export -t sqlite --include-blobs=true FILE`" in one_line(error)
    assert "--nsys" in one_line(error)


def test_an_nsys_that_was_asked_for_is_not_replaced_by_another(
    fake: Callable[..., Nsys], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(GOOD)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with pytest.raises(MissingToolError, match=r"--nsys /nowhere/nsys: no such program"):
        find_nsys("/nowhere/nsys")
    monkeypatch.setenv("NSYSK3_NSYS", "/nowhere/nsys")
    with pytest.raises(MissingToolError, match=r"\$NSYSK3_NSYS /nowhere/nsys: no such program"):
        find_nsys()
    with pytest.raises(MissingToolError, match="does not answer like NVIDIA"):
        find_nsys("true")


# --- options and the cache


def test_older_nsys_gets_no_option_it_does_not_know(fake: Callable[..., Nsys], rep: Path, tmp_path: Path) -> None:
    old = fake(GOOD, help_text="--type", version="2022.4.2.1-df9881f")
    assert (old.supports_blobs, old.supports_parquetdir) == (False, False)
    export_report(rep, old)
    assert "blobs" not in calls(tmp_path)[0]
    with pytest.raises(MissingToolError, match=r"2022\.4\.2.*--type sqlite"):
        export_report(rep, old, kind="parquetdir")

    # a newer one adds the payloads, and the older one then takes what is there
    export_report(rep, fake(GOOD))
    assert "--include-blobs=true" in calls(tmp_path)[1]
    export_report(rep, old)
    assert len(calls(tmp_path)) == 2


def test_export_is_reused_while_the_content_is_the_same(fake: Callable[..., Nsys], rep: Path, tmp_path: Path) -> None:
    (rep.parent / "r.sqlite").write_text("the user's own")
    nsys = fake(GOOD)
    first = export_report(rep, nsys)
    assert first == rep.parent / "r.nsysk3.sqlite"
    rep.chmod(0o600)
    os.utime(rep, (1, 1))
    assert export_report(rep, nsys) == cached_export(rep) == first
    assert len(calls(tmp_path)) == 1
    assert (rep.parent / "r.sqlite").read_text() == "the user's own"
    assert names(rep.parent) == ["r.nsys-rep", "r.nsysk3.sqlite", "r.nsysk3.sqlite.json", "r.sqlite"]

    export_report(rep, nsys, force=True)
    assert len(calls(tmp_path)) == 2
    with rep.open("r+b") as file:
        file.seek(1000)
        file.write(b"changed")
    assert cached_export(rep) is None
    export_report(rep, nsys)
    assert len(calls(tmp_path)) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda export: export.write_bytes(export.read_bytes()[:5000]),
        lambda export: export.unlink(),
        lambda export: export.with_name(export.name + ".json").write_text("{"),
        lambda export: export.with_name(export.name + ".json").write_text("[]"),
        lambda export: export.with_name(export.name + ".json").unlink(),
    ],
    ids=["cut short", "gone", "note damaged", "note strange", "note gone"],
)
def test_a_spoilt_cache_is_made_again(
    fake: Callable[..., Nsys], rep: Path, tmp_path: Path, spoil: Callable[[Path], Any]
) -> None:
    nsys = fake(GOOD)
    export = export_report(rep, nsys)
    whole = export.read_bytes()
    spoil(export)
    assert cached_export(rep) is None
    assert export_report(rep, nsys).read_bytes() == whole
    assert len(calls(tmp_path)) == 2


def test_large_reports_are_told_apart_by_blocks_of_both_ends(tmp_path: Path) -> None:
    big = tmp_path / "big.nsys-rep"
    with big.open("wb") as file:
        file.truncate(1 << 30)
    empty = nsys_module._content_key(big)
    for offset in (0, (1 << 30) - 1):
        with big.open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        changed = nsys_module._content_key(big)
        assert changed != empty
        empty = changed


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_sends_the_export_to_the_cache(
    fake: Callable[..., Nsys], rep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    nsys = fake(GOOD)
    refuse_writing(monkeypatch, rep.parent, code)
    export = export_report(rep, nsys)
    assert export.is_relative_to(tmp_path / "cache")
    assert names(rep.parent) == ["r.nsys-rep"]
    moved = Path(shutil.copy(rep, tmp_path / "r.nsys-rep"))
    assert export_report(moved, nsys) == export
    assert len(calls(tmp_path)) == 1

    refuse_writing(monkeypatch, tmp_path, code)
    with pytest.raises(MissingToolError, match="set NSYSK3_CACHE"):
        export_report(rep, nsys, force=True)


def refuse_writing(monkeypatch: pytest.MonkeyPatch, where: Path, code: int) -> None:
    """Root may write anywhere, so the system's refusal is played."""

    def mkdtemp(suffix: str | None = None, prefix: str | None = None, dir: str | None = None) -> str:
        if Path(dir or "/").is_relative_to(where):
            raise OSError(code, os.strerror(code), dir)
        return genuine(suffix, prefix, dir)

    genuine = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)


def test_out_is_the_place_and_is_never_replaced_unasked(fake: Callable[..., Nsys], rep: Path, tmp_path: Path) -> None:
    nsys = fake(GOOD)
    out = tmp_path / "deep" / "er" / "mine.sqlite"
    assert export_report(rep, nsys, out=out) == out
    assert names(out.parent) == ["mine.sqlite"]
    assert names(rep.parent) == ["r.nsys-rep"]
    with pytest.raises(InputError, match="exists: pass --force"):
        export_report(rep, nsys, out=out)
    out.write_text("old")
    export_report(rep, nsys, out=out, force=True)
    assert out.read_bytes().startswith(b"SQLite format 3")
    with pytest.raises(InputError, match="is a directory that no export made"):
        export_report(rep, nsys, out=tmp_path, force=True)
    with pytest.raises(InputError, match="is a directory that no export made"):
        export_report(rep, nsys, out=tmp_path, kind="parquetdir", force=True)
    with pytest.raises(InputError, match="cannot be written"):
        export_report(rep, nsys, out=out / "below-a-file")


# --- what can go wrong


def test_unusable_reports(fake: Callable[..., Nsys], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys = fake(GOOD)
    empty = tmp_path / "empty.nsys-rep"
    empty.touch()
    for path, why in ((empty, "empty"), (tmp_path / "none.nsys-rep", "no such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=f"{re.escape(str(path))}: .*{why}") as error:
            export_report(path, nsys)
        one_line(error)

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match="no permission to read it"):
        export_report(empty, nsys)
    assert not calls(tmp_path)


NEWER = (
    "Report was created in Nsight Systems version (2025.5.1.121-255136380782v0), "
    "newer than your current version (2024.2.3.38-242334140272v0)"
)


@pytest.mark.parametrize(
    ("export", "kind", "says"),
    [
        (f'echo "{NEWER}" >&2; exit 1', MissingToolError, r"2025\.5\.1\.121.*newer than this one \(2024\.2\.3\.38"),
        ("exit 0", InputError, "exit code 0 and no export"),
        (f"{GOOD}; exit 3", InputError, "exit code 3"),
        ('echo not a database >"$output"', InputError, "could not export it"),
        (f'{GOOD}; truncate -s -1 "$output"', InputError, "could not export it"),
        (f'{GOOD}; echo "[tag_message*] = database or disk is full" >&2', MissingToolError, "no room in .*--out"),
        ('echo "write: No space left on device"; exit 1', MissingToolError, "no room in"),
        ('echo "Section Table Reference magic number mismatch."; exit 1', InputError, "truncated or corrupt"),
        ("kill -SEGV $$", MissingToolError, "killed by SIGSEGV; "),
        ("kill -KILL $$", MissingToolError, "killed by SIGKILL, perhaps for want of memory"),
        (r'printf "odd \033[31m\aname\n"; exit 1', InputError, r"odd \[31m name"),
    ],
    ids=[
        "newer", "nothing made", "made but failed", "not SQLite", "cut short", "disk full, rc 0", "disk full",
        "truncated report", "crash", "killed", "control characters",
    ],
)  # fmt: skip
def test_a_failed_export_is_one_line_and_leaves_nothing(
    fake: Callable[..., Nsys], rep: Path, tmp_path: Path, export: str, kind: type[NsysK3Error], says: str
) -> None:
    with pytest.raises(kind, match=says) as error:
        export_report(rep, fake(export))
    assert one_line(error).startswith(f"{rep}: ")
    assert names(rep.parent) == ["r.nsys-rep"]
    assert len(calls(tmp_path)) == 1  # another folder would not help


def test_a_failed_export_leaves_the_one_before(fake: Callable[..., Nsys], rep: Path) -> None:
    export = export_report(rep, fake(GOOD))
    with pytest.raises(InputError):
        export_report(rep, fake("exit 1"), force=True)
    assert cached_export(rep) == export


def test_no_room_of_our_own(fake: Callable[..., Nsys], rep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys = fake(GOOD)
    refuse_writing(monkeypatch, rep.parent, errno.ENOSPC)
    with pytest.raises(MissingToolError, match="no room in"):
        export_report(rep, nsys)


def test_nsys_gone_since_it_was_found(fake: Callable[..., Nsys], rep: Path) -> None:
    nsys = fake(GOOD)
    nsys.path.unlink()
    with pytest.raises(MissingToolError, match="cannot be run"):
        export_report(rep, nsys)


def test_progress_is_passed_on(fake: Callable[..., Nsys], rep: Path) -> None:
    seen: list[str] = []
    bar = r'printf "\rProcessing 9 events: [=1%%   ]\rProcessing 9 events: [====100%%]\n"'
    export_report(rep, fake(f"{bar}; {GOOD}"), progress=seen.append)
    assert seen == ["1%", "100%"]


def test_ctrl_c_kills_nsys_and_leaves_nothing(fake: Callable[..., Nsys], rep: Path, tmp_path: Path) -> None:
    # GIVEN an nsys that has begun to write and waits in a child of its own
    nsys = fake('echo half >"$output"; sleep 300 & echo $! >"$GOOD_EXPORT.pid"; echo "[ 37%"; wait')
    code = (
        "import sys; from pathlib import Path; from nsysk3.trace.nsys import *\n"
        "export_report(Path(sys.argv[2]), find_nsys(sys.argv[1]), progress=lambda text: print(text, flush=True))"
    )
    command = [sys.executable, "-c", code, nsys.path, rep]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"37%\n"  # so nsysk3 knows of it, too
    pid_file = tmp_path / "good.sqlite.pid"

    # WHEN the user interrupts
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)

    # THEN
    assert b"KeyboardInterrupt" in stderr
    assert names(rep.parent) == ["r.nsys-rep"]
    child = int(pid_file.read_text())
    wait_until(lambda: not is_running(child))


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a container without an init leaves it a zombie
