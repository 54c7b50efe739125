"""What a reader of a sweep's tables must know, and where they do not apply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsysk3.run.words import counted
from nsysk3.sweep.folder import Point, Repeat
from nsysk3.sweep.record import Record


def caveats(points: Sequence[Point], record: Record, repeats: Sequence[Repeat]) -> list[str]:
    """What makes points differ in more than the depth of the pipeline, and what is odd about single ones."""
    return list(dict.fromkeys([*_layouts(points, record), *_repeats(points, repeats), *_merged(record), *record.notes]))


def _layouts(points: Sequence[Point], record: Record) -> Iterator[str]:
    layouts = sorted({point.layout for point in points})
    base = layouts[0]
    for layout in layouts:
        if layout.ep != base.ep:
            yield f"{layout.label}: EP{layout.ep}, but EP{base.ep} with {base.label}: not a comparison of depth alone"
        low = [point.concurrency for point in points if point.layout == layout and point.concurrency < layout.pp]
        if low:
            levels = ", ".join(map(str, sorted(low)))
            yield f"{layout.label}: C={levels} is less than its {layout.pp} stages: so few requests hardly fill them"
    for each in record.layouts:
        if each.args:
            yield f"{each.layout.label}: its server also got {' '.join(each.args)}"
        if each.starts:
            yield from each.starts[-1].notes


def _repeats(points: Sequence[Point], repeats: Sequence[Repeat]) -> Iterator[str]:
    cached = sum(1 for row in repeats if row.cached_tokens)
    if cached:
        yield (
            f"{counted(cached, 'repeat')} found part of the prompts in a prefix cache: throughput is not that of "
            "prefill; serve with --disable-radix-cache"
        )
    clients = sorted({row.client for row in repeats if row.client})
    if len(clients) > 1:
        yield f"the load came from different clients: {', '.join(clients)}"
    counts = sorted({point.repeats for point in points})
    if len(counts) > 1:
        yield f"points have {counts[0]} to {counts[-1]} repeats"
    attempts: dict[str, set[int]] = {}
    for row in repeats:
        attempts.setdefault(row.layout.label, set()).add(row.attempt)
    if restarted := [label for label, every in attempts.items() if len(every) > 1]:
        yield f"repeats of {', '.join(restarted)} come from more than one start of its service"


def _merged(record: Record) -> Iterator[str]:
    for merged in record.merged:
        for text in merged.accepted:
            yield f"{merged.folder} was merged although it differs: {text}"
        if merged.not_known:
            yield f"{merged.folder} was merged without knowing on both sides: {', '.join(merged.not_known)}"


def limits(points: Sequence[Point], record: Record) -> list[str]:
    """What these numbers say nothing about."""
    said = []
    least = min(point.concurrency for point in points)
    if least > 1:
        said.append(f"C=1 and all below C={least}: few requests leave a pipeline empty, and depth then costs latency")
    output = record.settings.get("load.output_len")
    if output == 1:
        said.append("long decode: one token was generated, so nothing here was decoded")
    elif output is not None:
        said.append(f"other lengths of decode than {output} tokens")
    length = record.settings.get("load.input_len")
    fixed = f"{length:,} tokens each" if isinstance(length, int) else "all of one length"
    said.append(f"mixed traffic: prompts were random, {fixed}, sent in a closed loop; real arrivals and lengths vary")
    gpus = sorted({point.layout.gpus for point in points})
    said.append(f"other machines than these {' or '.join(map(str, gpus))} GPUs, other models, other chunk sizes")
    return said
