"""nsysk3: where each GPU's time went in a prefill window, from Nsight Systems traces.

``nsysk3.load(path)`` reads a run, ``nsysk3.analyze(run)`` gives its result; frames are polars and hand over with
``.to_pandas()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nsysk3.analysis.analyze import analyze
    from nsysk3.result.store import Result
    from nsysk3.scale.choose import crew_of
    from nsysk3.trace.load import Run, load

__all__ = ["Result", "Run", "__version__", "analyze", "crew_of", "load"]

_HOMES = {
    "analyze": "nsysk3.analysis.analyze",
    "crew_of": "nsysk3.scale.choose",
    "load": "nsysk3.trace.load",
    "Run": "nsysk3.trace.load",
    "Result": "nsysk3.result.store",
}


def __getattr__(name: str) -> Any:
    """Import the heavy parts on first use: ``nsysk3 --help`` must not wait for polars."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'nsysk3' has no attribute {name!r}")
