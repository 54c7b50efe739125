"""What one kernel rule is, and the roles a rule may give."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nsysk3.errors import InputError

COMM_ROLES = (
    "allreduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "p2p",
    "broadcast",
    "barrier",
    "comm_other",
)
"""Roles of kernels that only communicate; `comm_other` is communication whose operation the symbol does not tell."""

ROLES = (*COMM_ROLES, "fused", "compute", "copy")
"""Every role; `fused` kernels both compute and communicate and count as neither."""


@dataclass(frozen=True)
class Rule:
    """One line of an ordered rule list.

    `pattern` is a Python regular expression searched in a kernel's name; `source` says where the rule was written
    (file and number) and `note` why it is there.  With `shipped_role_wins` the rule names the category, but the role
    comes from the shipped rules wherever these call the kernel communication or fused.
    """

    pattern: str
    category: str
    role: str
    source: str
    note: str = ""
    shipped_role_wins: bool = False


def compile_pattern(pattern: str, source: str) -> re.Pattern[str]:
    """Compiles a rule's regular expression; raises InputError naming the rule (`source`) when it is not one."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"{source}: bad regular expression {pattern!r}: {error}") from None
