"""The order of millions of rows by several keys."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray


def row_order(keys: pl.DataFrame, ties: int) -> NDArray[np.int64]:
    """Row numbers in the order of the integer columns of ``keys``, the first decides; nulls first, stable.

    The last ``ties`` columns are compared only where all others are equal, which few rows are.  Nsight writes its
    tables by start, and unlike polars' numpy's sort gains by such order.
    """
    columns = [column.cast(pl.Int64).fill_null(-(2**63)).to_numpy() for column in reversed(keys.get_columns())]
    first = columns[ties:]
    order = np.lexsort(first)
    tied = np.append(False, np.logical_and.reduce([np.diff(column[order]) == 0 for column in first]))[: len(order)]
    tied |= np.append(tied[1:], False)[: len(order)]
    order[tied] = order[tied][np.lexsort([column[order[tied]] for column in columns])]
    return order
