"""Servers in containers end as others do, and no container of a run is left however it ends (podman, for real)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest
from processes import eventually, keepers_of, naming, of_run

from nsysk3.errors import InputError
from nsysk3.launch import channel, hosts
from nsysk3.launch.containers import container_command
from nsysk3.launch.hosts import Host, open_host
from nsysk3.launch.leftovers import end_leftovers, find_leftovers
from nsysk3.run.config import Container, Settings

IMAGE = "localhost/nsysk3-test"
PROGRAMS = ("sh", "sleep", "cat", "tr", "env")
# On the machines that run these tests, limits cannot be raised and there is no network to set up.
OPTIONS = ["--network=host", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]


@pytest.fixture(scope="module")
def podman() -> Iterator[Callable[..., str]]:
    """Podman with a store of its own that has the image; skips, with a reason, where containers cannot run."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("no podman and runc: install them to test containers")
    # Where the name of its store is long, as pytest's are under xdist, podman waits 20 s for the end of a container.
    with tempfile.TemporaryDirectory(prefix="n3p-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield from podman_in(Path(name))


def podman_in(folder: Path) -> Iterator[Callable[..., str]]:
    store = f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
    (folder / "storage.conf").write_text(store)
    # Without the last, podman as a daemon keeps something of each `exec` for five minutes.
    engine = {"runtime": '"runc"', "cgroup_manager": '"cgroupfs"', "events_logger": '"file"', "exit_command_delay": 1}
    lines = ["[engine]", *(f"{key} = {value}" for key, value in engine.items())]
    (folder / "containers.conf").write_text("\n".join(lines) + "\n")
    make_root(folder / "root.tar")

    def command(*words: str) -> str:
        return subprocess.run(["podman", *words], check=True, capture_output=True, text=True).stdout

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        patch.setattr(hosts, "GRACE_S", 0.2)
        patch.setattr(channel, "LOST_GRACE_S", 0.2)
        try:
            command("import", str(folder / "root.tar"), IMAGE)
            command("run", "--rm", *OPTIONS, IMAGE, "sh", "-c", "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"podman cannot run containers here: {error.stderr.strip()[-300:]}")
        yield command
        assert command("ps", "--all", "--quiet") == ""


def make_root(path: Path) -> None:
    """A root folder: a few of our own programs, one of them also as nsys, and the libraries that they need."""
    with tarfile.open(path, "w") as tar:
        libraries = set()
        for name in PROGRAMS:
            program = Path(str(shutil.which(name))).resolve()
            tar.add(program, f"bin/{name}")
            words = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout.split()
            libraries |= {word for word in words if word.startswith("/")}
        tar.add(Path(str(shutil.which("sh"))).resolve(), "bin/nsys")
        for library in libraries:
            tar.add(Path(library).resolve(), library.lstrip("/"))
        for name in ("proc", "dev", "sys", "tmp", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)


class Run:
    """A run in containers on this machine."""

    def __init__(self, folder: Path) -> None:
        self.id = f"test-{token_hex(4)}"
        self.scratch = folder / f"nsysk3-{self.id}-0"
        self.name = f"nsysk3-{self.id}-0"
        self.settings = Settings(container=Container(cli="podman", image=IMAGE, options=OPTIONS))
        self.settings = self.settings.model_copy(
            update={"cluster": self.settings.cluster.model_copy(update={"scratch": str(folder)})}
        )

    def open(self) -> Host:
        host = open_host(self.settings.cluster, "localhost", self.id, ["podman"])
        host.make_scratch(str(self.scratch))
        return host

    def argv(self, *command: str, env: tuple[str, ...] = ()) -> list[str]:
        prefix = container_command(
            self.settings.container, name=self.name, run_id=self.id, env_names=env, scratch=str(self.scratch)
        )
        return [*prefix, *command]

    def start(self, host: Host, *command: str, wait: bool = True) -> None:
        """A server in a container; ready when its log says so."""
        log = str(self.scratch) + ".log"
        host.start("server", self.argv(*command), log=log, container=self.name)
        if wait:
            assert eventually(lambda: "ready" in host.tail("server")[0] or host.poll("server") is not None)
            assert host.poll("server") is None, host.tail("server")

    def containers(self, podman: Callable[..., str]) -> list[str]:
        return podman("ps", "--all", "--filter", f"label=nsysk3.run={self.id}", "--format", "{{.Names}}").split()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# A server that does not end when asked, and has more processes, one of which detached itself.
STUBBORN = "trap '' TERM INT HUP; sleep 1000 & (sleep 1000 &) ; echo ready; while :; do sleep 1000; done"


def test_a_container_gets_values_that_no_command_line_shows(podman: Callable[..., str], run: Run) -> None:
    with run.open() as host:
        argv = run.argv("sh", "-c", 'echo "$SECRET $NSYSK3_RUN $PWD"; echo made >file', env=("SECRET", "NSYSK3_RUN"))
        assert not any("word" in part for part in argv)
        done = host.run(argv, env={"SECRET": "word"}, container=run.name)
        assert (done.code, done.out, done.err) == (0, f"word {run.id} {run.scratch}\n", "")
        assert (run.scratch / "file").read_text() == "made\n"
        assert host.run(run.argv("sh", "-c", "exit 7")).code == 7
        slow = host.run(run.argv("sleep", "1000"), timeout_s=1.0, container=run.name)
        assert slow.code == 124
        assert run.containers(podman) == []
        missing = run.settings.container.model_copy(update={"image": "localhost/none"})
        argv = container_command(missing, name="none", run_id=run.id, env_names=(), scratch=str(run.scratch))
        assert host.run([*argv, "true"]).code == 125  # and nothing was asked of any registry
    with pytest.raises(InputError):
        container_command(Container(), name="x", run_id="x", env_names=(), scratch="/x")


@pytest.mark.parametrize("server", ["leaves", "hangs"])
def test_a_profiler_in_a_container_ends_after_its_server(podman: Callable[..., str], run: Run, server: str) -> None:
    # PID 1 is called nsys.  It dies of TERM; left alone it writes its report when the server has ended.
    asked = "trap 'echo asked; exit' TERM" if server == "leaves" else "trap '' TERM"
    inner = f"{asked}; echo ready; while :; do sleep 0.1; done"
    outer = "trap 'exit 1' TERM; sh -c \"$0\" serve; sleep 0.5; echo report >report"
    with run.open() as host:
        run.start(host, "nsys", "-c", outer, inner)
        assert host.stop("server", 2.0) == 0
        assert (run.scratch / "report").read_text() == "report\n"
        assert ("asked" in host.tail("server")[0]) == (server == "leaves")
        assert run.containers(podman) == []
    assert not of_run(run.id)


DEATHS: dict[str, Callable[[Host, str], object]] = {
    "stopped": lambda host, run: host.stop("server", 0.2),
    "closed": lambda host, run: host.close(),
    "closed now": lambda host, run: host.close(now=True),
    "keeper killed": lambda host, run: os.kill(keepers_of(run)[1], signal.SIGKILL),
    "guard killed, then closed": lambda host, run: (os.kill(keepers_of(run)[0], signal.SIGKILL), host.close()),
}


@pytest.fixture(scope="module")
def address(podman: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Podman as a daemon, whose containers are no children of whoever asks for them: as docker's are."""
    folder = tmp_path_factory.mktemp("service")
    address = f"unix://{folder}/socket"
    with subprocess.Popen(["podman", "system", "service", "--time=0", address], stderr=subprocess.DEVNULL) as service:
        assert eventually((folder / "socket").exists)
        yield address
        service.terminate()


@pytest.fixture
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "daemon":
        monkeypatch.setenv("CONTAINER_HOST", request.getfixturevalue("address"))
    return str(request.param)


WAYS = [("child", "keeper killed"), *(("daemon", death) for death in DEATHS)]


@pytest.mark.parametrize(("through", "death"), WAYS, indirect=["through"])
def test_no_container_is_left_however_a_run_ends(
    through: str, death: str, podman: Callable[..., str], run: Run
) -> None:
    other = podman("run", "--detach", "--label=nsysk3.run=other", *OPTIONS, IMAGE, "sh", "-c", "sleep 1000").strip()
    try:
        with run.open() as host:
            run.start(host, "env", "-i", "sh", "-c", STUBBORN)  # without the run's mark
            assert run.containers(podman) == [run.name]
            DEATHS[death](host, run.id)
            assert eventually(lambda: run.containers(podman) == [])
            if death == "stopped":
                assert host.poll("server") is not None
        assert eventually(lambda: not of_run(run.id)), of_run(run.id)
        assert eventually(lambda: not naming(run.name)), naming(run.name)  # those of podman, too
        assert not run.scratch.exists()
        assert podman("ps", "--quiet", "--no-trunc").split() == [other]
    finally:
        podman("rm", "--force", "--time=0", other)


def test_no_container_is_left_that_was_just_being_made(podman: Callable[..., str], run: Run) -> None:
    for now in (False, True):
        with run.open() as host:
            run.start(host, "sh", "-c", STUBBORN, wait=False)
            host.close(now=now)
        assert run.containers(podman) == []
        assert not of_run(run.id)


DRIVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_launch_containers import STUBBORN, Run, channel
channel.LOST_GRACE_S = 0.2
run = Run(Path(sys.argv[2]))
run.start(run.open(), "sh", "-c", STUBBORN)
print(run.id, flush=True)
os.kill(os.getpid(), 9)
"""


def test_no_container_is_left_when_nsysk3_is_killed(podman: Callable[..., str], run: Run, tmp_path: Path) -> None:
    words = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run.id = done.stdout.strip()
    assert eventually(lambda: run.containers(podman) == [] and not of_run(run.id))
    assert not list(tmp_path.glob("nsysk3-*[0-9]"))


@pytest.mark.parametrize("we", ["live", "die"])
def test_containers_that_dead_keepers_left_are_ended(
    we: str, podman: Callable[..., str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = run.open()
    run.start(host, "sh", "-c", STUBBORN)
    guard, keeper = keepers_of(run.id)
    os.kill(guard, signal.SIGSTOP)  # so that both are dead before anything is noticed
    os.kill(keeper, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    if we == "live":
        assert host.close() == ()
        assert run.containers(podman) == []
        assert find_leftovers(run.settings, run.id, ["localhost"]) == []
        return
    monkeypatch.setattr(Host, "_close_again", lambda host: [])
    host.close()
    found = find_leftovers(run.settings, run.id, ["localhost"])
    assert {leftover.kind for leftover in found} == {"process", "container", "scratch"}
    assert [leftover.what for leftover in found if leftover.kind == "container"] == [run.name]
    assert end_leftovers(run.settings, run.id, ["localhost"]) == []
    assert find_leftovers(run.settings, run.id, ["localhost"]) == []
    assert run.containers(podman) == []
    assert not of_run(run.id)
