"""Workers that die take no report along, unless it is the report that kills them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scale_runs import Deadly, assert_same, four_nodes

import nsysk3
from nsysk3.errors import MissingToolError


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_nodes(tmp_path_factory.mktemp("deaths"), micro_batches=2)


def test_the_report_of_a_killed_worker_goes_to_another(simulated: Path) -> None:
    with Deadly([(1, 0), (2, 2)], times=1) as crew:
        found = nsysk3.analyze(simulated, crew=crew)
    assert_same(nsysk3.analyze(simulated), found)
    assert crew.account.repeated == 2


def test_reports_that_kill_every_worker_are_left_out(simulated: Path, tmp_path: Path) -> None:
    """One cannot be read; the other could, and the rest of the run had been told of it."""
    with Deadly([(1, 0), (3, 3)], times=2) as crew:
        crew.retries = 1
        found = nsysk3.analyze(simulated, crew=crew)
    nodes = [simulated / f"nodes/node60{number}/trace.sqlite" for number in (2, 4)]
    assert [problem.path for problem in found.document.problems] == list(map(str, nodes))
    for problem in found.document.problems:
        assert "every worker that took it died" in problem.message
        assert "\n" not in problem.message
    others = tmp_path / "run"
    shutil.copytree(simulated, others)
    for number in (2, 4):
        shutil.rmtree(others / f"nodes/node60{number}")
    expected = nsysk3.analyze(others)
    assert [name for name, table in expected.tables.items() if not table.equals(found.tables[name])] == []


def test_when_it_is_the_only_report_that_is_the_answer(simulated: Path) -> None:
    with Deadly([(0, 0)], times=1) as crew:
        crew.retries = 0
        with pytest.raises(MissingToolError, match="every worker that took it died"):
            nsysk3.analyze(simulated / "nodes/node601/trace.sqlite", crew=crew)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_leaves_nothing(simulated: Path, tmp_path: Path, workers: str) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    code = (
        "import sys, time, nsysk3.scale.shelf as shelf\n"
        "from nsysk3.cli import main\n"
        "shelf.memory_share = lambda share: 0\n"
        "if __name__ == '__main__':\n"
        "    import nsysk3.scale.crew as crew, nsysk3.analysis.analyze as analyze\n"
        "    crew.memory_share = lambda share: 0\n"
        "    def slow(*_, **__):\n"
        "        print('now', flush=True)\n"
        "        time.sleep(60)\n"
        "    analyze.match = slow\n"
        "    main()\n"
    )
    script = tmp_path.parent / f"{tmp_path.name}.py"
    script.write_text(code)
    command = [sys.executable, script, "analyze", simulated, "--workers", workers, "--out", tmp_path.parent / "out"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "now\n"
        assert [each.name for each in tmp_path.iterdir() if each.name.startswith("nsysk3-scratch-")]
        os.killpg(process.pid, signal.SIGINT)
        begun = time.monotonic()
        said = process.stderr.read()
        code_of = process.wait(30)
    assert time.monotonic() - begun < 20
    assert code_of == 130
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
