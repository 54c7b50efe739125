"""Runs whose figures were published: Kimi-K3 on 32 RTX 6000D in 4 hosts, pipeline depth 1 to 16.

What is published (the user's experiment, docs and seed): throughput and TTFT of every depth at C=8; for PP1 and PP8 one
Nsight window each, as medians over stable ranks; and nccl-tests AllReduce latencies of every TP group but TP2.  The
rest are assumptions, each named where it is made.  A window holds three forwards: 557 = 3 x (1 + 2 x 93) - 4 AllReduces
on PP1, 66 = 3 x 24 - 6 on most stages of PP8, so two and three layers of the last forward are missing: stopping a
capture does not wait for work in flight.  PP8's window begins with the pipeline empty, which is what 3.43 s of
Send/Recv beside three forwards of 0.93 s (8,192 tokens at 8,809.50 tokens/s) and no overlap with compute require: the
middle stages wait three to four stage times for their first micro-batch.
"""

from __future__ import annotations

from nsysk3.simulate.config import Config, Machine, no_such

CALIBRATED = "simulated, calibrated on published figures"

# Published: 128 MiB AllReduce of nccl-tests, ns, by group size.  TP2 was not measured: two thirds of TP4's bytes over
# the wire (2(n-1)/n) at TP4's bus bandwidth (assumption).
_ALLREDUCE_128MIB_NS = {32: 6_590_000, 16: 6_240_000, 8: 6_000_000, 4: 4_930_000, 2: 3_290_000}
# Published: input tokens/s, TTFT p50 and p95 in s, at C=8, medians of three.
_SERVED = {
    1: (3_257.96, 39.19, 41.62), 2: (5_015.95, 25.22, 26.69), 4: (7_155.20, 17.28, 18.62), 8: (8_809.50, 13.47, 16.45),
    16: (6_701.04, 17.94, 21.39),
}  # fmt: skip
# Fitted, so that the analysis of the window gives the published figures: compute of a mean layer (ns) to the exposed
# share (PP1) and to the 3.43 s (PP8), else to the throughput; spread of compute to the total of the AllReduces, given
# the measured transfer; spread of a transfer to their median.
_FITTED = {
    1: (11_135_000, 0.0250, 0.08), 2: (19_880_000, 0.0200, 0.10), 4: (32_550_000, 0.0180, 0.10),
    8: (73_600_000, 0.0162, 0.12), 16: (85_400_000, 0.0162, 0.12),
}  # fmt: skip
_CUT_LAYERS = {1: 2, 8: 3}
PRESETS = tuple(f"kimi-k3-6000d-pp{depth}" for depth in _SERVED)


def preset(name: str) -> Config:
    """The configuration of a preset.  Raises InputError for a name that is not known."""
    if name not in PRESETS:
        raise no_such("--preset", name, PRESETS)
    depth = int(name.rsplit("pp", 1)[1])
    tp = 32 // depth
    compute, compute_spread, allreduce_spread = _FITTED[depth]
    tps, ttft_p50, ttft_p95 = _SERVED[depth]
    machine = Machine(
        layer_compute_ns=compute,
        compute_spread=compute_spread,
        allreduce_128mib_ns=_ALLREDUCE_128MIB_NS[tp],
        allreduce_spread=allreduce_spread,
    )
    return Config(
        name=name,
        simulated=CALIBRATED,
        pp=depth,
        tp=tp,
        ep=min(4, tp),
        nodes=4,
        machine=machine,
        micro_batches=3,
        # Eight requests, of which each has one chunk under way.
        in_flight=min(8, depth) if depth > 1 else None,
        cut_layers=_CUT_LAYERS.get(depth, 0),
        published=(("input_tps", tps), ("ttft_p50_s", ttft_p50), ("ttft_p95_s", ttft_p95)),
    )
