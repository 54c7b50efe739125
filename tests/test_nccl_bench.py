"""Measuring communication domains: what is measured, how it is printed, and that it is read back."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import types
from pathlib import Path

import pytest
import sshd
from command import Ran, run
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import free_port

from nsysk3.analysis.nccl_tests import read_nccl_tests
from nsysk3.errors import InputError
from nsysk3.run.nccl_log import NUMA_MARK, read_nccl_log
from nsysk3.sweep import nccl_worker
from nsysk3.sweep.domains import Domain, domains
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.nccl_bench import Measure
from nsysk3.sweep.nccl_table import default_name, domain_table, rows_of, topology

MIB = 2**20
# As nccl-tests 2.13 prints it (all_reduce_perf -b 128M -e 256M -f 2 -g 4).
REAL = """\
# nThread 1 nGpus 4 minBytes 134217728 maxBytes 268435456 step: 2(factor) warmup iters: 5 \
iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   4211 on    node1 device  0 [0x16] NVIDIA RTX 6000D
#  Rank  1 Group  0 Pid   4211 on    node1 device  1 [0x27] NVIDIA RTX 6000D
#  Rank  2 Group  0 Pid   4211 on    node1 device  2 [0x38] NVIDIA RTX 6000D
#  Rank  3 Group  0 Pid   4211 on    node1 device  3 [0x5a] NVIDIA RTX 6000D
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
   134217728      33554432     float     sum      -1   4930.1   27.22   40.84      0   4921.8   27.27   40.90      0
   268435456      67108864     float     sum      -1   9785.0   27.43   41.15      0   9790.2   27.42   41.13      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 40.995
