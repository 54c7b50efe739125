"""Write fields.md from the models of the JSON documents: ``python docs/fields.py``.  A test compares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nsysk3.compare.model import Comparison
from nsysk3.result.model import ResultDocument
from nsysk3.run.manifest import Manifest

PAGE = "fields.md"
DOCUMENTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (
        "result.json",
        "What `nsysk3 analyze` writes, and prints with `--json`. JSON Schema: "
        "[result.schema.json](result.schema.json). `tables` has the smaller ones of "
        "[files.md](files.md#tables), rows as objects; the columns of `rank_metrics` are the fields of RankMetrics.",
        ResultDocument,
    ),
    (
        "run.json",
        "The manifest of a run directory. Fields that are not known here are kept; "
        "[files.md](files.md#runjson) has those that `nsysk3 profile` adds.",
        Manifest,
    ),
    (
        "The comparison",
        "What `nsysk3 compare --json` prints. JSON Schema: [comparison.schema.json](comparison.schema.json).",
        Comparison,
    ),
)


def objects(model: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema of a document, then of each object in it, with names."""
    schema = model.model_json_schema(mode="serialization")
    yield model.__name__, schema
    yield from ((name, each) for name, each in schema.get("$defs", {}).items() if "properties" in each)


def meaning(field: dict[str, Any], others: dict[str, dict[str, Any]]) -> str:
    """A field's description, else that of the one kind of object it holds."""
    if "description" in field:
        return str(field["description"])
    found = [name for name in others if f"'#/$defs/{name}'" in str(field)]
    return str(others[found[0]].get("description", "")) if len(found) == 1 else ""


def kind(field: dict[str, Any]) -> str:
    """A field's type in words, objects as links."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(kind(each) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {kind(field['items'])}"
    return str(field.get("type", "any"))


def markdown() -> str:
    """docs/fields.md."""
    parts = ["# JSON fields", "Made from the models by `python docs/fields.py`. Times are integer nanoseconds."]
    for title, text, model in DOCUMENTS:
        parts += [f"## {title}", text]
        named = dict(objects(model))
        for name, schema in named.items():
            about = " ".join(schema["description"].replace("``", "`").split())
            rows = [
                f"| `{field}` | {kind(each)} | {' '.join(meaning(each, named).replace('``', '`').split())} |"
                for field, each in schema["properties"].items()
            ]
            parts += [f"### {name}", about, "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / PAGE).write_text(markdown(), "utf-8")
