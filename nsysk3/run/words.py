"""Numbers and ranks in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``1,200 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[object], most: int) -> str:
    """``a, b, c``, or with more than ``most`` of them ``a, b and 7 more``."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def ranks_in_words(ranks: Iterable[int], noun: str = "rank", most: int | None = None) -> str:
    """``rank 8``, ``ranks 8, 9``, ``ranks 0-7, 9``; other numbers with their ``noun``.

    Of more than ``most`` such stretches the rest is counted: ``ranks 0-7, 9 and 5 more``.
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:most]]
    left = sum(map(len, runs[len(shown) :]))
    more = f" and {left:,} more" if left else ""
    return f"{noun}{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(shown)}{more}"
