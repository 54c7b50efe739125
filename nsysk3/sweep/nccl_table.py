"""The table of measured communication domains."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from nsysk3.errors import InputError
from nsysk3.run.files import write_text
from nsysk3.run.nccl_log import NcclLog
from nsysk3.run.words import counted
from nsysk3.sweep.record import make_room
from nsysk3.sweep.tables import NONE, TextTable

NCCL_CSV = "nccl.csv"
_MIB = 2**20
LARGE = 128 * _MIB
COLUMNS = ("domain", "operation", "ranks", "topology", "bytes", "time_us", "algbw_gbs", "busbw_gbs", "wrong")


def rows_of(logs: Sequence[NcclLog]) -> list[dict[str, str]]:
    """Rows of nccl.csv: one a domain and size."""
    return [
        {
            "domain": log.name or default_name(log), "operation": log.operation or row.role or "",
            "ranks": str(log.ranks), "topology": topology(log), "bytes": str(row.bytes), "time_us": f"{row.time_us:g}",
            "algbw_gbs": f"{row.algbw_gbs:g}", "busbw_gbs": f"{row.busbw_gbs:g}",
            "wrong": "" if row.wrong is None else str(row.wrong),
        }
        for log in logs
        for row in log.rows
    ]  # fmt: skip


def default_name(log: NcclLog) -> str:
    """``TP8`` for an AllReduce of 8 ranks: what the user's layouts call it."""
    return f"TP{log.ranks}" if log.operation in ("all_reduce", None) else f"{log.operation} x{log.ranks}"


def topology(log: NcclLog) -> str:
    """Which hosts and devices, and whether the devices share a NUMA node, as far as the log says."""
    places = [place for place in log.places if place]
    if len(places) < log.ranks or not places:
        return ""
    hosts = dict.fromkeys(host for host, _ in places)
    if len(hosts) > 1:
        return f"{len(hosts)} hosts"
    devices = [device for _, device in places]
    together = devices == list(range(devices[0], devices[-1] + 1)) and len(devices) > 2
    shown = f"{devices[0]}-{devices[-1]}" if together else ",".join(map(str, devices))
    nodes = len(set(log.numa))
    numa = "" if not nodes else ", one NUMA node" if nodes == 1 else f", {nodes} NUMA nodes"
    return f"one host, GPU {shown}{numa}"


def keep(folder: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write nccl.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    make_room(folder / NCCL_CSV)
    write_text(folder / NCCL_CSV, text.getvalue())


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of nccl.csv, none where there is no such file.  Raises InputError when columns are missing."""
    try:
        reader = csv.DictReader(io.StringIO(path.read_text("utf-8")))
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    if missing := sorted({"domain", "bytes", "time_us", "busbw_gbs", "wrong"} - set(reader.fieldnames or ())):
        raise InputError(f"{path}: no column {', '.join(missing)}")
    rows = []
    for row in reader:
        try:
            int(row["bytes"]), float(row["time_us"] or 0), float(row["busbw_gbs"])
            if row["wrong"] not in ("", "N/A"):
                int(row["wrong"])
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: line {reader.line_num}: cut short, or no number where one belongs") from error
        rows.append(row)
    return rows


def domain_table(rows: Sequence[dict[str, str]]) -> TextTable:
    """Time and busbw of each domain at 128 MiB, or at the largest size that all have, and the mean with a second size.

    The second size is twice the first, or half of it where not all have twice.
    """
    domains: dict[str, dict[int, dict[str, str]]] = {}
    for row in rows:
        domains.setdefault(row["domain"], {})[int(row["bytes"])] = row
    shared = set.intersection(*(set(sizes) for sizes in domains.values())) if domains else set()
    at = LARGE if LARGE in shared else max(shared, default=0)
    also = 2 * at if 2 * at in shared else at // 2
    made, wrong = [], 0
    for domain, sizes in domains.items():
        here, there = sizes.get(at), sizes.get(also)
        counts = [int(row["wrong"]) for row in sizes.values() if row["wrong"] not in ("", "N/A")]
        wrong += sum(counts)
        mean = (float(here["busbw_gbs"]) + float(there["busbw_gbs"])) / 2 if here and there else None
        made.append((
            domain, (here or {}).get("topology") or NONE,
            f"{float(here['time_us']) / 1000:.2f} ms" if here and here["time_us"] else NONE,
            f"{float(here['busbw_gbs']):.2f} GB/s" if here else NONE, NONE if mean is None else f"{mean:.2f} GB/s",
            str(sum(counts)) if counts else NONE,
        ))  # fmt: skip
    were = f"{counted(wrong, 'value')} {'was' if wrong == 1 else 'were'} wrong"
    notes = (f"{were}: these links or their drivers corrupt data",) if wrong else ()
    columns = ("domain", "topology", f"{_size(at)} latency", "busbw", f"mean with {_size(also)}", "wrong")
    return TextTable("domains", "Communication domains", columns, tuple(made), notes)


def _size(count: int) -> str:
    for unit, name in ((_MIB, "MiB"), (1024, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def wrong_values(logs: Sequence[NcclLog]) -> int:
    """Wrong values of all logs together."""
    return sum(row.wrong or 0 for log in logs for row in log.rows)
