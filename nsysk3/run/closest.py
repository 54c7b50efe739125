"""What somebody who mistyped a name may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``word`` is most like: the only one that it begins, else by its letters; None if none.

    A dash at the beginning tells nothing, and neither do capitals, ``_`` and ``.`` in place of ``-``.
    """
    plain = {_plain(name): name for name in names}
    asked = _plain(word)
    if asked in plain:
        return plain[asked]
    begun = [name for name in plain if asked and name.startswith(asked)]
    found = begun if len(begun) == 1 else get_close_matches(asked, plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-").replace(".", "-")
