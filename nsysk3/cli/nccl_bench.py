"""``nsysk3 nccl-bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def nccl_bench(
    pp: Annotated[
        str | None, typer.Option(help="Pipeline depths whose communication domains to measure, such as 1,2,4,8.")
    ] = None,
    tp: Annotated[
        str | None, typer.Option(help="Ranks of a stage: one number, or one a depth. Default: all GPUs over PP.")
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Show the log of an nccl-tests run instead of measuring. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the logs and nccl.csv; a sweep's shows them in its report. Default: here."),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Smallest and largest message; sizes between double.")] = "1M,256M",
    iters: Annotated[int, typer.Option(min=1, help="Operations timed at each size.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Operations before them.")] = 5,
    nccl_tests: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of all_reduce_perf and sendrecv_perf on the hosts. Default: PATH."),
    ] = None,
    torch: Annotated[
        bool, typer.Option("--torch", help="Measure through torch even where nccl-tests is there.")
    ] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu: gloo, to try the command without GPUs.")] = "cuda",
    timeout: Annotated[float, typer.Option(min=1, help="Longest time for one domain, seconds.")] = 600.0,
    config: Annotated[Path | None, typer.Option(help="Settings. Default: $NSYSK3_CONFIG, else ./nsysk3.toml.")] = None,
    hosts: Annotated[str | None, typer.Option(help="Hosts with commas between, in place of cluster.hosts.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure what the links give each communication domain of some layouts: AllReduce of a stage, Send/Recv between.

    nccl-tests is used where a host has it and the domain lies inside that host, else the same measurement through
    torch.distributed; results are checked value by value. The logs are in nccl-tests' own format: analyze --nccl-tests
    takes them, and --log takes those of your own mpirun. Exit code 4 when a value was wrong.
    """
    from nsysk3.errors import InputError, RunFailedError
    from nsysk3.run.nccl_log import read_nccl_log
    from nsysk3.run.words import counted
    from nsysk3.sweep.nccl_table import domain_table, keep, rows_of, wrong_values
    from nsysk3.sweep.terminal import console, print_table

    if log:
        logs = [read_nccl_log(path) for path in log]
    elif pp is None:
        raise InputError("which layouts? --pp 1,2,4,8 (or --log FILE to show an nccl-tests log)")
    else:
        from nsysk3.launch.request import read_hosts, with_allocation
        from nsysk3.run.config import load_settings
        from nsysk3.sweep.nccl_bench import Measure, bench

        settings = with_allocation(load_settings(config, overrides={"cluster.hosts": read_hosts(hosts)}))
        how = Measure.of(
            sizes, iters=iters, warmup=warmup, timeout_s=timeout, device=device, folder=nccl_tests, torch=torch
        )
        logs = bench(
            settings, pp, tp, how, out or Path(),
            say=lambda text: None if quiet else typer.echo(text, err=True),
        )  # fmt: skip
    for each in logs:
        if not each.whole:
            typer.echo(f"WARNING: {each.source} has no end: its run was cut short, larger sizes are missing", err=True)
    rows = rows_of(logs)
    if out or not log:
        keep(out or Path(), rows)
    print_table(domain_table(rows), console())
    if wrong := wrong_values(logs):
        were = f"{counted(wrong, 'value')} {'was' if wrong == 1 else 'were'} wrong"
        raise RunFailedError(f"{were} after communication: do not trust results of these links")
