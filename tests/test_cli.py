"""The command line as a user meets it: what goes where, exit codes, one line for what went wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest
from command import run as command
from conftest import FIXTURES, ROOT
from exports import ALLREDUCE, GEMM, Export, two_ranks

import nsysk3
from nsysk3.analysis.analyze import analyze as run_analysis
from nsysk3.errors import InputError, MissingToolError
from nsysk3.result import Result, ResultDocument

TP2 = FIXTURES / "h200" / "tp2.sqlite"
GRAPH = FIXTURES / "h200" / "graph.sqlite"
SCHEMA = ROOT / "docs" / "result.schema.json"
# Point 7 of issue 2, word for word.
COLUMNS = [
    "host", "report", "pid", "device_id", "gpu_uuid", "world_rank", "pp_rank", "tp_rank", "rank_source", "stable",
    "reason", "window_ns", "compute_ns", "comm_ns", "fused_ns", "copy_ns", "overlap_ns", "overlap_ratio",
    "exposed_comm_ns", "exposed_comm_share", "idle_ns", "allreduce_count", "allreduce_total_ns", "allreduce_p50_ns",
    "p2p_count", "p2p_total_ns", "unclassified_share",
]  # fmt: skip


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The installed script, as a shell would start it."""
    return subprocess.run(
        [sys.executable, "-c", "from nsysk3.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        **options,
    )


# --- the program itself


def test_version_and_help() -> None:
    assert process("--version").stdout == f"nsysk3 {nsysk3.__version__}\n"
    ran = process("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    for name in ("analyze", "export", "rules"):
        assert f"  {name} " in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 100
    for name in ("analyze", "export", "rules explain"):
        assert command(*name.split(), "--help").code == 0


def test_the_light_parts_stay_light() -> None:
    heavy = "polars numpy pandas pyarrow sqlalchemy pydantic plotly jinja2 adbc_driver_sqlite"
    for statement in ("import nsysk3; nsysk3.__version__", "import nsysk3.cli"):
        code = f"{statement}; import sys; print(*[m for m in {heavy.split()} if m in sys.modules])"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == "", statement


def test_the_python_api_has_what_the_readme_names() -> None:
    assert {"load", "analyze", "Run", "Result"} <= set(nsysk3.__all__)
    result = nsysk3.analyze(nsysk3.load(GRAPH))
    assert list(result.rank_metrics.to_pandas()["world_rank"]) == [0, 1]
    assert "rank_metrics" in dir(result)
    with pytest.raises(AttributeError, match=r"no table 'layer_metricks'; this result has .*rank_metrics"):
        result.layer_metricks  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        nsysk3.analyse  # noqa: B018


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze"], ["no-such-command"], ["analyze", "--no-such-option", "x"], ["export", "--type", "csv", "x"],
        ["rules", "explain"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    ran = command(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("nsysk3")
    assert len(ran.err.splitlines()) == 2
    assert "Traceback" not in ran.err


# --- analyze: what is printed


def cells(text: str, first: str) -> list[str]:
    """The words of the table row that begins with the given ones."""
    rows = [line.split() for line in text.splitlines() if line.split()[: len(first.split())] == first.split()]
    assert len(rows) == 1, rows
    return rows[0]


def test_the_summary_fits_100_columns_and_says_the_numbers() -> None:
    ran = process("analyze", TP2)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in ran.stdout
    assert "…:" not in ran.stdout
    assert lines[0].startswith("2 ranks, 2 stable · window: capture")
    row = cells(ran.stdout, "0 0/0 vm:0")
    # window ms, compute %, overlap %
    assert row[3:6] == ["298.0", "79.4", "0.0"]
    assert row[-5:] == ["256", "57.4", "0.22", "0", "0.0"]
    budget = cells(ran.stdout, "compute alone")
    assert budget[2:4] == ["232.7", "78.1"]
    (reduce,) = [line.split() for line in lines if "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" in line]
    assert reduce[:3] == ["61.4", "20.9", "256"]


@pytest.mark.parametrize(
    "trace", ["h200/pp2", "h200/graph", "h200/graphwhole", "sglang-h200/tp2-lw", "sglang-h200/pp2-lw"]
)
def test_every_real_summary_fits_100_columns_with_whole_numbers(trace: str) -> None:
    ran = command("analyze", FIXTURES / f"{trace}.sqlite")
    assert ran.code == 0
    for line in ran.out.splitlines():
        assert len(line) <= 100, line
        # a name may be cut, a number or a heading never
        assert not [word for word in line.split() if word.endswith("…") and word[0].isdigit()], line
    assert "p…" not in ran.out
    assert "tot…" not in ran.out


def test_numbers_stay_whole_whatever_their_size(tmp_path: Path) -> None:
    export = Export().host("a-host-with-a-very-long-name.example.com")
    for device in range(3):
        export.kernel(GEMM, 0, 1e9, pid=11 + device, device=device)
        export.kernels(
            ALLREDUCE, [(1e9 + i * 1e6, 1e9 + i * 1e6 + 9e5) for i in range(1200)], pid=11 + device, device=device
        )
    path = export.write(tmp_path / "r.sqlite")
    text = command("analyze", path).out
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["0"]]
    for number in ("2,199,900.0", "45.5", "1,200", "1,080,000.0", "900.00"):
        assert number in row.split(), row


def test_ranks_that_are_not_stable_are_marked_with_the_reason(tmp_path: Path) -> None:
    export = two_ranks()
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"].pop()  # the second rank lost an AllReduce
    export.kernels(ALLREDUCE, [(20 + i, 20.5 + i) for i in range(4)], pid=13, device=2)
    ran = command("analyze", export.write(tmp_path / "r.sqlite"))
    assert "3 ranks, 2 stable" in ran.out
    assert "1*" in ran.out.split()
    assert "* not in medians: rank 1: 3" in ran.out


def test_what_a_trace_cannot_say_is_a_dash() -> None:
    row = cells(command("analyze", FIXTURES / "h200" / "graphwhole.sqlite").out, "0 0/0 vm:0")
    assert row[4:6] == ["-", "-"]
    assert "0.0" not in row
    assert row[-5:] == ["-"] * 5


def test_hostile_names_reach_no_terminal(tmp_path: Path) -> None:
    evil = "evil\x1b]0;pwned\x07\x1b[2J[bold red]markup[/]\u202ekernel\nnext(int)"
    export = Export().kernel(evil, 0, 100).host("ho\x1b[31mst").diagnostic("bad\x1b[5m news")
    path = export.write(tmp_path / "r\x1b[1m.sqlite")
    ran = command("analyze", path, path.with_name("no\x1b[1mne"))
    for text in (ran.out, ran.err):
        assert not [character for character in text if not character.isprintable() and character != "\n"]
    assert "[bold red]markup[/]" in ran.out
    assert ran.code == 2
    # the files hold the name as it is
    assert json.loads(command("analyze", path, "--json").out)["tables"]["unclassified"][0]["name"] == evil


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_terminal_will_do(encoding: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from nsysk3.cli import main; main()", "analyze", str(GRAPH)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert "2 ranks, 2 stable" in ran.stdout.decode(encoding)


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    assert command("analyze", GRAPH, "--quiet") == (0, "", "")
    ran = command("analyze", GRAPH, "-q", "--out", tmp_path / "out")
    assert (ran.code, ran.out) == (0, "")
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["tables", "json"])
def test_a_reader_that_goes_away_costs_no_result_and_no_noise(tmp_path: Path, options: list[str]) -> None:
    out = tmp_path / "out"
    read, write = os.pipe()
    os.close(read)  # nobody reads: the first write fails
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "from nsysk3.cli import main; main()",
            "analyze",
            str(GRAPH),
            "--out",
            str(out),
            *options,
        ],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert ran.stderr == f"results written to {out}/\n"
    assert Result.load(out).rank_metrics.height == 2


# --- analyze: files


def validated(document: dict[str, Any]) -> dict[str, Any]:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    return document


def test_the_schema_in_docs_is_the_one_of_the_code() -> None:
    current = json.dumps(ResultDocument.model_json_schema(), indent=1) + "\n"
    if os.environ.get("NSYSK3_UPDATE"):
        SCHEMA.write_text(current)
    assert SCHEMA.read_text() == current, "NSYSK3_UPDATE=1 pytest tests/test_cli.py -k schema writes it"


@pytest.mark.parametrize("trace", ["h200/tp2", "h200/pp2-two-reports", "h200/graphwhole", "sglang-h200/pp2-lw"])
def test_json_is_valid_by_the_schema_and_is_result_json(trace: str, tmp_path: Path) -> None:
    path = FIXTURES / trace if (FIXTURES / trace).is_dir() else FIXTURES / f"{trace}.sqlite"
    ran = command("analyze", path, "--json", "--out", tmp_path)
    assert (ran.code, ran.err) == (0, f"results written to {tmp_path}/\n")
    document = validated(json.loads(ran.out, parse_constant=pytest.fail))
    assert (tmp_path / "result.json").read_text() == ran.out
    assert len(document["ranks"]) == 2
    assert ResultDocument.model_validate(document) == Result.load(tmp_path).document


def test_json_names_inputs_that_gave_no_rank_and_is_still_valid(tmp_path: Path) -> None:
    (tmp_path / "bad.sqlite").write_bytes(b"")
    two_ranks().write(tmp_path / "good.sqlite")
    ran = command("analyze", tmp_path, "--json")
    assert ran.code == 2
    document = validated(json.loads(ran.out))
    (problem,) = document["problems"]
    assert problem["path"] == str(tmp_path / "bad.sqlite")
    assert "empty file" in problem["message"]


def test_files_have_the_columns_of_the_issue_in_front(tmp_path: Path) -> None:
    ran = command("analyze", TP2, "--out", tmp_path)
    assert (ran.code, ran.err) == (0, f"results written to {tmp_path}/\n")
    with (tmp_path / "rank_metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[: len(COLUMNS)] == COLUMNS
    assert pl.read_parquet(tmp_path / "rank_metrics.parquet").columns[: len(COLUMNS)] == COLUMNS
    assert [(row["world_rank"], row["pp_rank"], row["tp_rank"], row["rank_source"]) for row in rows] == [
        ("0", "0", "0", "marker"), ("1", "0", "1", "marker"),
    ]  # fmt: skip
    assert (rows[0]["compute_ns"], rows[0]["allreduce_count"]) == ("236636862", "256")
    with (tmp_path / "nsys_device_metrics.csv").open(newline="") as file:
        devices = list(csv.DictReader(file))
    assert [device["gpu"] for device in devices] == [row["gpu_uuid"] for row in rows]
    assert [device["compute_ns"] for device in devices] == [row["compute_ns"] for row in rows]
    result = Result.load(tmp_path)
    assert {file.stem for file in tmp_path.glob("*.parquet")} == set(result.tables)


def test_csv_survives_names_with_commas_quotes_and_newlines(tmp_path: Path) -> None:
    path = two_ranks().host('a "host", with\na line').write(tmp_path / "in" / 're"port,.sqlite')
    command("analyze", path, "--out", tmp_path / "out")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "rank_metrics.csv").read_text())))
    assert [row["host"] for row in rows] == ['a "host", with\na line'] * 2
    assert {row["report"] for row in rows} == {'re"port,'}