#
"""


def test_a_log_that_is_cut_short_is_told_and_garbage_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce_perf.log"
    path.write_text(REAL[: REAL.index("   268435456")] + "   268435456 67108864 float sum -1 9785.0 27..3 41.15 0\n")
    assert [row.bytes for row in read_nccl_log(path).rows] == [128 * MIB]
    ran = run("nccl-bench", "--log", path)
    assert (ran.code, "all_reduce_perf.log has no end" in ran.err) == (0, True)
    path.write_text(REAL)
    assert run("nccl-bench", "--log", path).err == ""


def test_log_of_nccl_tests(tmp_path: Path) -> None:
    path = tmp_path / "nccl_tp4_intra_node.log"
    path.write_text(REAL)
    log = read_nccl_log(path)
    assert (log.ranks, log.operation, [row.role for row in log.rows]) == (4, None, ["allreduce"] * 2)
    assert (default_name(log), topology(log)) == ("TP4", "one host, GPU 0-3")
    ran = run("nccl-bench", "--log", path)
    assert ran.code == 0
    assert ran.out.splitlines()[3].split()[:1] == ["TP4"]
    for cell in ("4.93 ms", "40.84 GB/s", "41.00 GB/s", "one host, GPU 0-3"):
        assert cell in ran.out
    assert read_nccl_tests([path])["busbw_gbs"].to_list() == [40.84, 41.15]
    path.write_text(REAL.replace(" 40.84      0", " 40.84      3") + f"{NUMA_MARK} 0,0,1,1\n")
    ran = run("nccl-bench", "--log", path)
    assert ran.code == 4
    assert "2 NUMA nodes" in ran.out
    assert "3 values were wrong" in ran.err
    path.write_text("no such thing\n")
    assert run("nccl-bench", "--log", path).code == 2


# What the worker prints.

sizes = st.lists(st.integers(1, 2**28).map(lambda count: count * 4), min_size=1, max_size=4, unique=True).map(sorted)


@settings(max_examples=40)
@given(
    st.sampled_from(["all_reduce", "sendrecv"]), st.integers(2, 32), sizes, st.floats(1e-6, 10), st.integers(0, 5),
    st.integers(1, 3),
)  # fmt: skip
def test_a_worker_s_log_says_what_was_measured(
    tmp_path_factory: pytest.TempPathFactory,
    op: str,
    world: int,
    wanted: list[int],
    seconds: float,
    wrong: int,
    hosts: int,
) -> None:
    given = nccl_worker.options(
        ["--op", op, "--world", str(world), "--devices", "0", "--sizes", ",".join(map(str, wanted))]
    )
    torch = types.SimpleNamespace(
        __version__="2.9", cuda=types.SimpleNamespace(nccl=types.SimpleNamespace(version=lambda: (2, 28, 9)))
    )
    places = [
        (f"h{rank % hosts}", 1000 + rank, rank, f"0000:{rank:02x}:00", "NVIDIA [H200] (x 5)") for rank in range(world)
    ]
    factor = 2 * (world - 1) / world if op == "all_reduce" else 1
    lines = [nccl_worker.head(torch, given, places, True)]
    for size in wanted:
        lines.append(nccl_worker.line(op, size // 4, seconds, size / seconds / 1e9 * factor, wrong))
    lines.append(nccl_worker.tail([1.0], wrong))
    path = tmp_path_factory.mktemp("logs") / "x.log"
    path.write_text("\n".join(lines))
    log = read_nccl_log(path)
    assert (log.operation, log.ranks, [row.bytes for row in log.rows]) == (op, world, wanted)
    assert log.places == tuple((host, device) for host, _, device, _, _ in places)
    for row in log.rows:
        assert row.time_us == pytest.approx(seconds * 1e6, abs=0.006)
        assert row.wrong == wrong
        assert row.busbw_gbs == pytest.approx(row.bytes / seconds / 1e9 * factor, abs=0.0006)
        assert row.role == ("allreduce" if op == "all_reduce" else "p2p")
    counted = sum(int(row["wrong"]) for row in rows_of([log]))
    assert counted == wrong * len(wanted)
    assert domain_table(rows_of([log])).notes == (
        (f"{counted:,} values were wrong: these links or their drivers corrupt data",) if counted else ()
    )


@pytest.mark.parametrize("op", ["all_reduce", "sendrecv"])
@pytest.mark.parametrize("world", [2, 5])
def test_check_finds_every_wrong_value(op: str, world: int) -> None:
    """A network in memory, right and then with three values of the first rank changed."""
    torch = pytest.importorskip("torch")
    count = 1000

    def wrong_of(rank: int, damage: int) -> int:
        data = [nccl_worker.make(torch, count, each, "cpu") for each in range(world)]

        def all_reduce(tensor: object) -> None:
            if getattr(tensor, "dim", lambda: 0)() == 0:
                return  # the count itself: of this rank alone
            tensor.copy_(sum(data))  # type: ignore[attr-defined]
            tensor[:damage] += 1  # type: ignore[index]

        def batch_isend_irecv(_: object) -> list[object]:
            got[0].copy_(data[(rank - 1) % world])
            got[0][:damage] += 1
            return []

        got: list[object] = []

        def pair(_: object, tensor: object, __: int) -> object:
            got[:] = [tensor]  # the receiving one comes last
            return None

        dist = types.SimpleNamespace(
            all_reduce=all_reduce, batch_isend_irecv=batch_isend_irecv, P2POp=pair, isend=0, irecv=1
        )
        given = nccl_worker.options(
            ["--op", op, "--world", str(world), "--devices", "0", "--sizes", "4", "--rank", str(rank)]
        )
        return nccl_worker.check(torch, dist, given, count, torch.device("cpu"))

    for rank in range(world):
        assert wrong_of(rank, 0) == 0
        assert wrong_of(rank, 3) == 3


# Domains.


def test_domains_of_the_published_layouts() -> None:
    hosts = ["601", "602", "603", "604"]
    layouts = [Layout(pp, 32 // pp, 1) for pp in (1, 2, 4, 8, 16, 32)]
    found = {domain.name: domain for domain in domains(layouts, hosts)}
    assert [(name, len(domain.places), len(domain.hosts)) for name, domain in found.items()] == [
        ("TP2", 2, 1), ("TP4", 4, 1), ("TP8", 8, 1), ("TP16", 16, 2), ("TP32", 32, 4), ("PP inside a host", 2, 1),
        ("PP between hosts", 2, 2),
    ]  # fmt: skip
    assert found["TP4"].places == tuple(("601", device) for device in range(4))
    assert found["PP between hosts"].places == (("601", 0), ("603", 0))  # the first boundary of PP2
    assert domains([Layout(1, 1, 1)], ["a"]) == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1M,4M", (MIB, 2 * MIB, 4 * MIB)), ("4K", (4096,)), ("3,20", (3, 6, 12)), ("128m,256M", (128 * MIB, 256 * MIB))],
)
def test_sizes_double(text: str, wanted: tuple[int, ...]) -> None:
    assert Measure.of(text, device="cpu").sizes == wanted


@pytest.mark.parametrize("text", ["", "4M,1M", "big", "1M,2M,4M", "0"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--sizes"):
        Measure.of(text, device="cpu")


# The command.


def bench(folder: Path, *words: object, python: str = sys.executable) -> Ran:
    settings = folder / "nsysk3.toml"
    settings.write_text(f"[server]\npython = {json.dumps(python)}\n")
    return run("nccl-bench", "--config", settings, "--out", folder / "out", "--device", "cpu", "--sizes", "32K,64K",
               "--iters", 2, "--warmup", 1, *words)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch: pip install torch")
def test_measures_through_torch_what_analyze_takes(tmp_path: Path) -> None:
    ran = bench(tmp_path, "--pp", "1", "--tp", "3")
    assert ran.code == 0, ran.err
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"nccl.csv", "nccl_tp3.log"}
    log = read_nccl_log(out / "nccl_tp3.log")
    assert log.places == tuple((socket.gethostname(), device) for device in range(3))
    for row in log.rows:
        assert row.wrong == 0
        assert row.busbw_gbs == pytest.approx(row.algbw_gbs * 4 / 3, abs=0.002)
    table = read_nccl_tests([out / "nccl_tp3.log"])
    assert list(zip(table["role"], table["ranks"], table["bytes"], strict=True)) == [
        ("allreduce", 3, 32768),
        ("allreduce", 3, 65536),
    ]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch: pip install torch")
def test_measures_between_hosts(tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    with sshd.hosts(tmp_path / "ssh", 2) as hosts:
        settings = tmp_path / "nsysk3.toml"
        settings.write_text(f"""
