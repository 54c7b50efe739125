"""Bring the reports of a run here: imported where nsys left them raw, fetched, exported, and every rank looked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nsysk3.errors import MissingToolError, NsysK3Error, RunFailedError
from nsysk3.launch.collected import REPORT_NAME, Collected
from nsysk3.launch.commands import in_container
from nsysk3.launch.found_ranks import find_ranks
from nsysk3.launch.parallel import each
from nsysk3.launch.plan import NodePlan, Plan
from nsysk3.run.words import ranks_in_words

if TYPE_CHECKING:
    from nsysk3.launch.hosts import Completed, Host

# A report of gigabytes takes minutes to be made, and to be exported.
_IMPORT_S = 3600.0
# Prints the importer that belongs to an nsys: it lies in a folder beside the one that nsys really is in.
_FIND_IMPORTER = """
nsys=$(command -v "$1") || exit 3
nsys=$(readlink -f "$nsys")
for found in "${nsys%/*}"/../*/QdstrmImporter "${nsys%/*}"/QdstrmImporter; do
  [ -x "$found" ] && echo "$found" && exit 0
done
exit 4
"""


def collect(
    plan: Plan, hosts: Sequence[Host], folder: Path, say: Callable[[str], None], *, expect_kernels: bool = True
) -> list[Collected]:
    """Bring and export every node's report; call it once the server is stopped, before the hosts are closed.

    What is wrong with one node becomes a problem of it, and the others go on.  ``expect_kernels``: False for a server
    without GPUs, whose ranks launch none.
    """

    def one(pair: tuple[NodePlan, Host]) -> Collected:
        node, host = pair
        done = Collected(node.host)
        try:
            keep_capture(node, host, folder)  # also where this process is killed before it has come
            _collect(plan, node, host, folder / "nodes" / node.host, done, say)
        except NsysK3Error as error:
            done.problems.append(f"{node.host}: {error}")
        if done.report is None:
            keep_capture(node, host, folder)
            done.kept = host.kept
        _look_for_ranks(node, done, expect_kernels)
        return done

    return each(list(zip(plan.nodes, hosts, strict=True)), one)


def _collect(plan: Plan, node: NodePlan, host: Host, folder: Path, done: Collected, say: Callable[[str], None]) -> None:
    assert node.report is not None
    remote = node.report + ".nsys-rep"
    size = host.exists(remote)
    if not size and host.exists(node.report + ".qdstrm"):
        say(f"{node.host}: importing the raw capture")
        _import(plan, node, host)
        done.imported = True
        size = host.exists(remote)
    if not size:
        raise RunFailedError(
            "nsys wrote no report: the capture was never opened, or the server was killed inside it; server.log has "
            "nsys's own words"
        )
    say(f"{node.host}: fetching the report, {size / 1e6:.1f} MB")
    report = folder / REPORT_NAME
    try:
        host.fetch(remote, report)
    except MissingToolError as error:
        done.no_room = str(error)
        raise
    done.report = report
    for path in host.kept:
        with suppress(NsysK3Error):  # it is here: what happens to it there is not worth an error
            host.keep(path, False)
    done.sha256 = _sha256(done.report)
    say(f"{node.host}: exporting")
    try:
        done.export = _export_here(plan, done.report)
    except NsysK3Error as error:
        try:
            done.export = _export_there(plan, node, host, folder, str(error))
        except NsysK3Error as again:
            done.no_export = str(again)
            raise


def keep_capture(node: NodePlan, host: Host, folder: Path) -> None:
    """Let what nsys wrote on a host stay there when the run ends, unless its report is in the run's ``folder``."""
    if node.report is None or (folder / "nodes" / node.host / REPORT_NAME).is_file():
        return
    for suffix in (".nsys-rep", ".qdstrm"):
        with suppress(NsysK3Error):  # of a host that is lost nothing can be told
            if host.exists(node.report + suffix):
                host.keep(node.report + suffix)


def _look_for_ranks(node: NodePlan, done: Collected, expect_kernels: bool) -> None:
    """An export is one, and every rank of its node is in it, or named as missing with the likely reason."""
    reason = "there is no export"
    try:
        if done.export is None:
            done.missing = tuple(rank.world_rank for rank in node.ranks)
        else:
            found = find_ranks(done.export, node.ranks)
            done.kernels, done.missing, reason = found.kernels, found.missing, found.reason
    except NsysK3Error as error:
        done.no_export = str(error)
        done.problems.append(f"{node.host}: {error}")
    if not expect_kernels:
        done.missing = ()
    if done.missing:
        verb = "are" if len(done.missing) > 1 else "is"
        done.problems.append(f"{node.host}: {ranks_in_words(done.missing)} {verb} not in the trace: {reason}")


def _import(plan: Plan, node: NodePlan, host: Host) -> None:
    """Make the report of a raw capture with the importer that lies beside nsys; raises RunFailedError."""
    assert node.report is not None
    nsys = plan.settings.nsys.path or "nsys"
    found = _where_nsys_is(plan, node, host, ["sh", "-c", _FIND_IMPORTER, "sh", nsys])
    if found.code:
        raise RunFailedError(
            f"only a raw capture ({node.report}.qdstrm) and no QdstrmImporter beside {nsys}: install the host part of "
            "Nsight Systems there, or import it with one of the same version"
        )
    importer = found.out.strip().splitlines()[-1]
    # Its own libraries lie beside it, but it takes libdw and libelf from the system, which a bare image lacks.
    library = plan.settings.nsys.library_path
    env = {"LD_LIBRARY_PATH": library} if library else {}
    command = [importer, "-i", node.report + ".qdstrm", "-o", node.report + ".nsys-rep", "-f"]
    done = _where_nsys_is(plan, node, host, command, env)
    if done.code or not host.exists(node.report + ".nsys-rep"):
        raise RunFailedError(f"QdstrmImporter failed: {_last_words(done)}" + _library_advice(done))


def _library_advice(done: Completed) -> str:
    if "error while loading shared libraries" in done.err:
        return "; set [nsys] library_path to a folder that has this library"
    return ""


def _export_here(plan: Plan, report: Path) -> Path:
    """Export with this machine's nsys, into the cache that analyze looks into.  Raises NsysK3Error."""
    from nsysk3.trace.nsys import cached_export, export_report, find_nsys

    if cached := cached_export(report):
        return cached
    explicit = plan.settings.nsys.path if plan.settings.container.cli is None and _is_here(plan) else None
    return export_report(report, find_nsys(explicit))


def _export_there(plan: Plan, node: NodePlan, host: Host, folder: Path, why: str) -> Path:
    """Export with the nsys that made the report, and fetch the export."""
    assert node.report is not None
    nsys = plan.settings.nsys.path or "nsys"
    remote = node.report + ".sqlite"
    command = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={remote}"]
    helped = _where_nsys_is(plan, node, host, [nsys, "export", "--help"])
    if "--include-blobs" in helped.out + helped.err:
        command.append("--include-blobs=true")
    done = _where_nsys_is(plan, node, host, [*command, node.report + ".nsys-rep"])
    if done.code or not host.exists(remote):
        raise RunFailedError(
            f"the report is here but could not be exported: {why}; and on the host: {_last_words(done)}"
        )
    target = folder / "trace.sqlite"
    host.fetch(remote, target)
    try:
        find_ranks(target, node.ranks)
    except NsysK3Error as error:
        target.unlink()  # or it would be read in place of the report
        raise RunFailedError(
            f"the report is here but could not be exported: {why}; and on the host: {error}"
        ) from error
    return target


def _where_nsys_is(
    plan: Plan, node: NodePlan, host: Host, command: Sequence[str], env: Mapping[str, str] | None = None
) -> Completed:
    """Run a command beside nsys: on the host, or in a container of its own where the server's is gone."""
    variables = dict(env or {})
    if node.container is None:
        return host.run(list(command), env=variables, cwd=node.scratch, timeout_s=_IMPORT_S)
    name = f"{node.container}-tool"
    outside = in_container(plan.settings, name, plan.run_id, variables, node.scratch)
    return host.run([*outside, *command], env=variables, timeout_s=_IMPORT_S)


def _is_here(plan: Plan) -> bool:
    from nsysk3.launch.transport import is_this_machine

    return all(is_this_machine(node.host) for node in plan.nodes)


def _last_words(done: Completed) -> str:
    said = [line.strip() for line in (done.err + "\n" + done.out).splitlines() if line.strip()]
    return " ".join(said[-1].split())[:300] if said else f"exit code {done.code}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