def test_results_can_be_written_over_and_nothing_half_is_left(tmp_path: Path) -> None:
    for trace in (TP2, GRAPH):
        assert command("analyze", trace, "--out", tmp_path / "out").code == 0
    assert Result.load(tmp_path / "out").rank_metrics.equals(nsysk3.analyze(GRAPH).rank_metrics)
    assert not [file.name for file in (tmp_path / "out").iterdir() if file.name.startswith(".")]


def test_out_that_cannot_be_written_is_exit_code_3(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        ran = command("analyze", GRAPH, "--out", out)
        assert (ran.code, ran.err.count("\n")) == (3, 1)
        assert f"{out}: results cannot be written here" in ran.err
    assert taken.read_text() == "mine"


def test_no_room_for_the_results_is_exit_code_3_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import nsysk3.analysis.analyze, nsysk3.report.terminal\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "from nsysk3.cli import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "analyze", str(GRAPH), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (3, 1), ran.stderr
    assert f"{tmp_path / 'out'}: results cannot be written here" in ran.stderr
    left = [file.name for file in (tmp_path / "out").iterdir()]
    assert "result.json" not in left
    assert not [name for name in left if name.startswith(".")]


def test_loading_a_result_that_is_none_is_one_line(tmp_path: Path) -> None:
    saved = nsysk3.analyze(GRAPH).save(tmp_path / "out")
    with pytest.raises(InputError, match="not a readable result"):
        Result.load(tmp_path)
    text = (saved / "result.json").read_text()
    for spoilt in (text[:1000], "[]", "{}", text.replace('"schema_version": 1', '"schema_version": 999')):
        (saved / "result.json").write_text(spoilt)
        with pytest.raises(InputError, match=r"result\.json: .*analyze again") as error:
            Result.load(saved)
        assert "\n" not in str(error.value)
    (saved / "result.json").write_text(text)
    (saved / "budget.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="analyze again"):
        Result.load(saved)


# --- analyze: options


@pytest.mark.parametrize("window", ["", "1", "2s:1s", "a:b", "everything"])
def test_a_bad_window_is_one_line(window: str) -> None:
    ran = command("analyze", GRAPH, "--window", window)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"nsysk3: --window {window!r}: ")
    assert ran.err.count("\n") == 1


def test_a_window_of_the_users_cuts_every_number() -> None:
    whole, part = (json.loads(command("analyze", TP2, "--json", *w).out) for w in ([], ["--window", "100ms:150ms"]))
    assert part["window"]["used"] == "100ms:150ms"
    for before, after in zip(whole["ranks"], part["ranks"], strict=True):
        assert after["window_ns"] == 50_000_000
        assert 0 < after["allreduce_count"] < before["allreduce_count"]
        assert after["compute_ns"] + after["exposed_comm_ns"] <= 50_000_000


RULES = {
    "not toml": ("[[rule]", "not valid TOML"),
    "not json": ("{", "not valid JSON"),
    "no rules": ("x = 1", "holds [[rule]] tables"),
    "a bad expression": ('[[rule]]\npattern = "("\ncategory = "X"\nrole = "compute"', "bad regular expression"),
    "an unknown role": ('[[rule]]\npattern = "x"\ncategory = "X"\nrole = "magic"', "unknown role 'magic'"),
    "an unknown key": ('[[rule]]\npattern = "x"\ncategory = "X"\nrole = "copy"\nweight = 3', "unknown key 'weight'"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_bad_rules_file_is_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    text, said = RULES[name]
    rules = tmp_path / "mine.rules"
    rules.write_text(text)
    for arguments in (["analyze", GRAPH], ["rules", "explain", "x"], ["rules", "list"]):
        ran = command(*arguments, "--rules", rules)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert str(rules) in ran.err
        assert said in ran.err
    assert command("analyze", GRAPH, "--rules", tmp_path / "none.toml").code == 2


def test_rules_of_gputrc2graph_are_taken(tmp_path: Path) -> None:
    rules = tmp_path / "sglang.json"
    rules.write_text(json.dumps({"sglang": {"k3": {"nvjet": "gemm-mine", "nccl": "nccl_and_custom_ar", ".*": "misc"}}}))
    document = json.loads(command("analyze", TP2, "--json", "--rules", rules).out)
    categories = {row["category"]: row["role"] for row in document["tables"]["categories"]}
    assert categories["gemm-mine"] == "compute"
    assert categories["nccl_and_custom_ar"] == "allreduce"
    assert any("matches every name and was left out" in note for note in document["notes"])
    assert document["ranks"][0]["allreduce_count"] == 256


def test_rules_explain_and_list() -> None:
    ran = command("rules", "explain", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    assert (ran.code, ran.err) == (0, "")
    assert "verdict   AR, role allreduce" in ran.out
    assert "because   rule 1 (nsysk3 rules.toml rule 1)" in ran.out
    assert "no rule matches" in command("rules", "explain", "zzz").out
    listed = command("rules", "list").out.splitlines()
    assert listed[0].split()[:3] == ["1", "allreduce", "AR"]
    assert len(listed) > 50


# --- export


@pytest.mark.nsys
def test_export_prints_where_each_export_is_and_makes_it_once(nsys: Path, small_reports: Path) -> None:
    reports = sorted(small_reports.iterdir())
    first = command("export", *reports)
    made = [report.with_name(f"{report.stem}.nsysk3.sqlite") for report in reports]
    assert first == (0, "".join(f"{path}\n" for path in made), "")
    stamps = [path.stat().st_mtime_ns for path in made]
    assert command("export", *reports) == first
    assert [path.stat().st_mtime_ns for path in made] == stamps
    assert command("analyze", made[0]).code == 0
    parquet = command("export", reports[0], "--type", "parquetdir", "--out", small_reports / "tables")
    assert parquet == (0, f"{small_reports / 'tables'}\n", "")
    assert command("analyze", small_reports / "tables").code == 0
    again = command("export", reports[0], "--type", "parquetdir", "--out", small_reports / "tables")
    assert (again.code, again.out) == (2, "")
    assert "--force" in again.err
    assert command("export", *reports, "--out", small_reports / "x").code == 2


@pytest.mark.nsys
def test_export_goes_on_after_a_report_that_fails(nsys: Path, small_reports: Path) -> None:
    newer = Path(shutil.copy(FIXTURES / "h200" / "tp2-small-2025.3.nsys-rep", small_reports / "newer.nsys-rep"))
    good = small_reports / "tp2-small-2024.2.nsys-rep"
    ran = command("export", newer, small_reports / "none.nsys-rep", good)
    assert ran.code == 3
    assert ran.out == f"{good.with_name('tp2-small-2024.2.nsysk3.sqlite')}\n"
    assert [line.split(": ")[1] for line in ran.err.splitlines()] == [str(newer), str(small_reports / "none.nsys-rep")]


def test_export_without_an_nsys_is_exit_code_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NSYSK3_NSYS", raising=False)
    ran = command("export", FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "no nsys found" in ran.err


# --- what goes wrong inside


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("a.sqlite: spoilt"), 2, "nsysk3: a.sqlite: spoilt\n"),
        (MissingToolError("no nsys"), 3, "nsysk3: no nsys\n"),
        (InputError("two\nlines"), 2, "nsysk3: two lines\n"),
        (MemoryError(), 3, "nsysk3: out of memory"),
        (KeyError("x"), 70, "nsysk3: internal error, please report it (KeyError: 'x')"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("nsysk3.analysis.analyze.analyze", broken)
    monkeypatch.delenv("NSYSK3_DEBUG", raising=False)
    ran = command("analyze", GRAPH)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert ran.err.startswith(said)
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "terminated"])
def test_an_interrupted_command_ends_with_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """An nsys that never ends is what a user interrupts; it goes too, and leaves no half export."""
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo "NVIDIA Nsight Systems version 2024.2.3.38";; *--help*) echo parquetdir;;\n'
        f"*) echo $$ > {tmp_path}/started.part; mv {tmp_path}/started.part {tmp_path}/started; sleep 600;; esac\n"
    )
    nsys.chmod(0o755)
    report = tmp_path / "in" / "r.nsys-rep"
    report.parent.mkdir()
    report.write_bytes(b"a report")
    command_line = [
        sys.executable,
        "-c",
        "from nsysk3.cli import main; main()",
        "analyze",
        str(report),
        "--nsys",
        str(nsys),
    ]
    with subprocess.Popen(
        command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "NSYSK3_CACHE": str(tmp_path / "cache")},
    ) as started:  # fmt: skip
        for _ in range(600):
            if (tmp_path / "started").exists() or started.poll() is not None:
                break
            time.sleep(0.1)
        time.sleep(1)  # past the start of nsys and into waiting for it
        started.send_signal(number)
        try:
            out, err = started.communicate(timeout=60)
        finally:
            started.kill()
    assert (started.returncode, out, err) == (130, "", "nsysk3: interrupted\n")
    assert [path.name for path in report.parent.iterdir()] == ["r.nsys-rep"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)


def test_analyses_are_pure(tmp_path: Path) -> None:
    """One loaded run can be analysed again and again, in any order."""
    run = nsysk3.load(two_ranks().write(tmp_path / "r.sqlite"))
    first = run_analysis(run)
    run_analysis(run, window="0:1ms")
    assert run_analysis(run).document == first.document