[cluster]
hosts = {json.dumps(hosts.names)}
ssh_options = {json.dumps(hosts.options)}
dist_port = {free_port()}
[server]
python = {json.dumps(sys.executable)}
""")
        ran = run("nccl-bench", "--config", settings, "--out", tmp_path, "--device", "cpu", "--sizes", "32K", "--pp", 2,
                  "--tp", 1, "--iters", 2, "-q")  # fmt: skip
    assert ran.code == 0, ran.err
    log = read_nccl_log(tmp_path / "nccl_pp_between_hosts.log")
    assert (log.operation, log.ranks, [row.wrong for row in log.rows]) == ("sendrecv", 2, [0])


def test_uses_the_programs_of_nccl_tests_where_they_are(tmp_path: Path) -> None:
    """A stand-in that prints a real log and what it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("all_reduce_perf", "sendrecv_perf"):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "# $0 $* devices=$CUDA_VISIBLE_DEVICES"\ncat <<END\n{REAL}END\n')
        program.chmod(0o755)
    ran = bench(tmp_path, "--pp", "1", "--tp", "4", "--nccl-tests", folder)
    assert ran.code == 0, ran.err
    text = (tmp_path / "out" / "nccl_tp4.log").read_text()
    assert "all_reduce_perf -b 32768 -e 65536 -f 2 -g 4 -c 1 -w 1 -n 2 devices=0,1,2,3" in text
    assert "40.84 GB/s" in ran.out
    (folder / "all_reduce_perf").write_text("#!/bin/sh\necho 'Test NCCL failure: unhandled system error' >&2\nexit 3\n")
    ran = bench(tmp_path, "--pp", "1", "--tp", "4", "--nccl-tests", folder)
    assert (ran.code, len(ran.err.strip().splitlines())) == (4, 2)
    assert "ended with 3: Test NCCL failure" in ran.err
    assert bench(tmp_path, "--pp", "1", "--tp", "4", "--nccl-tests", tmp_path / "nowhere").code == 2


def test_what_fails_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    broken.chmod(0o755)
    ran = bench(tmp_path, "--pp", "1", "--tp", "2", "--torch", "-q", python=str(broken))
    assert ran.code == 4
    assert ran.err.strip() == "nsysk3: TP2: the measurement failed: ModuleNotFoundError: No module named 'torch'"
    for words in ((), ("--pp", "1"), ("--pp", "1", "--tp", "1"), ("--pp", "1", "--tp", "2", "--sizes", "x")):
        ran = bench(tmp_path, *words)
        assert ran.code == 2
        assert len(ran.err.strip().splitlines()) == 1


def test_a_domain_knows_its_devices_by_host() -> None:
    domain = Domain("TP4", "all_reduce", (("a", 0), ("a", 3), ("b", 0), ("b", 3)))
    assert domain.hosts == ("a", "b")
    assert domain.devices("b") == (0, 3)
