"""Whether two runs differ in nothing but their pipeline and tensor-parallel degrees, or in one setting, or in more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nsysk3.compare.model import Comparability, Fact, Layout
from nsysk3.compare.model import Status as FactStatus
from nsysk3.result import Result

SECTIONS = ("server", "server_said", "load", "nsys", "versions")
NO_MANIFEST = "no manifest"
SAME_CAPTURE = "both runs are the same capture"


@dataclass(frozen=True)
class Known:
    """A setting to compare: the names it goes by in a manifest, in the order of preference."""

    name: str
    label: str
    keys: tuple[str, ...]
    optional: bool = False
    """Left out where neither run sets it."""


KNOWN = (
    Known("model", "model", ("model", "model_path", "model_name", "served_model_name")),
    Known("image", "image", ("image_digest", "image", "container_image", "docker_image"), optional=True),
    Known("sglang", "SGLang version", ("sglang", "sglang_version")),
    Known("moe_runner_backend", "MoE runner backend", ("moe_runner_backend", "moe_runner")),
    Known("moe_a2a_backend", "MoE all-to-all backend", ("moe_a2a_backend", "a2a_backend", "a2a"), optional=True),
    Known("attention_backend", "attention backend", ("attention_backend", "prefill_attention_backend"), True),
    Known("input_len", "input length", ("input_len", "input_length", "random_input_len")),
    Known("output_len", "output length", ("output_len", "output_length", "random_output_len")),
    Known("concurrency", "concurrency", ("concurrency", "max_concurrency")),
    Known("chunk", "chunk", ("chunked_prefill_size", "chunk", "chunk_size")),
    Known("radix", "radix cache off", ("disable_radix_cache", "radix")),
    Known("memory", "memory share", ("mem_fraction_static", "memory_share", "mem_fraction")),
)
# Only SGLang has these.
_SGLANG = frozenset({"sglang", "moe_runner_backend", "radix", "memory"})
# What differs between any two runs of different layouts, and says nothing about the work.
_LAYOUT_KEYS = frozenset(
    {
        "pp", "tp", "ep", "pp_size", "tp_size", "ep_size", "pipeline_parallel_size", "tensor_parallel_size",
        "expert_parallel_size", "nnodes", "node_rank", "layers", "stages", "num_steps",
    }
)  # fmt: skip
_BOOKKEEPING = (
    "command", "argv", "path", "dir", "file", "url", "addr", "address", "host", "hosts", "port", "pid", "run_id", "id",
    "time", "started", "ended", "seed", "log", "name", "preset",
)  # fmt: skip
# What server.sp sets in the server's environment: no difference of its own where sp differs too.
_SP = "sp"
_SET_BY_SP = frozenset({"env.nsysk3_sp", "env.sglang_k3_sp_collective", "env.sglang_k3_sp_attn_res"})
# What says how a run was measured, and not what it ran: no single one of them makes a comparison of one setting.
_MEASURED = frozenset({"gpus", "gpu_name", "nsys_version", "window", "simulated", "nsysk3_version"})
_ALIASES = frozenset(key for known in KNOWN for key in known.keys)
_SHOWN = 60


def comparability(
    base: tuple[str, Result, Layout], other: tuple[str, Result, Layout], *, paired: bool
) -> Comparability:
    """What the manifests, and where there are none the traces, say about two runs: each as (label, result, layout)."""
    facts = [*_from_layout(base[2], other[2]), *_from_manifests(base[1], other[1]), *_from_traces(base[1], other[1])]
    differences = [_difference(fact) for fact in facts if fact.status == "differs"]
    unknown = [fact.label for fact in facts if fact.status == "not known"]
    degrees = (base[2].pp, base[2].tp, other[2].pp, other[2].tp)
    same_layout = None if None in degrees else degrees[:2] == degrees[2:]
    only = _only_setting(facts) if same_layout else None
    single = False if differences and not only else None if unknown else True
    summary = list(_summary(base, other, differences, unknown, single, same_layout, only))
    return Comparability(
        base=base[0], other=other[0], facts=facts, differences=differences, unknown=unknown, single_variable=single,
        same_layout=same_layout, paired=paired, summary=summary,
    )  # fmt: skip


def _only_setting(facts: list[Fact]) -> Fact | None:
    """The one setting that differs, where nothing else does."""
    differ = [fact for fact in facts if fact.status == "differs"]
    return differ[0] if len(differ) == 1 and differ[0].name not in _MEASURED else None


def _from_layout(base: Layout, other: Layout) -> list[Fact]:
    def shown(layout: Layout) -> str | None:
        return None if layout.ep is None else f"EP{layout.ep}"

    return [_fact("ep", "expert parallel", shown(base), shown(other)), _fact("gpus", "GPUs", *_sizes(base, other))]


def _sizes(base: Layout, other: Layout) -> tuple[str, str]:
    one, two = ((side.pp * side.tp if side.pp and side.tp else side.ranks) for side in (base, other))
    return str(one), str(two)


def _from_manifests(base: Result, other: Result) -> list[Fact]:
    ours, theirs = _settings(base), _settings(other)
    facts = [_fact(known.name, known.label, _find(ours, known), _find(theirs, known)) for known in KNOWN]
    if not base.document.manifest or not other.document.manifest:
        return facts
    engines = {ours.get("engine"), theirs.get("engine")}
    moot = {known.name for known in KNOWN if known.optional} | (set() if engines & {None, "sglang"} else _SGLANG)
    facts = [fact for fact in facts if fact.name not in moot or (fact.base, fact.other) != (None, None)]
    by_sp = _SET_BY_SP if None not in (was := ours.get(_SP), now := theirs.get(_SP)) and was != now else frozenset()
    left = [key for key in {**ours, **theirs} if _is_setting(key) and key not in by_sp]
    # Of the rest only differences are worth a line: one side leaving a default out is not a difference.
    pairs = [(key, ours.get(key), theirs.get(key)) for key in left]
    return facts + [_fact(key, key, one, two) for key, one, two in pairs if None not in (one, two) and one != two]


def _from_traces(base: Result, other: Result) -> list[Fact]:
    def gpus(result: Result) -> str | None:
        names = sorted({rank.gpu_name for rank in result.document.ranks if rank.gpu_name})
        return ", ".join(names) or None

    def exporters(result: Result) -> str | None:
        return ", ".join(sorted({report.exporter for report in result.document.reports if report.exporter})) or None

    def made(result: Result) -> str:
        return "simulated" if result.document.simulated else "real"

    pair = (base, other)
    return [
        _fact("gpu_name", "GPU model", *map(gpus, pair)),
        _fact("nsys_version", "Nsight Systems version", *map(exporters, pair)),
        _fact("window", "window", *(result.document.window.used for result in pair)),
        _fact("simulated", "origin of the traces", *map(made, pair)),
        _fact("nsysk3_version", "nsysk3 version", *(result.document.nsysk3_version for result in pair)),
    ]


def _fact(name: str, label: str, base: str | None, other: str | None) -> Fact:
    status: FactStatus = "not known" if base is None or other is None else "same" if base == other else "differs"
    return Fact(name=name, label=label, base=base, other=other, status=status)


def _difference(fact: Fact) -> str:
    if fact.name == "ep":
        return f"{fact.base} -> {fact.other}"
    if fact.name == "simulated":
        return "one run is simulated, the other real"
    return f"{fact.label} {fact.base} -> {fact.other}"


def _settings(result: Result) -> dict[str, str]:
    """Every scalar setting of a manifest by its dotted name without the section, names in snake case."""
    manifest = result.document.manifest or {}
    found: dict[str, str] = {}
    for section in SECTIONS:
        for key, value in _flat(manifest.get(section)):
            # The first section wins: a load generator may repeat what the server was told.
            found.setdefault(key, value)
    if isinstance(manifest.get("engine"), str):
        found.setdefault("engine", manifest["engine"])
    return found


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = str(key).lower().replace("-", "_")
            yield from _flat(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list):
        if all(isinstance(inner, (str, int, float)) for inner in value):
            yield prefix, " ".join(map(str, value))
    elif value is not None and prefix:
        yield prefix, str(value)


def _find(settings: Mapping[str, str], known: Known) -> str | None:
    by_leaf = {key.rsplit(".", 1)[-1]: value for key, value in reversed(list(settings.items()))}
    return next((by_leaf[key] for key in known.keys if key in by_leaf), None)


def _is_setting(key: str) -> bool:
    if "server_info." in key:  # every default of a server: what was asked for is elsewhere
        return False
    leaf = key.rsplit(".", 1)[-1]
    ends = tuple(f"_{word}" for word in _BOOKKEEPING)
    return not (leaf in _ALIASES or leaf in _LAYOUT_KEYS or leaf in _BOOKKEEPING or leaf.endswith(ends))


def _shown(text: str | None) -> str:
    return "-" if text is None else text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _summary(
    base: tuple[str, Result, Layout],
    other: tuple[str, Result, Layout],
    differences: list[str],
    unknown: list[str],
    single: bool | None,
    same_layout: bool | None,
    only: Fact | None,
) -> Iterator[str]:
    alike = same_layout and base[2].text == other[2].text  # EP is none of what makes ranks alike
    yield f"same layout: {base[2].text}" if alike else f"{base[2].text} -> {other[2].text}"
    for label, _, layout in (base, other):
        if layout.note:
            yield f"{label}: layout {layout.note}" if layout.source == "inferred" else f"{label}: {layout.note}"
    if only:
        yield f"only {only.label} differs: {_shown(only.base)} -> {_shown(only.other)}"
    elif differences:
        shown = "; ".join(map(_shown, differences))
        yield f"{shown}: not a single-variable comparison"
    without = [label for label, result, _ in (base, other) if result.document.manifest is None]
    if without:
        yield f"not known whether {', '.join(unknown)} are the same: {NO_MANIFEST} for {' and '.join(without)}"
    elif unknown:
        yield f"not known whether {', '.join(unknown)} are the same: the manifests do not say"
    if single and not only:
        yield (
            "besides PP and TP nothing that the manifests record differs"
            if not same_layout
            else "nothing that the manifests record differs"
        )
    if base[1].document.simulated and other[1].document.simulated:
        yield "both runs are simulated"
    if _same_capture(base[1], other[1]):
        yield SAME_CAPTURE


def _same_capture(base: Result, other: Result) -> bool:
    """Whether the reports of both, copies or not, were recorded in the same moments, and their GPUs did the same."""

    def recorded(result: Result) -> list[tuple[int, int]] | None:
        spans = [(report.start_utc_ns, report.end_utc_ns) for report in result.document.reports]
        known = [(start, end) for start, end in spans if start is not None and end is not None]
        return sorted(known) if known and len(known) == len(spans) else None

    def work(result: Result) -> list[tuple[str, int, int, int]]:
        ranks = result.document.ranks
        return sorted((r.gpu_uuid or "", r.device_id, r.kernel_count, r.kernel_total_ns) for r in ranks)

    when = recorded(base)
    if when is None or when != recorded(other):
        return False
    # Simulated runs all begin in the same moment; of two windows the work may differ.
    return base.document.window.used != other.document.window.used or work(base) == work(other)
