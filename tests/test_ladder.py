"""benchmarks/ladder: the layouts it plans for 2, 4 and 8 GPUs, its model, and that its steps end and go on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run
from conftest import ROOT

from nsysk3.launch.model import read_model
from nsysk3.launch.topology import stage_layers

LADDER = ROOT / "benchmarks" / "ladder"
SPEC = importlib.util.spec_from_file_location("deepen", LADDER / "deepen.py")
assert SPEC
assert SPEC.loader
deepen = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(deepen)

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("bash", "xz"))), reason="ladder.sh needs bash and xz")

# Of the size and pattern of Kimi-K3, with fewer layers and experts.
CONFIG: dict[str, Any] = {
    "text_config": {
        "num_hidden_layers": 8, "hidden_size": 7168, "vocab_size": 32768, "num_attention_heads": 96,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts": 128, "moe_intermediate_size": 1536, "routed_expert_hidden_size": 3584, "num_shared_experts": 2,
        "first_k_dense_replace": 1, "intermediate_size": 18432, "attn_res_block_size": 4,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8], "num_heads": 96, "head_dim": 128
        },
    }
}  # fmt: skip
# Writes down what it was called with, and leaves what the steps look for.
STAND_IN = """#!/bin/sh
echo "$*" >>"$CALLS"
env | grep '^NSYSK3_' >"$CALLS.env"
for word; do [ "$before" = --out ] && out=$word; before=$word; done
case "$1 $*" in
  *--dry-run*) ;;
  profile*) mkdir -p "$out/nodes/localhost" && echo '{"status": "done"}' >"$out/run.json"
    echo rep >"$out/nodes/localhost/trace.nsys-rep" && echo export >"$out/nodes/localhost/trace.nsysk3.sqlite" ;;
  nccl-bench*) mkdir -p "$out" && echo log >"$out/nccl_tp2.log" ;;
  sweep*report*) ;;
  sweep*) mkdir -p "$out/metadata" && echo '{}' >"$out/metadata/sweep.json" && echo pp >"$out/summary.csv"
    [ -z "$HANG" ] || { trap 'echo told >>"$CALLS"; exit 130' TERM; sleep 30 & wait; } ;;
esac
"""


class Ladder:
    """ladder.sh in a folder, with a stand-in for nsysk3."""

    def __init__(self, folder: Path, gpus: int) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        self.calls_file = folder / "calls"
        stand_in = folder / "nsysk3"
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        self.out = folder / "out"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("NSYSK3", "LADDER_"))}
        self.env = clean | {
            "MODEL": str(folder / "model"), "NSYSK3": str(stand_in), "LADDER_GPUS": str(gpus),
            "LADDER_OUT": str(self.out), "CALLS": str(self.calls_file), "HANG": "",
        }  # fmt: skip

    def start(self, *steps: str, **env: str) -> subprocess.Popen[str]:
        self.calls_file.unlink(missing_ok=True)
        return subprocess.Popen(
            ["bash", str(LADDER / "ladder.sh"), *steps],
            env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *steps: str, **env: str) -> tuple[int, str]:
        process = self.start(*steps, **env)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def calls(self) -> list[str]:
        return (
            self.calls_file.read_text().replace(str(self.out), "OUT").splitlines() if self.calls_file.exists() else []
        )


@pytest.fixture
def ladder(tmp_path: Path) -> Callable[[int], Ladder]:
    return lambda gpus: Ladder(tmp_path, gpus)


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        (2, ["PP1/TP2/EP1", "PP2/TP1/EP1"]),
        (4, ["PP1/TP4/EP1", "PP2/TP2/EP1", "PP4/TP1/EP1"]),
        (8, ["PP1/TP8/EP1", "PP2/TP4/EP1", "PP4/TP2/EP1", "PP8/TP1/EP1"]),
    ],
)
def test_layouts(
    gpus: int, wanted: list[str], ladder: Callable[[int], Ladder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would run is planned by nsysk3 itself, with the settings and the model that it would run with."""
    here = ladder(gpus)
    code, said = here.run("plan")
    assert code == 0, said
    for name in [name for name in os.environ if name.startswith("NSYSK3_")]:
        monkeypatch.delenv(name)
    for line in here.calls_file.with_name("calls.env").read_text().splitlines():
        monkeypatch.setenv(*line.split("=", 1))
    *profiles, sweep = (run(*call.replace("OUT", str(here.out)).split()) for call in here.calls())
    assert [ran.code for ran in (*profiles, sweep)] == [0] * (gpus.bit_length() + 1), sweep.err
    for ran, layout in zip(profiles, wanted, strict=True):
        assert f": {layout}, {gpus} GPUs on localhost" in ran.out
        assert "# warning" not in ran.out
    assert f"{len(wanted)} layouts" in sweep.out
    assert "each at C=8, C=16, 3 repeats of 40 requests, 16,384 -> 1 tokens" in sweep.out
    assert all(f"# {layout}: 6 repeats to measure" in sweep.out for layout in wanted)


