"""The documentation is true: its commands print what it shows, its links lead somewhere, and nothing is left out."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
import typer
from command import run
from conftest import FIXTURES, ROOT
from doc_blocks import ANY, anchors, blocks, commands, differs, steps
from fixture_results import result_of
from pydantic import BaseModel
from typer.main import get_command

import nsysk3
from nsysk3.cli import app
from nsysk3.compare.catalog import METRICS
from nsysk3.doctor.lines import Ability, Diagnosis, Line
from nsysk3.result.model import RankMetrics, SpInfo
from nsysk3.run.manifest import HostClock
from nsysk3.sweep.folder import Point, Repeat
from nsysk3.sweep.nccl_table import COLUMNS as NCCL_COLUMNS

DOCS = ROOT / "docs"
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = [*READMES, ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")), ROOT / "reports" / "README.md",
         *sorted(FIXTURES.rglob("README.md"))]  # fmt: skip
FILES = DOCS / "files.md"
NSYSK3: Any = get_command(app)
TYPES = {pl.Boolean: "bool", pl.String: "text"}


def named(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# --- what is shown is what is printed


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkout and takes what commands write."""
    (tmp_path / "fixtures").symlink_to(FIXTURES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


@pytest.mark.parametrize("page", ["tutorial", "howto"])
def test_commands_print_what_the_page_shows(page: str, checkout: Path) -> None:
    code, ran = 0, 0
    for block in blocks(DOCS / f"{page}.md"):
        if block.title:
            (checkout / block.title).write_text(block.text)
        for step in steps(block.text) if block.kind == "console" else []:
            where = f"{page}.md:{block.line}: {step.command}"
            if step.command == "echo $?":
                assert step.shown == [str(code)], where
                continue
            name, *words = shlex.split(step.command)
            assert name == "nsysk3", where
            done = run(*words)
            code, ran = done.code, ran + 1
            assert code == 0 or step.may_fail, f"{where}\n{done.err}"
            assert (differs(step.shown, done.out + done.err) if step.shown else None) is None, where
        if block.kind == "pycon":
            test = doctest.DocTestParser().get_doctest(block.text, {}, page, str(DOCS / f"{page}.md"), block.line)
            assert doctest.DocTestRunner().run(test).failed == 0
    assert ran > 5


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        (["a", "b", "c"], True), (["a", "b"], False), (["b", "c"], False), (["a", ANY], True), ([ANY, "c"], True),
        ([ANY, "a", "b", "c"], True), ([ANY, "a", "c"], False), ([ANY, "c", ANY, "b", ANY], False), ([ANY, "b"], False),
        (["a", ANY, "c"], True), ([ANY, "b", ANY], True), ([ANY], True), (["A", ANY], False),
    ],
    ids=str,
)  # fmt: skip
def test_output_is_compared_line_by_line(shown: list[str], same: bool) -> None:
    assert (differs(shown, "a\nb\nc\n") is None) == same


def test_the_chinese_readme_shows_what_is_printed() -> None:
    text = READMES[1].read_text("utf-8")
    command = re.search(r"`nsysk3 (analyze fixtures/[^`]+)`", text)
    assert command
    words = [str(ROOT / word) if word.startswith("fixtures/") else word for word in command[1].split()]
    shown = [block.text for block in blocks(READMES[1]) if ANY in block.text.splitlines()]
    assert len(shown) == 1
    assert differs([ANY, *shown[0].splitlines(), ANY], run(*words).out) is None


# --- commands and options


@pytest.mark.parametrize("page", [each for each in PAGES if each.name != "cli.md"], ids=lambda page: page.name)
def test_every_command_line_shown_is_one_that_nsysk3_takes(page: Path) -> None:
    for block in blocks(page):
        for line in commands(block.text):
            command, words = NSYSK3, shlex.split(line)[1:]
            context = typer.Context(command, info_name="nsysk3")
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words[0]]
                context = typer.Context(command, parent=context, info_name=words.pop(0))
            if words != ["--help"]:
                command.parse_args(context, words)  # raises for what it does not know


@pytest.mark.parametrize("readme", READMES, ids=lambda page: page.name)
def test_the_readme_names_every_command(readme: Path) -> None:
    shown = {line.split()[1] for block in blocks(readme) for line in commands(block.text)}
    assert shown - {"--help"} == set(NSYSK3.commands)


def test_both_readmes_show_the_same_commands() -> None:
    english, chinese = ([line for block in blocks(page) for line in commands(block.text)] for page in READMES)
    assert english == chinese


# --- numbers and columns


def test_every_metric_has_a_definition() -> None:
    text = (DOCS / "metrics.md").read_text("utf-8")
    units = ("_ns", "_share", "_ratio", "_count")
    names = [name for name in RankMetrics.model_fields if name.endswith(units) and "utc" not in name]
    names += [metric.name for metric in METRICS] + [name for name in SpInfo.model_fields if name != "name"]
    names += ["coverage", "straggler", "stage_imbalance", "bubble_share", "dropped_rows"]
    told = {word for name in named(text) for word in re.findall(r"\w+", name)} | set(re.findall(r"\*\*(\w+)\*\*", text))
    assert sorted(set(names) - told) == []


def documented(section: str) -> dict[str, str]:
    """Column to type, of the table below a heading of files.md and its line of common columns."""
    text = FILES.read_text("utf-8").split(f"\n{section}\n", 1)[1]
    text = re.split(r"\n##", text, maxsplit=1)[0]
    common = re.search(r"Common: (.+)", text)
    everywhere = columns(FILES.read_text("utf-8").split("## Tables")[1].split("\n###")[0])
    found = {name: everywhere[name] for name in named(common[1])} if common else {}
    return found | columns(text)


