"""Results: what analyses found, as tables and one document, on disk and back."""

from nsysk3.result.model import RankMetrics, ResultDocument
from nsysk3.result.store import Result

__all__ = ["RankMetrics", "Result", "ResultDocument"]
