"""What a simulated run is: the model, the layout, the machine, the window and what goes wrong in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nsysk3.errors import InputError
from nsysk3.run.closest import closest

MIB = 2**20
MAX_GPUS = 4096


@dataclass(frozen=True)
class Model:
    """Kimi-K3 as far as a prefill trace shows it; sizes in elements, activations in bf16.

    ``mla_every``: every so many layers (and the last) have MLA attention, the others KDA.  ``bank_block``: layers per
    row of the attention-residual bank, which grows along the pipeline and travels over every boundary.
    """

    layers: int = 93
    dense_layers: int = 1
    mla_every: int = 4
    hidden: int = 7168
    latent: int = 3584
    heads: int = 96
    experts: int = 896
    top_k: int = 16
    moe_inter: int = 3072
    dense_inter: int = 18432
    vocab: int = 163840
    bank_block: int = 12

    def is_mla(self, layer: int) -> bool:
        """Whether a layer attends with MLA."""
        return layer % self.mla_every == self.mla_every - 1 or layer == self.layers - 1

    def bank_rows(self, layers: int) -> int:
        """Rows of the attention-residual bank after so many layers."""
        return -(-layers // self.bank_block)


@dataclass(frozen=True)
class Machine:
    """Speeds; times in ns.

    ``layer_compute_ns``: GPU compute of the average layer for one chunk on one rank.  ``compute_spread``: relative
    standard deviation of a rank's compute between two collectives, which makes ranks arrive apart.
    ``allreduce_128mib_ns``: the transfer part of an AllReduce of 128 MiB in one TP group; other sizes in proportion
    beside ``latency_ns``.  ``allreduce_spread``: standard deviation of its logarithm.  ``end_spread_ns``: how far apart
    members of a collective end.  ``wire_bytes_per_ns`` between hosts, ``local_bytes_per_ns`` inside one.
    """

    layer_compute_ns: float = 11_000_000
    compute_spread: float = 0.02
    allreduce_128mib_ns: float = 6_590_000
    allreduce_spread: float = 0.1
    latency_ns: float = 30_000
    end_spread_ns: float = 15_000
    wire_bytes_per_ns: float = 12.0
    local_bytes_per_ns: float = 20.0
    host_launch_ns: float = 12_000
    gpu_name: str = "NVIDIA RTX 6000D"


@dataclass(frozen=True)
class ClockErrors:
    """How wrong the hosts' clocks are: largest offset (ns), largest drift (ppm), and slow wander (ns)."""

    offset_ns: float = 2_000_000
    drift_ppm: float = 5.0
    wander_ns: float = 2_000


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong; ``argument`` as given on the command line, None for the default."""

    name: str
    argument: str | None = None


@dataclass(frozen=True)
class Config:
    """One simulated run.

    ``micro_batches``: forwards a stage runs.  ``in_flight``: micro-batches the first stage may start before the result
    of the oldest is back.  ``cut_layers``: layers of the last forward whose records are lost because the capture was
    stopped while they were in flight (0: nothing lost).  ``scale`` multiplies the micro-batches.
    """

    name: str = "custom"
    simulated: str = "simulated"
    pp: int = 8
    tp: int = 4
    ep: int = 4
    nodes: int = 4
    model: Model = field(default_factory=Model)
    machine: Machine = field(default_factory=Machine)
    clocks: ClockErrors = field(default_factory=ClockErrors)
    micro_batches: int = 8
    in_flight: int | None = None
    chunk_tokens: int = 8192
    prompt_tokens: int = 16384
    concurrency: int = 8
    requests: int = 40
    cut_layers: int = 0
    idle_before_ns: int = 60_000_000
    seed: int = 0
    schema: str = "2025.3"
    nvtx: bool = True
    payloads: bool = True
    faults: tuple[Fault, ...] = ()
    scale: int = 1
    published: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "ep", "nodes", "micro_batches", "chunk_tokens", "scale"):
            if getattr(self, name) < 1:
                raise InputError(f"simulate: {name} must be at least 1")
        if self.in_flight is not None and self.in_flight < 1:
            raise InputError("simulate: in_flight must be at least 1")
        if self.machine.layer_compute_ns <= 0:
            raise InputError("simulate: a layer's compute must take more than 0")
        for name, value in (
            ("seed", self.seed), ("cut_layers", self.cut_layers), ("clock offset", self.clocks.offset_ns),
            ("clock drift", self.clocks.drift_ppm), ("clock wander", self.clocks.wander_ns),
        ):  # fmt: skip
            if value < 0:
                raise InputError(f"simulate: {name} must not be negative")
        if self.world > MAX_GPUS:
            raise InputError(f"simulate: {self.world} GPUs are more than {MAX_GPUS}")
        if self.world % self.nodes:
            raise InputError(f"simulate: {self.world} ranks (pp x tp) do not divide over {self.nodes} nodes")
        if self.model.layers < self.pp:
            raise InputError(f"simulate: {self.model.layers} layers cannot make {self.pp} stages")
        if self.tp % self.ep:
            raise InputError(f"simulate: TP{self.tp} is not a multiple of EP{self.ep}, which SGLang requires")
        if self.cut_layers >= self.model.layers // self.pp:
            raise InputError("simulate: more layers cut than a stage has")

    @property
    def world(self) -> int:
        """GPUs, and ranks."""
        return self.pp * self.tp

    @property
    def gpus_per_node(self) -> int:
        """GPUs a node."""
        return self.world // self.nodes

    @property
    def forwards(self) -> int:
        """Micro-batches, scale included."""
        return self.micro_batches * self.scale

    @property
    def window_of_results(self) -> int:
        """How many micro-batches may be under way."""
        return max(2, self.in_flight or self.pp)

    def fault(self, name: str) -> Fault | None:
        """The fault of that name, if asked for."""
        return next((fault for fault in self.faults if fault.name == name), None)

    def hosts(self) -> list[str]:
        """Names of the nodes."""
        return [f"node{601 + index}" for index in range(self.nodes)]


def no_such(option: str, name: str, names: Collection[str]) -> InputError:
    """The error for a name that is none of ``names``."""
    meant = closest(name, names)
    return InputError(
        f"{option} {name!r}: {f'did you mean {meant}? There are' if meant else 'there are'} {', '.join(names)}"
    )


def layer_split(layers: int, stages: int) -> list[range]:
    """Layers of each stage as SGLang splits them: the remainder goes to the last stages."""
    base, rest = divmod(layers, stages)
    split, first = [], 0
    for stage in range(stages):
        size = base + (stage >= stages - rest)
        split.append(range(first, first + size))
        first += size
    return split
