"""``python -m nsysk3.plugin.check [SGLANG]``: are the functions that the plugin hooks where it expects them?

Reads the source of the installed SGLang, or of a wheel or folder given, and imports none of it.  Exits 1 when something
that the plugin needs is missing.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nsysk3.plugin.targets import (
    SP_TARGETS,
    SP_USED_NAMES,
    TARGETS,
    USED_NAMES,
    VERIFIED_VERSIONS,
    FunctionTarget,
    Names,
    Target,
)

# Text of a file of SGLang by its path, such as sglang/srt/managers/scheduler.py; None where there is no such file.
Source = Callable[[str], str | None]


@dataclass(frozen=True)
class Finding:
    """What is wrong with one name; ``required`` when the plugin cannot do its work without it."""

    what: str
    problem: str
    required: bool = True


def open_source(place: Path | None = None) -> tuple[Source, str]:
    """Source and version of SGLang: installed (``place`` None), a wheel, or a folder that holds ``sglang/``.

    Raises FileNotFoundError where there is none.
    """
    if place is None:
        spec = importlib.util.find_spec("sglang")
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if not folders:
            raise FileNotFoundError("SGLang is not installed here")
        place = Path(folders[0]).parent
    if place.is_file():
        archive = zipfile.ZipFile(place)
        names = set(archive.namelist())
        version = re.match(r"sglang-([^-]+)-", place.name)
        return lambda path: archive.read(path).decode() if path in names else None, version[1] if version else "unknown"
    if not (place / "sglang").is_dir():
        raise FileNotFoundError(f"{place}: no folder sglang in it")
    versions = sorted(each.name.split("-")[1].removesuffix(".dist") for each in place.glob("sglang-*.dist-info"))
    version_text = versions[-1] if versions else "unknown"
    return lambda path: _read(place / path), version_text.removesuffix(".dist-info")


def _read(path: Path) -> str | None:
    return path.read_text("utf-8") if path.is_file() else None


def check(source: Source) -> list[Finding]:
    """Everything that is not as the plugin expects it; empty when all is well."""
    markers = [finding for each in (*TARGETS, *USED_NAMES) for finding in _problems(each, source)]
    return [*markers, *check_sp(source)]


def check_sp(source: Source) -> list[Finding]:
    """The part of ``check`` for NSYSK3_SP: the markers work without it."""
    functions = [finding for each in SP_TARGETS for finding in _function_problems(each, source)]
    return [*functions, *(finding for each in SP_USED_NAMES for finding in _problems(each, source))]


def _module(name: str, source: Source) -> str | None:
    path = name.replace(".", "/")
    return source(f"{path}.py") or source(f"{path}/__init__.py")


def _function_problems(wanted: FunctionTarget, source: Source) -> Iterator[Finding]:
    name = next((each for each in wanted.modules if _module(each, source) is not None), None)
    if name is None:
        yield Finding(wanted.modules[0], "no such module", required=False)
        return
    what = f"{name}.{wanted.function}"
    tree = ast.parse(_module(name, source) or "")
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == wanted.function), None)
    if function is None:
        yield Finding(what, "no such function", required=False)
    elif (found := _parameters(function, keywords=True))[: len(wanted.parameters)] != wanted.parameters:
        expected = ", ".join(wanted.parameters)
        yield Finding(what, f"takes ({', '.join(found)}), expected ({expected}, ...)", required=False)


def _problems(wanted: Target | Names, source: Source) -> Iterator[Finding]:
    required = isinstance(wanted, Target) or wanted.required
    text = _module(wanted.module, source)
    if text is None:
        yield Finding(wanted.module, "no such module", required)
        return
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Finding(wanted.module, f"not read ({error.msg}, line {error.lineno}): newer Python than this?", required)
        return
    if isinstance(wanted, Target):
        yield from _signature(wanted, tree)
    names = wanted.reads if isinstance(wanted, Target) else wanted.names
    for name in sorted(set(names) - _names(tree)):
        yield Finding(f"{wanted.module}: {name}", "no longer used there", required)


def _signature(target: Target, tree: ast.Module) -> Iterator[Finding]:
    owner = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == target.owner), None)
    functions = [n for n in owner.body if isinstance(n, ast.FunctionDef)] if owner else []
    function = next((n for n in functions if n.name == target.function), None)
    if function is None:
        yield Finding(target.path, "no such method" if owner else "no such class")
        return
    found = _parameters(function)
    if found[: len(target.parameters)] != target.parameters:
        yield Finding(target.path, f"takes ({', '.join(found)}), expected ({', '.join(target.parameters)}, ...)")


def _parameters(function: ast.FunctionDef, keywords: bool = False) -> tuple[str, ...]:
    """Names of the parameters in order, ``keywords`` with those that only have a name."""
    arguments = (*function.args.posonlyargs, *function.args.args, *(function.args.kwonlyargs if keywords else ()))
    return tuple(argument.arg for argument in arguments)


def _names(tree: ast.Module) -> set[str]:
    """Every identifier, attribute, keyword and short string of a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
            found.add(node.value)
    return found


def main(arguments: list[str]) -> int:
    """Print what was found; 0 when the plugin can work, 1 when not, 2 when there is no SGLang to look at."""
    try:
        source, version = open_source(Path(arguments[0]) if arguments else None)
    except (OSError, zipfile.BadZipFile) as error:
        print(f"nsysk3.plugin.check: {error}", file=sys.stderr)
        return 2
    findings = check(source)
    for finding in findings:
        print(f"{'missing' if finding.required else 'note'}: {finding.what}: {finding.problem}")
    tried = "" if version in VERIFIED_VERSIONS else f" (not among those tried: {', '.join(VERIFIED_VERSIONS)})"
    usable = not any(finding.required for finding in findings)
    kernels = "" if check_sp(source) else f"; {len(SP_TARGETS)} more for NSYSK3_SP, all found"
    print(f"SGLang {version}{tried}: {len(TARGETS)} hooks, {'all found' if usable else 'NOT all found'}{kernels}")
    return 0 if usable else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
