"""Runs against each other: what differs besides the layout, what changed, and how sure that is."""

from nsysk3.compare.compare import compare
from nsysk3.compare.model import Comparison

__all__ = ["Comparison", "compare"]