def test_every_stage_has_layers(tmp_path: Path) -> None:
    made = deepen.deepened(CONFIG, 16)
    text = made["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 8, 12, 16]
    assert sorted(
        layer for name in ("kda_layers", "full_attn_layers") for layer in text["linear_attn_config"][name]
    ) == [*range(1, 17)]
    unchanged = {"num_hidden_layers", "linear_attn_config"}
    assert {k: v for k, v in text.items() if k not in unchanged} == {
        k: v for k, v in CONFIG["text_config"].items() if k not in unchanged
    }
    assert deepen.deepened(made, 8) == CONFIG
    (tmp_path / "config.json").write_text(json.dumps(made))
    model = read_model(tmp_path)
    assert model
    for pp, tp in ((1, 8), (2, 4), (4, 2), (8, 1)):
        model.check(pp, tp, 1)
        stages = stage_layers(16, pp)
        assert {len(stage) for stage in stages} == {16 // pp}
        assert max(model.gpu_bytes(stages, tp)) < 12 * 2**30
    # Two GPUs hold it too.
    assert max(model.gpu_bytes(stage_layers(16, 2), 1)) < 60 * 2**30


@pytest.mark.parametrize(
    ("layers", "changed", "why"),
    [(3, {}, "hold none"), (36, {}, "residual blocks"), (16, {"full_attn_layers": [4, 7]}, "every 4th")],
)
def test_a_pattern_that_does_not_go_on_is_refused(layers: int, changed: dict[str, Any], why: str) -> None:
    text = CONFIG["text_config"]
    config = {"text_config": text | {"linear_attn_config": text["linear_attn_config"] | changed}}
    with pytest.raises(ValueError, match=why):
        deepen.deepened(config, layers)


def test_steps_go_on_where_the_last_call_ended(ladder: Callable[[int], Ladder]) -> None:
    here = ladder(8)
    code, said = here.run("profile", "nccl", "sweep", "compare", "pack")
    assert code == 0, said
    matrix = "--pp 1,8,2,4 --ep 1 --concurrency 8,16 --repeats 3 --out OUT/sweep"
    logs = "--nccl-tests OUT/nccl/nccl_tp2.log"
    runs = [f"OUT/pp{pp}" for pp in (1, 2, 4, 8)]
    assert here.calls() == [
        *(f"profile --pp {pp} --ep 1 --out OUT/pp{pp}" for pp in (1, 8, 2, 4)),
        "nccl-bench --pp 1,8,2,4 --out OUT/nccl",
        f"sweep {matrix}",
        *(f"analyze {each} {logs}" for each in runs),
        f"compare {' '.join(runs)}",
        f"compare {' '.join(runs)} --format html --out OUT/compare.html",
        "sweep report OUT/sweep",
        "sweep report OUT/sweep --format html --out OUT/sweep.html",
    ]
    assert (here.out / "sweep" / "nccl_tp2.log").is_file()
    packed = {}
    for path in (here.out / "packed").iterdir():
        with tarfile.open(path) as archive:
            packed[path.name] = archive.getnames()
    assert sorted(packed) == [*(f"pp{pp}.tar.xz" for pp in (1, 2, 4, 8)), "rest.tar.xz"]
    assert "pp8/nodes/localhost/trace.nsysk3.sqlite" in packed["pp8.tar.xz"]
    assert not [name for names in packed.values() for name in names if name.endswith(".nsys-rep")]
    assert {"nsysk3.toml", "model/config.json", "sweep/summary.csv", "logs/sweep.txt"} <= {*packed["rest.tar.xz"]}
    # A run that failed is kept beside the new one.
    (here.out / "pp2" / "run.json").write_text('{"status": "failed"}')
    assert here.run("profile", "sweep")[0] == 0
    assert here.calls() == ["profile --pp 2 --ep 1 --out OUT/pp2", f"sweep --resume {matrix}"]
    assert (here.out / "failed-pp2" / "run.json").is_file()


def test_told_to_end_it_tells_nsysk3_once_and_packs(ladder: Callable[[int], Ladder]) -> None:
    here = ladder(2)
    process = here.start("sweep", "profile", "pack", HANG="yes")
    end = time.monotonic() + 20
    while not (here.out / "sweep" / "summary.csv").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert [call.split()[0] for call in here.calls()] == ["sweep", "told"]
    assert (here.out / "packed" / "rest.tar.xz").is_file()


def test_nothing_is_started_that_cannot_end_in_time(ladder: Callable[[int], Ladder]) -> None:
    here = ladder(2)
    code, said = here.run("profile", "sweep", LADDER_SECONDS="20")
    assert (code, here.calls()) == (75, [])
    assert re.search(r"not started, it needs 100 s and (20|1\d) are left", said), said


@pytest.mark.parametrize("gpus", [0, 1, 3, 6])
def test_other_numbers_of_gpus_are_refused(gpus: int, ladder: Callable[[int], Ladder]) -> None:
    code, said = ladder(gpus).run("plan")
    assert code == 2
    assert f"{gpus} GPUs" in said
