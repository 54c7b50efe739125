"""``nsysk3 simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.progress import status


def _presets() -> list[str]:
    from nsysk3.simulate.presets import PRESETS

    return list(PRESETS)


def _faults() -> list[tuple[str, str]]:
    from nsysk3.simulate.faults import FAULTS

    return [("list", "names them all"), *FAULTS.items()]


def _listed(context: typer.Context, asked: list[str] | None) -> list[str] | None:
    """``--fault list`` is all there is to a command line, like --version."""
    if asked and "list" in asked and not context.resilient_parsing:
        for name, meaning in _faults()[1:]:
            typer.echo(f"{name:17} {meaning}")
        raise typer.Exit
    return asked


def simulate(
    out: Annotated[Path, typer.Option(help="The run directory to make.")],
    preset: Annotated[
        str | None,
        typer.Option(
            help="A published run: kimi-k3-6000d-pp1, -pp2, -pp4, -pp8 or -pp16; other options change it.",
            autocompletion=_presets,
        ),
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks of a stage.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel groups; a divisor of --tp.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Hosts; a divisor of pp x tp.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Forwards in the window.")] = None,
    in_flight: Annotated[int | None, typer.Option(help="Micro-batches under way at once; default: stages.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of a micro-batch.")] = None,
    layer_us: Annotated[float | None, typer.Option(help="GPU compute of a mean layer, microseconds.")] = None,
    offset_ms: Annotated[float | None, typer.Option(help="Largest clock offset of a host.")] = None,
    drift_ppm: Annotated[float | None, typer.Option(help="Largest clock drift of a host.")] = None,
    cut_layers: Annotated[int | None, typer.Option(help="Layers of the last forward that the capture lost.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another run of the same kind.")] = 0,
    schema: Annotated[
        str, typer.Option(help="Nsight version of the files: 2022.4, 2023.4, 2024.2, 2025.3 or 2026.x.")
    ] = "2025.3",
    nvtx: Annotated[bool, typer.Option("--nvtx/--no-nvtx", help="NVTX ranges of layers and NCCL.")] = True,
    payloads: Annotated[bool, typer.Option("--payloads/--no-payloads", help="NCCL payloads in them.")] = True,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=ARG]",
            help="Something that goes wrong; 'list' names them all.",
            autocompletion=_faults,
            callback=_listed,
            is_eager=True,
        ),
    ] = None,
    scale: Annotated[int, typer.Option(help="So many times the micro-batches.")] = 1,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an earlier simulation at --out.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Write a simulated run: the files of a real one, and the truth about it.

    The run directory holds one Nsight export a node, the manifest and the benchmark's lines, as a real run's does, and
    truth.parquet and truth.json, which say what every kernel really waited for. Everything made from it says that it is
    simulated.
    """
    from nsysk3.run.words import counted
    from nsysk3.simulate.run import simulate as run_simulation
    from nsysk3.simulate.setup import configure

    config = configure(
        preset,
        fault or (),
        {"pp": pp, "tp": tp, "ep": ep, "nodes": nodes, "micro_batches": micro_batches, "in_flight": in_flight,
         "chunk_tokens": chunk_tokens, "cut_layers": cut_layers, "layers": layers, "layer_us": layer_us,
         "offset_ms": offset_ms, "drift_ppm": drift_ppm, "seed": seed, "schema": schema, "nvtx": nvtx,
         "payloads": payloads, "scale": scale},
    )  # fmt: skip
    with status(quiet) as progress:
        made = run_simulation(config, out, force=force, progress=progress)
    if not quiet:
        typer.echo(
            f"{made.directory}: {config.simulated}; PP{config.pp}/TP{config.tp} on {counted(config.nodes, 'node')}, "
            f"{made.recorded:,} of {counted(made.kernels, 'kernel')} recorded, {counted(made.rows, 'row')}"
        )
