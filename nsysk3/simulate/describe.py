"""What a run says about itself: its manifest and its server's log."""

from __future__ import annotations

from datetime import UTC, datetime

from nsysk3 import __version__
from nsysk3.run.manifest import Manifest, RankEntry, Topology
from nsysk3.simulate.clocks import EPOCH_NS
from nsysk3.simulate.config import Config
from nsysk3.simulate.schema import PRODUCTS

_SP_FALLBACK = (
    "K3 SP collective requires SM100/SM103, TP4/TP8/TP16, MegaMoE/DeepEP, and CustomAllReduceV2 with multicast; using "
    "NCCL (sm=120, world_size={tp}, a2a=none, comm=None, disabled=True, has_multicast=False)."
)


def manifest(config: Config, version: str, last_ns: int) -> Manifest:
    """run.json of a simulated run."""
    hosts = config.hosts()
    size = config.gpus_per_node
    ranks = [
        RankEntry(world_rank=rank, host=hosts[rank // size], device=rank % size, pp=rank // config.tp,
                  tp=rank % config.tp, ep=rank % config.tp * config.ep // config.tp)
        for rank in range(config.world)
    ]  # fmt: skip
    begun = datetime.fromtimestamp(EPOCH_NS / 1e9, UTC)
    return Manifest(
        run_id=f"simulated-{config.name}-{config.seed}",
        status="complete",
        engine="simulate",
        simulated=config.simulated,
        topology=Topology(pp=config.pp, tp=config.tp, ep=config.ep, nnodes=config.nodes),
        hosts=hosts,
        ranks=ranks,
        server={
            "model": "Kimi-K3", "layers": config.model.layers, "moe_runner_backend": "flashinfer_mxfp4",
            "moe_a2a_backend": "none", "chunked_prefill_size": config.chunk_tokens, "disable_radix_cache": True,
            "mem_fraction_static": 0.88, "gpu": config.machine.gpu_name,
            "env": {"SGLANG_K3_SP_COLLECTIVE": "1"} if config.fault("sp-fallback") else {},
        },
        load={
            "input_len": config.prompt_tokens, "output_len": 1, "max_concurrency": config.concurrency,
            "num_prompts": config.requests, "dataset": "random-ids", "random_range_ratio": 1.0,
        },
        nsys={"schema": version, "exporter": PRODUCTS[version][0], "payloads": config.payloads and config.nvtx,
              "nvtx": config.nvtx},
        versions={"nsysk3": __version__},
        times={"start": begun.isoformat(), "seconds": last_ns / 1e9},
    )  # fmt: skip


def server_log(config: Config) -> str:
    """The lines of a server log that tools look for."""
    lines = [f"simulated server: PP{config.pp} TP{config.tp} EP{config.ep} ({config.simulated})"]
    if config.fault("sp-fallback"):
        lines.append("WARNING " + _SP_FALLBACK.format(tp=config.tp))
    return "\n".join(lines) + "\n"
