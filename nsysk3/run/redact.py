"""Secrets in settings and commands, out of what is shown, kept or forwarded."""

from __future__ import annotations

import re
from collections.abc import Sequence

REDACTED = "[redacted]"
_NAME = r"(?:pass(?:word|wd|phrase)?|secret|token(?!s\b|izer)|(?:api|access|private)[-_]?key|credential|authorization)"
_KEY = re.compile(rf"(?:^|[._-]){_NAME}(?:$|[._-])", re.IGNORECASE)
# ``--api-key x``, ``HF_TOKEN=x``, ``"password": "x"``, ``Authorization: Bearer x``.  Every repeat is bounded or starts
# at a fixed text: a hostile value must not make the search quadratic.
_IN_TEXT = re.compile(
    rf"({_NAME}[-\w]{{0,40}}[\"']?(?:\s{{0,5}}[:=]\s{{0,5}}|\s{{1,5}})(?:bearer\s{{1,5}})?[\"']?)([^\s\"',;]+)",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(://[^\s/:@]{1,200}:)[^\s/@]{1,400}(@)")


def redact(name: str, value: str) -> str:
    """A setting's value as a page may show it: hidden whole where its name says secret, else only the secrets in it."""
    if _KEY.search(name):
        return REDACTED
    return _IN_ADDRESS.sub(rf"\1{REDACTED}\2", _IN_TEXT.sub(rf"\1{REDACTED}", value))


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line as it may be shown: what follows ``--api-key`` and the like, and secrets inside words, hidden."""
    shown: list[str] = []
    secret_follows = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if secret_follows and not word.startswith("--"):
            shown.append(REDACTED)
        elif equals and _KEY.search(name.lstrip("-")):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(redact("", word))
        secret_follows = not equals and word.startswith("--") and _KEY.search(word.lstrip("-")) is not None
    return shown
