"""What travels between processes, as bytes that can be counted: pickles in which frames are compressed Arrow."""

from __future__ import annotations

import io
import pickle
from typing import Any

import polars as pl


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Frames by column, where sorted times and repeated numbers take little; the rest as always."""
        if isinstance(obj, pl.DataFrame):
            return _unpacked, (_packed(obj),)
        if isinstance(obj, pl.Series):
            return _series, (_packed(obj.to_frame()),)
        return NotImplemented


def dumps(value: Any) -> bytes:
    """The value as bytes.  Meant for processes of one run only: what reads them runs what they say."""
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(value)
    return out.getvalue()


def loads(raw: bytes) -> Any:
    """The value again."""
    return pickle.loads(raw)


def _packed(frame: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    frame.write_ipc(out, compression="zstd")
    return out.getvalue()


def _unpacked(raw: bytes) -> pl.DataFrame:
    return pl.read_ipc(io.BytesIO(raw))


def _series(raw: bytes) -> pl.Series:
    return _unpacked(raw).to_series()
