"""The export step with a real nsys."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from conftest import FIXTURES
from nsys_reports import lone_report, names, one_line

from nsysk3.errors import InputError, MissingToolError
from nsysk3.trace import nsys as nsys_module
from nsysk3.trace.nsys import Nsys, cached_export, export_report, find_nsys


@pytest.fixture
def real_nsys(nsys: Path) -> Nsys:
    return find_nsys(nsys)


@pytest.fixture
def rep(tmp_path: Path) -> Path:
    return lone_report(tmp_path)


class TestReal:
    pytestmark = pytest.mark.nsys

    def test_sqlite(self, real_nsys: Nsys, rep: Path) -> None:
        seen: list[str] = []
        export = export_report(rep, real_nsys, progress=seen.append)
        assert seen[-1] == "100%"
        with closing(sqlite3.connect(export)) as connection:
            query = (
                "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = shortName "
                "WHERE value LIKE 'ncclDevKernel_AllReduce%'"
            )
            assert connection.execute(query).fetchone() == (2 * 64,)
        stamp = export.stat().st_mtime_ns
        assert export_report(rep, real_nsys).stat().st_mtime_ns == stamp

    def test_parquetdir(self, real_nsys: Nsys, rep: Path) -> None:
        for force in (False, True):
            export = export_report(rep, real_nsys, kind="parquetdir", force=force)
            assert export == rep.parent / "r.nsysk3_pqtdir" == cached_export(rep, "parquetdir")
            assert pl.read_parquet(export / "CUPTI_ACTIVITY_KIND_KERNEL.parquet").height > 128
        assert names(rep.parent) == ["r.nsys-rep", "r.nsysk3_pqtdir", "r.nsysk3_pqtdir.json"]

    def test_newer_report_names_both_versions(self, real_nsys: Nsys, tmp_path: Path) -> None:
        if real_nsys.version >= "2025.3":
            pytest.skip(f"nsys {real_nsys.version} is not older than the report")
        newer = Path(shutil.copy(FIXTURES / "h200" / "tp2-small-2025.3.nsys-rep", tmp_path / "new er.nsys-rep"))
        with pytest.raises(MissingToolError) as error:
            export_report(newer, real_nsys)
        assert "made by nsys 2025.3.1.0, newer than this one (2024.2.3" in one_line(error)
        assert f"`nsys export -t sqlite --include-blobs=true '{newer}'`" in one_line(error)
        assert names(tmp_path) == ["new er.nsys-rep"]

    @pytest.mark.parametrize("keep", [1000, 200_000])
    def test_truncated_report(self, real_nsys: Nsys, rep: Path, keep: int) -> None:
        os.truncate(rep, keep)
        with pytest.raises(InputError, match="truncated or corrupt"):
            export_report(rep, real_nsys)
        assert names(rep.parent) == ["r.nsys-rep"]

    def test_not_a_report(self, real_nsys: Nsys, rep: Path) -> None:
        rep.write_bytes(b"hello\n" * 1000)
        with pytest.raises(InputError, match="truncated or corrupt") as error:
            export_report(rep, real_nsys)
        one_line(error)

    @pytest.mark.parametrize("kind", ["sqlite", "parquetdir"])
    def test_disk_full(self, real_nsys: Nsys, rep: Path, tmp_path: Path, kind: nsys_module.Kind) -> None:
        small = tmp_path / "small"
        small.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(small)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("cannot mount a small file system here")
        try:
            with pytest.raises(MissingToolError, match="no room in"):
                export_report(rep, real_nsys, kind=kind, out=small / "export")
            assert names(small) == []
        finally:
            subprocess.run(["umount", str(small)], check=True)