def columns(text: str) -> dict[str, str]:
    rows = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return {name: row[1] for row in rows for name in named(row[0])}


@pytest.fixture(scope="module")
def result() -> nsysk3.Result:
    return result_of("h200/graph")


def test_every_column_of_every_table_is_documented_with_its_type(result: nsysk3.Result) -> None:
    text = FILES.read_text("utf-8")
    headings = re.findall(r"^### (.+)$", text.split("## Tables")[1].split("\n## ")[0], re.MULTILINE)
    sections = {name: heading for heading in headings for name in heading.split(", ")}
    assert sorted(sections) == sorted(result.tables)
    for name, table in result.tables.items():
        if name == "rank_metrics":
            assert table.columns == list(RankMetrics.model_fields)
            continue
        shown = documented(f"### {sections[name]}")
        if name == "roles":  # one section tells of both; categories has one column more
            del shown["category"]
        kinds = {
            column: TYPES.get(type(kind), "int" if kind.is_integer() else "float")
            for column, kind in table.schema.items()
        }
        numbers = {column for column, kind in kinds.items() if kind in ("int", "float")}
        assert set(shown) == set(kinds), name
        assert {column: kind for column, kind in shown.items() if column not in numbers} == {
            column: kind for column, kind in kinds.items() if column not in numbers
        }, name
        assert [c for c in numbers if shown[c] != kinds[c]] == [], name


def test_other_files_are_documented_as_they_are(tmp_path: Path) -> None:
    assert run("simulate", "--pp", "2", "--tp", "2", "--layers", "4", "--micro-batches", "2", "--out",
               tmp_path / "run", "-q").code == 0  # fmt: skip
    truth = pq.read_schema(tmp_path / "run" / "truth.parquet").names
    assert list(documented("## truth.parquet")) == truth
    assert list(documented("## nccl.csv")) == list(NCCL_COLUMNS)
    sweep = (DOCS / "sweep.md").read_text("utf-8")
    for file, row in (("`results.csv`:", Repeat), ("`summary.csv`:", Point)):
        table = sweep.split(f"\n{file}\n\n")[1].split("\n\n")[0]
        assert list(columns(table)) == [field.name for field in dataclasses.fields(row)]
    shown = Diagnosis((Line("", "nsys", "ok", ""),), (Ability("analyze", True, ""),), (HostClock(host="a", offset_ns=0,
                      uncertainty_ns=1),)).to_document()  # fmt: skip
    told = documented("## doctor --json")
    assert set(told) == set(shown)
    for name in ("lines", "abilities", "clocks"):
        assert set(shown[name][0]) - set(named(told[name])) == set()


@pytest.fixture(scope="module")
def fields() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fields", DOCS / "fields.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_fields_are_those_of_the_models(fields: ModuleType) -> None:
    assert (DOCS / fields.PAGE).read_text("utf-8") == fields.markdown(), "run: python docs/fields.py"


def test_no_field_is_without_a_meaning(fields: ModuleType) -> None:
    def silent(model: type[BaseModel]) -> list[str]:
        every = dict(fields.objects(model))
        return [
            f"{name}.{field}"
            for name, schema in every.items()
            for field, each in schema["properties"].items()
            if not fields.meaning(each, every)
        ]

    assert [silent(model) for _, _, model in fields.DOCUMENTS] == [[]] * len(fields.DOCUMENTS)


# --- links, pictures, the site


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        assert "://" not in link, link
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file() or (target.is_dir() and (target / "README.md").is_file()), link
        assert not anchor or anchor in anchors(target.read_text("utf-8")), link


def test_pictures_are_small_and_shown() -> None:
    pictures = {path.name: path.stat().st_size for path in (DOCS / "img").glob("*.png")}
    shown = {
        Path(link).name for page in PAGES for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text("utf-8"))
    }
    assert set(pictures) == shown
    assert max(pictures.values()) < 150_000


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for package in ("mkdocs", "material"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", ROOT / "mkdocs.yml", "-d", tmp_path]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert {f"{page.stem}.html" for page in DOCS.glob("*.md")} <= set(pages)
    assert "repository/nsysk3/launch/examples/kimi-k3-6000d.toml" in pages["launching.html"]
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)'
    )
    for name, text in pages.items():
        assert [each for each in loaded.findall(text) if "//" in "".join(each)] == [], name
    assert "<li>" in pages["kernels.html"].split("The kernels")[-1]
    assert "\n| " not in re.sub(
        r"<code.*?</code>", "", "".join(pages.values()), flags=re.DOTALL
    )  # a table that is none


# --- the house


def test_rooms_import_only_what_the_design_says() -> None:
    design = (DOCS / "design.md").read_text("utf-8")
    rows = re.findall(r"^\| `nsysk3/(\w+)/` \| .* \| ([^|]+) \|$", design, re.MULTILINE)
    assert {room for room, _ in rows} == {path.parent.name for path in (ROOT / "nsysk3").glob("*/__init__.py")}
    wrong = []
    for room, allowed in rows:
        anywhere, _, inside = allowed.partition("inside functions:")
        for path in (ROOT / "nsysk3" / room).rglob("*.py"):
            code = re.sub(r'""".*?"""', "", path.read_text("utf-8"), flags=re.DOTALL)
            for indent, other in re.findall(r"^( *)(?:from|import) nsysk3\.(\w+)", code, re.MULTILINE):
                if other not in {room, "errors", *re.findall(r"\w+", anywhere + (inside if indent else ""))}:
                    wrong += [f"{path.relative_to(ROOT)} imports {other}"] if room != "cli" else []
    assert wrong == []
