"""Secrets that a manifest could still hold, out of a page that is forwarded."""

from __future__ import annotations

import re

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
