"""All labels and prose of the report, one file a language."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nsysk3.errors import InputError

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Catalogue:
    """The texts of one language.

    Called with a dotted key it gives the text, its ``{fields}`` filled in.  ``said`` translates what the analysis wrote
    in English, by the patterns of the language's file, whole or part by part, and names of columns by ``names``; what
    neither knows stays English.
    """

    lang: str
    texts: Mapping[str, Any]
    patterns: tuple[tuple[re.Pattern[str], str], ...]
    names: Mapping[str, str]

    def __call__(self, key: str, **fields: object) -> str:
        """The text of ``key``.  A missing key is a fault of ours and raises KeyError."""
        text = self._find(key)
        if text is None:
            raise KeyError(key)
        return text.format(**fields) if fields else text

    def get(self, key: str, default: str) -> str:
        """The text of ``key``, ``default`` where the catalogue has none: for names that data brings."""
        text = self._find(key)
        return default if text is None else text

    def said(self, text: str) -> tuple[str, str]:
        """A sentence of the analysis in this language, and the language it came out in."""
        if self.lang == "en":
            return text, "en"
        for pattern, replacement in self.patterns:
            if (found := pattern.fullmatch(text)) is not None:
                fields = {name: self.said(part)[0] for name, part in found.groupdict(default="").items()}
                return replacement.format(**fields), self.lang
        if (name := self.names.get(text)) is not None:
            return name, self.lang
        if "; " in text:
            told = [self.said(part) for part in text.split("; ")]
            if any(lang != "en" for _, lang in told):
                return "；".join(part for part, _ in told), self.lang
        elif ", " in text:
            # A list of names is translated whole or not at all: a comma may be any sentence's.
            told = [self.said(part) for part in text.split(", ")]
            if all(lang != "en" for _, lang in told):
                return "、".join(part for part, _ in told), self.lang
        return text, "en"

    def _find(self, key: str) -> str | None:
        at: Any = self.texts
        for part in key.split("."):
            at = at.get(part) if isinstance(at, Mapping) else None
        return at if isinstance(at, str) else None


@cache
def catalogue(lang: str) -> Catalogue:
    """The texts of ``lang``.  Raises InputError for a language there is no file of."""
    if lang not in LANGUAGES:
        raise InputError(f"no report language {lang!r}; there are {', '.join(LANGUAGES)}")
    texts, english = (
        tomllib.loads(files(__name__).joinpath(f"{each}.toml").read_text("utf-8")) for each in (lang, "en")
    )
    patterns = tuple((re.compile(entry["pattern"], re.DOTALL), entry["text"]) for entry in texts.get("said", ()))
    names = {english["col"][key]: text for key, text in texts["col"].items() if key in english["col"]}
    return Catalogue(lang, texts, patterns, names)
