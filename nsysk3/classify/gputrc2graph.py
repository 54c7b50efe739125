"""Reads the category files of gputrc2graph, the Nsight Systems script that ships with SGLang and vLLM.

Such a file is JSON of the shape ``{engine: {model: {regular expression: category}}}`` where the order counts.  It
knows categories only, so the role is worked out:

* where the shipped rules call a kernel communication or fused, their role stands, whatever the file calls it;
* otherwise a category that means communication (its name has nccl, custom_ar, comm, all_reduce or allreduce in it)
  gives the role ``comm_other``, and any other category gives ``compute``;
* an expression that matches anything (``".*": "misc"``) is left out with a note, so that kernels it would have
  swallowed reach the shipped rules or are reported as unclassified.

With several engines or models in the file, all their expressions are taken in file order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from nsysk3.classify.rule import Rule, compile_pattern
from nsysk3.errors import InputError

_COMM_CATEGORY = re.compile(r"nccl|custom_ar|comm|all_?reduce", re.IGNORECASE)
# Names that have no character in common: no pattern that means something matches all of them.
_UNRELATED_NAMES = ("q" * 64, "7" * 64, "_" * 64)


def read_gputrc2graph(text: str, file: str) -> tuple[list[Rule], list[str]]:
    """Turns the text of a gputrc2graph category file into rules and notes on what was left out.

    `file` is only used to name rules and errors.  Raises InputError when the text is not JSON of that shape or an
    expression is not a regular expression.
    """
    rules: list[Rule] = []
    notes: list[str] = []
    for number, (pattern, category) in enumerate(_expressions(text, file), start=1):
        source = f"{file} rule {number}"
        if _matches_anything(pattern, source):
            notes.append(f"{source}: {pattern!r} -> {category!r} matches every name and was left out")
            continue
        role = "comm_other" if _COMM_CATEGORY.search(category) else "compute"
        rules.append(Rule(pattern, category, role, source, shipped_role_wins=True))
    return rules, notes


def _expressions(text: str, file: str) -> Iterator[tuple[str, str]]:
    try:
        engines = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    number = 0
    for engine, models in _items(engines, f"{file}: the top level"):
        for model, expressions in _items(models, f"{file}: engine {engine!r}"):
            for pattern, category in _items(expressions, f"{file}: model {model!r}"):
                number += 1
                if not isinstance(category, str) or not category or not pattern:
                    raise InputError(f"{file} rule {number}: the expression and its category must be non-empty text")
                yield pattern, category


def _items(value: object, where: str) -> list[tuple[str, object]]:
    if not isinstance(value, dict) or not value:
        raise InputError(f"{where} must be a non-empty object; wanted engine -> model -> expression -> category")
    return list(value.items())


def _matches_anything(pattern: str, source: str) -> bool:
    regex = compile_pattern(pattern, source)
    return all(regex.search(name) for name in _UNRELATED_NAMES)
