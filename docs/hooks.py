"""What turns the pages into a site; mkdocs.yml names it as a hook.  The pages stay Markdown as GitHub reads it.

Files outside docs/ that a page links to come along under ``repository/``, and links follow them there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ELSEWHERE = "repository/"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
LIST = re.compile(r"(?:[-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what those link to."""
    seen = [file for file in files if file.is_documentation_page()]
    for name in re.findall(re.escape(ELSEWHERE) + r"[\w./-]+", str(config.nav)):
        seen.append(_bring(name.removeprefix(ELSEWHERE), files, config))
    for file in seen:
        for target in _targets(file):
            if (ROOT / target).is_file() and not files.get_file_from_path(_on_site(target)):
                brought = _bring(target, files, config)
                if brought.is_documentation_page():
                    seen.append(brought)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ lead to the copies; lists and tables stand apart, as Python-Markdown wants them."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        target = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(here)), link[2])))
        return link[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + link[3]

    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            if lines and _begins_block(line, lines[-1]):
                lines.append("")
            line = LINK.sub(moved, line)
            if line.startswith("|"):
                line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
        lines.append(line)
    return "\n".join(lines)


def _begins_block(line: str, before: str) -> bool:
    if not before or before.startswith("#"):
        return False
    if LIST.match(line):
        return not LIST.match(before) and not before.startswith(" ")
    return line.startswith("|") != before.startswith("|")


def _bring(target: str, files: Files, config: MkDocsConfig) -> File:
    brought = File.generated(config, ELSEWHERE + target, abs_src_path=str(ROOT / target))
    files.append(brought)
    return brought


def _targets(file: File) -> Iterator[str]:
    folder = posixpath.dirname(_in_repository(file.src_uri))
    for link in LINK.finditer(file.content_string):
        yield posixpath.normpath(posixpath.join(folder, link[2]))


def _in_repository(uri: str) -> str:
    return uri.removeprefix(ELSEWHERE) if uri.startswith(ELSEWHERE) else f"docs/{uri}"


def _on_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else ELSEWHERE + path
