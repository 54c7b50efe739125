"""What the text of a range says."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsysk3.analysis.layer_names import NAME_SCHEMA, parse_names
from nsysk3.errors import InputError


def _parse(*names: str, layer_regex: str | None = None) -> dict[str, dict[str, object]]:
    rows = parse_names(pl.Series("name", names, pl.Categorical), layer_regex)
    return {row.pop("name"): row for row in rows.iter_rows(named=True)}


def test_sglangs_marker_is_a_python_dict_and_not_json() -> None:
    text = (
        "{'Module': 'model.language_model.model.layers.3.self_attn.o_proj', "
        "'TrainableParams': {'weight': [7168, 6144]}, 'Inputs': [[8192, 6144]]}"
    )
    assert _parse(text)[text] == {
        "kind": "layer",
        "stack": "model.language_model.model",
        "layer": 3,
        "module": "self_attn.o_proj",
        "number": None,
        "tokens": 8192,
    }


@pytest.mark.parametrize(
    ("text", "kind", "layer", "module"),
    [
        ("{'Module': 'model.model.layers.92'}", "layer", 92, None),
        ("{'Module': 'model.language_model.model', 'Inputs': [[8192], [8192, 7168]]}", "model", None, "model"),
        ("{'Module': 'model.language_model.logits_processor'}", "model", None, "logits_processor"),
        ("model.layers.3.mlp", "layer", 3, "mlp"),
        ("model.layers.4", "layer", 4, None),
        ("transformer.h.7.attn", "layer", 7, "attn"),
        ("layers.0.mlp.experts", "layer", 0, "mlp.experts"),
        ("nsysk3.forward 5", "forward", None, None),
        ("nsysk3.layer 3", "layer", 3, None),
        ("nsysk3.layer 17 attn=mla mlp=moe", "layer", 17, None),
        ("nsysk3.prefill_window", "window", None, None),
        ("pp.send", "boundary", None, "pp.send"),
        ("pp.recv_output bytes=8", "boundary", None, "pp.recv_output"),
    ],
)
def test_names_of_layers_modules_and_markers(text: str, kind: str, layer: int | None, module: str | None) -> None:
    row = _parse(text)[text]
    assert (row["kind"], row["layer"], row["module"]) == (kind, layer, module)


def test_a_marker_keeps_its_number_and_tokens() -> None:
    row = _parse("nsysk3.forward 12 mb=3 stage=1 mode=extend reqs=1 tokens=4096")[
        "nsysk3.forward 12 mb=3 stage=1 mode=extend reqs=1 tokens=4096"
    ]
    assert (row["number"], row["tokens"]) == (12, 4096)


def test_inputs_that_lead_with_a_batch_say_nothing_of_tokens() -> None:
    text = "{'Module': 'model.layers.0.self_attn.o_norm', 'Inputs': [[1, 8192, 48, 128], [8192, 48, 128]]}"
    assert _parse(text)[text]["tokens"] is None


def test_a_plain_path_counts_only_where_it_begins_like_the_layers() -> None:
    found = _parse("scheduler.run_batch", "model.norm", "model", "model.layers.1", "aten.mm")
    assert sorted(found) == ["model", "model.layers.1", "model.norm"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{'Module': ",
        "{'Module': __import__('os').system('false')}",
        "{'Module': 'a' * 10**9}",
        "sublayers.3",
        "model.layers.99999999999999999999",
        "model.layers.-1",
        "nsysk3.forward",
        "nsysk3.forward x",
        "ncclAllReduce",
        "x" * 1_000_000,
        "{'Module': '" + "a." * 500_000 + "layers.3'}",
    ],
)
def test_hostile_text_says_nothing(text: str) -> None:
    assert _parse(text) == {}


def test_a_custom_pattern_names_layers() -> None:
    found = _parse("L12/attn", "L3", "other", "model.layers.1", layer_regex=r"^L(?P<layer>\d+)(?:/(?P<module>\w+))?$")
    assert {name: (row["layer"], row["module"]) for name, row in found.items()} == {
        "L12/attn": (12, "attn"),
        "L3": (3, None),
        "model.layers.1": (1, None),
    }


@pytest.mark.parametrize("pattern", ["(", r"x(?P<other>\d)", r"(?P<layer>a)(?=b)"])
def test_an_unusable_pattern_is_an_input_error_in_one_line(pattern: str) -> None:
    with pytest.raises(InputError, match="--layer-regex") as caught:
        _parse("x", layer_regex=pattern)
    assert "\n" not in str(caught.value)


@given(st.lists(st.text(max_size=60), max_size=20))
def test_any_text_parses(names: list[str]) -> None:
    found = parse_names(pl.Series("name", names, pl.String).unique())
    assert found.drop("name").schema == NAME_SCHEMA
    assert found["kind"].null_count() == 0
    assert found.filter((pl.col("kind") == "layer") & pl.col("layer").is_null()).is_empty()
