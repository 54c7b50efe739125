"""A server on its hosts: found healthy or not, explained when it fails, and always ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from launch_runs import faults, plan_of, processes_of, settings
from processes import eventually, parent_of

from nsysk3.errors import RunFailedError
from nsysk3.launch import follow
from nsysk3.launch.failures import (
    ServerFailedError,
)
from nsysk3.launch.hosts import Host
from nsysk3.launch.load import run_load
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.launch.parallel import each
from nsysk3.launch.plan import Plan
from nsysk3.launch.service import Service
from nsysk3.launch.sglang_bench import run_sglang_bench
from nsysk3.run.config import Settings


@pytest.fixture
def said() -> list[str]:
    return []


@contextmanager
def hosts_of(plan: Plan) -> Iterator[list[Host]]:
    """Open hosts; afterwards nothing of the run may be left."""
    with open_hosts(plan.settings, plan.run_id, [node.host for node in plan.nodes]) as hosts:
        yield hosts
    assert processes_of(plan.run_id) == []
    assert not any(Path(node.scratch).exists() for node in plan.nodes)
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", plan.settings.cluster.port))


def fails(given: Settings, folder: Path, said: list[str], **layout: int) -> ServerFailedError:
    """The error that starting a server ends with."""
    plan = plan_of(given, f"t-{folder.name[:40]}", profiled=False, **layout)
    with hosts_of(plan) as hosts, pytest.raises(ServerFailedError) as raised, Service(plan, hosts, folder, said.append):
        pass
    return raised.value


def test_a_server_starts_is_checked_and_leaves_nothing(tmp_path: Path, said: list[str]) -> None:
    ready = tmp_path / "ready"
    given = settings(tmp_path, *faults(f"slow-start={ready}", "wrong-info=pp_size:4"))
    plan = plan_of(given, "t-starts", profiled=False)
    out = tmp_path / "out"

    def say(text: str) -> None:
        said.append(text)
        if "Uvicorn running" in text:  # so it was followed while it was not ready
            ready.touch()

    with hosts_of(plan) as hosts:
        with Service(plan, hosts, out, say) as service:
            assert service.alive()
            assert service.failure() is None
            assert service.check() == ["pp_size is 4, the plan asked for 2"]
            assert service.info["internal_states"][0]["pp_max_micro_batch_size"] == 32
            assert len(processes_of("t-starts")) >= 3  # the server and a scheduler a rank
            (why,) = service.snapshot("before") or [""]
            assert "no GPU snapshot" in why or (out / "nodes/localhost/gpu_before.csv").is_file()
        assert not service.alive()
        assert service.failure() is None
        with pytest.raises(OSError, match=r".*"):
            socket.create_connection(("127.0.0.1", given.cluster.port), 1)
    assert any(line.startswith("healthy after") for line in said)
    log = (out / "nodes/localhost/server.log").read_text()
    assert "fired up and ready" in log
    assert "--pp-size 2" in (out / "nodes/localhost/command.txt").read_text().replace("\\\n    ", "")


def test_a_death_at_start_is_explained_with_its_log(tmp_path: Path, said: list[str]) -> None:
    error = fails(settings(tmp_path, *faults("die-at-start=oom")), tmp_path / "out", said)
    assert error.failure.kind == "oom"
    assert error.exit_code == 4
    assert "Tried to allocate 1.31 GiB" in str(error)
    assert "--mem-fraction-static" in str(error)
    assert "\n" not in str(error)
    assert any("OutOfMemoryError" in line for line in said)
    assert error.log
    assert "OutOfMemoryError" in error.log.read_text()


def test_a_servers_log_keeps_no_secret(tmp_path: Path, said: list[str]) -> None:
    """SGLang prints its own arguments."""
    args = ["--api-key", "sk-hunter2", "--admin-api-key=sk-hunter2-too"]
    given = settings(tmp_path, *args, *faults("die-at-start=unknown"), env={"HF_TOKEN": "hf_abcdef"})
    error = fails(given, tmp_path / "out", said)
    everything = (
        str(error)
        + "\n".join(said)
        + "".join(path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file())
    )
    assert "launch_command=" in everything
    assert "HF_TOKEN=[redacted]" in everything
    assert not {secret for secret in ("hunter2", "hf_abcdef") if secret in everything}


def test_one_node_of_four_that_dies_is_the_one_to_blame(tmp_path: Path, said: list[str]) -> None:
    nodes = {"hosts": ["a", "b", "c", "d"], "launcher": "local", "address": "127.0.0.1"}
    given = settings(tmp_path, *faults("die-at-start=ib@2"), cluster=nodes)
    error = fails(given, tmp_path / "out", said, pp=4)
    assert error.failure.kind == "ib"
    assert error.log == tmp_path / "out/nodes/c/server.log"
    assert "the server on c did not start" in str(error)


def test_four_nodes_that_are_well_serve(tmp_path: Path, said: list[str]) -> None:
    nodes = {"hosts": ["a", "b", "c", "d"], "launcher": "local", "address": "127.0.0.1"}
    plan = plan_of(settings(tmp_path, cluster=nodes), "t-four", pp=4, profiled=False)
    with hosts_of(plan) as hosts, Service(plan, hosts, tmp_path / "out", said.append) as service:
        assert service.check() == []
        assert run_load(service.url, input_len=64, output_len=1, concurrency=2, requests=4, seed=1).completed == 4


@pytest.mark.parametrize("fault", ["never-healthy", "never-listens"])
def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path, said: list[str], fault: str) -> None:
    given = settings(tmp_path, *faults(fault), server={"start_timeout_s": 1.5})
    error = fails(given, tmp_path / "out", said)
    assert error.failure.kind == "not-healthy"
    assert "not healthy within 1.5 s" in str(error)
    assert "start_timeout_s" in str(error)


def test_somebody_elses_port_is_noticed_before_anything_starts(tmp_path: Path, said: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        plan = plan_of(settings(tmp_path, cluster={"port": port}), "t-port", profiled=False)
        with open_hosts(plan.settings, plan.run_id, ["localhost"]) as hosts:
            with pytest.raises(ServerFailedError, match="already answers") as raised:
                Service(plan, hosts, tmp_path / "out", said.append).start()
            assert raised.value.failure.kind == "port-in-use"
            assert [words for _, words in processes_of("t-port") if "loopback" in words] == []


def test_a_server_that_ignores_the_order_to_end_is_ended(tmp_path: Path, said: list[str]) -> None:
    given = settings(tmp_path, *faults("hang-on-stop", "orphans"), server={"stop_timeout_s": 0.5})
    plan = plan_of(given, "t-hangs", profiled=False)
    with hosts_of(plan) as hosts:
        with Service(plan, hosts, tmp_path / "out", said.append) as service:
            assert service.alive()
        assert [words for _, words in processes_of("t-hangs") if "loopback" in words] == []


def test_a_death_under_load_ends_the_load_and_is_explained(tmp_path: Path, said: list[str]) -> None:
    given = settings(tmp_path, *faults("print-after=nccl", "die-after=8", "no-answer=6"))
    plan = plan_of(given, "t-dies", profiled=False)
    with hosts_of(plan) as hosts, Service(plan, hosts, tmp_path / "out", said.append) as service:
        result = run_load(
            service.url, input_len=64, output_len=1, concurrency=2, requests=100, seed=1, lost=service.lost
        )
        failure = service.wait(service.failure, 20, fail=False)
        assert failure
        assert failure.kind == "nccl"
        assert not service.alive()
        assert 5 <= result.completed < 100
        assert service.lost() == failure.message


def test_a_server_that_says_it_fails_and_hangs_has_failed(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies, the others wait for it for ever, and nsys waits for them."""
    monkeypatch.setattr(follow, "DYING_S", 0.2)
    given = settings(tmp_path, *faults("print-after=oom", "no-answer=3"))
    plan = plan_of(given, "t-says", profiled=False)
    with hosts_of(plan) as hosts, Service(plan, hosts, tmp_path / "out", said.append) as service:
        result = run_load(service.url, input_len=64, output_len=1, concurrency=1, requests=9, seed=1, lost=service.lost)
        failure = service.failure()
    assert failure
    assert failure.kind == "oom"
    assert result.errors == [failure.message]


