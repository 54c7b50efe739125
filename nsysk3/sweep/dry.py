"""What a sweep would do, as text."""

from __future__ import annotations

from collections.abc import Iterator

from nsysk3.run.words import counted
from nsysk3.sweep.job import Job


def dry_run(job: Job) -> str:
    """The matrix, then every layout with what is to be known of it and every command on every host."""
    return "\n".join(_lines(job)) + "\n"


def _lines(job: Job) -> Iterator[str]:
    from nsysk3.launch.plan import shell_lines

    matrix, load = job.matrix, job.plans[0].settings.load
    kept = job.folder.done()
    yield f"# {job.record.run_id}: {counted(len(matrix.layouts), 'layout')}, results in {job.folder.path}"
    yield (
        f"# each at {', '.join(f'C={each}' for each in matrix.concurrency)}, {counted(matrix.repeats, 'repeat')} of "
        f"{counted(matrix.requests, 'request')}, {load.input_len:,} -> {load.output_len:,} tokens, chunk {load.chunk:,}"
    )
    tokens = 0
    for layout, plan in zip(matrix.layouts, job.plans, strict=True):
        left = [cell for cell in matrix.cells(layout) if cell.key not in kept]
        tokens += len(left) * matrix.requests * load.input_len
        yield ""
        yield f"# {layout.label}: {counted(len(left), 'repeat')} to measure, {plan.url}"
        if not left:
            continue
        yield from (f"# warning: {text}" for text in plan.warnings)
        yield from (f"# note: {text}" for text in plan.notes)
        if plan.gpu_bytes:
            yield f"# weights of the fullest GPU: about {max(plan.gpu_bytes) / 2**30:,.1f} GiB"
        yield shell_lines(plan).rstrip("\n")
    yield ""
    yield f"# {tokens:,} prompt tokens to send in all"
