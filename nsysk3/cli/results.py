"""Find the result that a path on a command line means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsysk3.result import Result


def open_result(path: Path, window: str | None, progress: Callable[[str], None] | None) -> Result:
    """The result of a result directory, of a run directory's analysis/ folder, else of the traces themselves.

    Saved results are taken only when they are of the window asked for (None: of any).  Raises InputError.
    """
    from nsysk3.errors import InputError
    from nsysk3.result import Result
    from nsysk3.result.store import RESULT_NAME

    for folder in (path, path / "analysis"):
        if (folder / RESULT_NAME).is_file():
            saved = Result.load(folder)
            if window in (None, saved.document.window.asked):
                return saved
            if folder == path:
                asked = saved.document.window.asked
                raise InputError(f"{path}: these results are of window {asked}; analyze the traces with {window}")
    from nsysk3.analysis.analyze import analyze

    return analyze(path, window=window or "capture", progress=progress)