def test_a_full_disk_here_does_not_end_the_watch_over_a_server(tmp_path: Path) -> None:
    class Told:
        """A host whose server says a line and ends."""

        def poll(self, _: str) -> int:
            return 0

        def tail(self, _: str, offset: int) -> tuple[str, int]:
            return ("ready\n", 6) if offset == 0 else ("", offset)

    plan = plan_of(settings(tmp_path), "t-full", profiled=False).nodes[0]
    node, lines = follow.Node(plan, cast(Host, Told()), Path("/dev/full")), []
    follower = follow.Follower("server", [node], lambda _, line: lines.append(line))
    follower.stopping()
    follower.start()
    follower.stop()
    assert (lines, node.code, node.lost) == (["ready"], 0, None)
    assert node.unwritten == "No space left on device"


def test_a_lost_host_is_a_failure(tmp_path: Path, said: list[str]) -> None:
    plan = plan_of(settings(tmp_path), "t-lost", profiled=False)
    with open_hosts(plan.settings, plan.run_id, ["localhost"]) as hosts:
        with Service(plan, hosts, tmp_path / "out", said.append) as service:
            servers = {pid for pid, words in processes_of("t-lost") if "loopback" in words}
            (keeper,) = {parent_of(pid) for pid in servers} - servers
            assert keeper
            os.kill(keeper, signal.SIGKILL)
            failure = service.wait(service.failure, 30, fail=False)
        assert failure
        assert failure.kind == "host-lost"
        assert "cleanup" in failure.advice
    assert eventually(lambda: processes_of("t-lost") == [])  # the keeper's guard saw to it


