"""Was run.json written for these very reports?  Its times and the switches it records are held against them.

Only what is certain counts (docs/metrics.md, section 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from nsysk3.run.inputs import Problem
from nsysk3.run.manifest import ENDED, Manifest
from nsysk3.run.words import first_of
from nsysk3.trace.facts import ReportFacts
from nsysk3.trace.moments import span_in_words
from nsysk3.trace.part import Seen

# Names of kernels that only sequence-parallel collectives launch: nsysk3's own, and SGLang's.
SP_OWN = r"\bk3::rs_attn_res\b"
SP_SGLANG = r"\bsp_collective::|\battn_res_fused_(?:pull_rs|direct_ag)_kernel\b|\breduce_scatter_(?:res|pull)_kernel\b"
_SP_SWITCHES = {
    "nsysk3": (SP_OWN, ("NSYSK3_SP",)),
    "SGLang": (SP_SGLANG, ("SGLANG_K3_SP_COLLECTIVE", "SGLANG_K3_SP_ATTN_RES")),
}
# How far a clock may be off: one that was measured, and one that nobody looked at.
_MEASURED_NS, _ANY_NS = 5 * 10**9, 60 * 10**9
_NO_SETTINGS: dict[str, object] = {
    "server": {}, "server_said": {}, "load": {}, "nsys": {}, "versions": {}, "features": None,
}  # fmt: skip
_SHOWN = 4


def without_foreign_settings(
    path: str, manifest: Manifest, seen: Sequence[Seen]
) -> tuple[Manifest, tuple[Problem, ...]]:
    """The manifest ``path`` without its settings where it is of another run than the reports, and what to say of it."""
    outside = dict(_recorded_outside(manifest, [each.facts for each in seen]))
    found = list(outside)
    # A few reports of another run, or an odd clock, say nothing of the settings of the others.
    certain = len(outside) == len(seen) and all(outside.values())
    if not outside:
        found = list(_kernels_switched_off(manifest, seen))
        certain = bool(found)
    if not found:
        return manifest, ()
    tail = (
        "its settings are not those of these reports, and were not used; put the run.json of this run there"
        if certain
        else "unless a clock is off the two are of different runs, and its settings are not those of such reports"
    )
    kept = manifest.model_copy(update=_NO_SETTINGS) if certain else manifest
    return kept, (Problem(path, f"{path}: {first_of(found, _SHOWN)}: {tail}"),)


def _recorded_outside(manifest: Manifest, reports: Sequence[ReportFacts]) -> Iterator[tuple[str, bool]]:
    """Reports whose recording began before the run was planned or after it had ended; is the clock known?"""
    planned = _utc_ns(manifest.times.get("planned"))
    if planned is None:
        return
    steps = [step for value in manifest.times.values() if (step := _utc_ns(value)) is not None]
    # A run that goes on, or whose end nobody wrote down, has none.
    ended = max(steps) if manifest.status in ENDED and manifest.status in manifest.times else None
    clocks = {clock.host: clock for clock in manifest.clocks or ()}
    for report in reports:
        if report.recorded_utc_ns is None or report.simulated:
            continue
        clock, (began, _), slack = clocks.get(report.host), report.recorded_utc_ns, _ANY_NS
        if measured := clock is not None:
            began, slack = began - clock.offset_ns, _MEASURED_NS + clock.uncertainty_ns
        if planned - began > slack:
            yield f"{report.name} was recorded {span_in_words(planned - began)} before this run was planned", measured
        elif ended is not None and began - ended > slack:
            yield f"{report.name} was recorded {span_in_words(began - ended)} after this run had ended", measured


def _utc_ns(text: object) -> int | None:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e9)


def _kernels_switched_off(manifest: Manifest, seen: Sequence[Seen]) -> Iterator[str]:
    """Sequence-parallel collectives that ran, and that the run had switched off by setting and by environment."""
    server = manifest.server
    env = server.get("env")
    # An argument of the server itself may switch them on.
    if server.get("sp") != "off" or "--sp" in str(server.get("args")) or not isinstance(env, dict):
        return
    for whose, (pattern, switches) in _SP_SWITCHES.items():
        ran = [each.facts.name for each in seen if each.names["name"].str.contains(pattern).any()]
        if ran and all(env.get(switch) == "0" for switch in switches):
            yield f"says sp off, but SP collectives of {whose} ran in {first_of(ran, _SHOWN)}"