def test_calls_on_all_hosts_run_at_once_and_the_first_error_is_raised() -> None:
    together = threading.Barrier(3, timeout=20)

    def meet(number: int) -> int:
        together.wait()
        return number * number

    assert each([1, 2, 3], meet) == [1, 4, 9]

    def fail(number: int) -> int:
        if number:
            raise ValueError(number)
        return 0

    with pytest.raises(ValueError, match="1"):
        each([0, 1, 2], fail)
    assert each([], meet) == []


# --- SGLang's own benchmark

BENCH = """
import argparse, json, sys, urllib.request
parser = argparse.ArgumentParser()
for name in ("backend base-url dataset-name random-input-len random-output-len random-range-ratio max-concurrency "
             "num-prompts seed warmup-requests output-file").split():
    parser.add_argument("--" + name)
for name in ("output-details", "disable-tqdm"):
    parser.add_argument("--" + name, action="store_true")
args = parser.parse_args()
count, length = int(args.num_prompts), int(args.random_input_len)
print("============ Serving Benchmark Result ============")
for index in range(count):
    body = json.dumps({"input_ids": [7] * length, "sampling_params": {"max_new_tokens": 1}}).encode()
    urllib.request.urlopen(urllib.request.Request(args.base_url + "/generate", body)).read()
record = {"backend": args.backend, "completed": count, "input_throughput": 1.0, "errors": [""] * count,
          "max_concurrency": int(args.max_concurrency), "seed_given": args.seed}
with open(args.output_file, "a") as file:
    file.write(json.dumps(record) + "\\n")
"""


@pytest.mark.parametrize("module", ["benchmark/serving.py", "bench_serving.py", None])
def test_sglangs_benchmark_is_run_beside_the_server_by_whichever_name(
    tmp_path: Path, said: list[str], module: str | None
) -> None:
    package = tmp_path / "site/sglang"
    (package / "benchmark").mkdir(parents=True)
    (package / "__init__.py").touch()
    if module:
        (package / module).write_text(BENCH)
    given = settings(tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, server={"python": sys.executable})
    plan = plan_of(given, "t-bench", profiled=False)
    with hosts_of(plan) as hosts, Service(plan, hosts, tmp_path / "out", said.append) as service:
        if module is None:
            with pytest.raises(RunFailedError, match=r"did not run on localhost: .*No module named"):
                run_sglang_bench(service, requests=3, concurrency=2, seed=5)
            return
        result = run_sglang_bench(service, requests=3, concurrency=2, seed=5)
    assert result.completed == 3
    assert result.record["client"] == "sglang." + module.removesuffix(".py").replace("/", ".")
    assert (result.record["seed_given"], result.record["max_concurrency"]) == ("5", 2)
    assert "Serving Benchmark Result" in result.output
