"""What the text of an NVTX range says: a layer, a module of one, a whole model, or one of nsysk3's own markers."""

from __future__ import annotations

import polars as pl

from nsysk3.errors import InputError

KINDS = pl.Enum(["layer", "model", "forward", "window", "boundary"])
NAME_SCHEMA = pl.Schema(
    {
        "kind": KINDS,
        "stack": pl.String(),
        "layer": pl.Int32(),
        "module": pl.String(),
        "number": pl.Int64(),
        "tokens": pl.Int64(),
    }
)

# Range text comes from the traced program: a name longer than this is not read to its end.
_SEARCHED_CHARACTERS = 4096
# SGLang prints a Python dict, not JSON; the module is its first key.  Patterns run in Rust's linear-time engine, so no
# text can make them slow, and nothing is evaluated.
_DICT_MODULE = r"""^\{['"]Module['"]: ['"]([^'"]*)['"][,}]"""
# [[tokens]] or [[tokens, width]]; inputs with more axes lead with a batch or head count.
_DICT_TOKENS = r"""['"]Inputs['"]: \[\[(\d{1,10})(?:, \d+)?\]"""
_PLAIN_PATH = r"^([A-Za-z_]\w*(?:\.\w+)*)$"
_LAYER_PATH = r"^(?P<stack>[\w.]*?)\.?\b(?:layers|blocks|h)\.(?P<layer>\d{1,6})(?:\.(?P<module>[\w.]+))?$"
_MARKER = (
    r"^nsysk3\.(?P<what>forward|layer|prefill_window)"
    r"(?: (?P<number>\d{1,9}))?(?: .*?\btokens=(?P<tokens>\d{1,10}))?"
)
_BOUNDARY = r"^(pp\.(?:send|recv)\w*)"


def parse_names(names: pl.Series, layer_regex: str | None = None) -> pl.DataFrame:
    """Read distinct range names (``name``, any text type); names that say nothing about layers are left out.

    Columns: ``name`` as given and NAME_SCHEMA.  ``kind``: ``layer`` (a layer or a module inside one), ``model`` (a
    module outside any layer), or nsysk3's ``forward``, ``window`` and pipeline ``boundary`` markers.  ``layer`` is the
    id as written (global over pipeline stages).  ``module`` is the path inside the layer (null for the layer itself),
    or the last part of a model path.  ``stack`` is the path before the layer number: one model can hold several stacks,
    such as a vision tower's.  ``number`` is a forward marker's, ``tokens`` comes from it or from the first input's
    shape (null where not said).

    ``layer_regex``: a pattern with a group ``layer`` and optionally ``module``; names it matches are layers whatever
    else they look like.  Raises InputError when it is no regular expression, has no such group or looks around.
    """
    frame = pl.DataFrame({"name": names.drop_nulls()}).with_columns(
        pl.col("name").cast(pl.String).str.slice(0, _SEARCHED_CHARACTERS).alias("text")
    )
    text = pl.col("text")
    frame = frame.with_columns(
        text.str.extract_groups(_MARKER).alias("marker"),
        text.str.extract(_BOUNDARY).alias("boundary"),
        text.str.extract(_DICT_MODULE).alias("dict_path"),
        text.str.extract(_DICT_TOKENS).alias("dict_tokens"),
        text.str.extract(_PLAIN_PATH).alias("plain_path"),
        _custom(layer_regex),
    ).with_columns(pl.coalesce("dict_path", "plain_path").str.extract_groups(_LAYER_PATH).alias("path"))
    return _described(_models(frame)).filter(pl.col("kind").is_not_null())


def _custom(layer_regex: str | None) -> pl.Expr:
    none = pl.struct(pl.lit(None, pl.String).alias("layer"), pl.lit(None, pl.String).alias("module")).alias("custom")
    if layer_regex is None:
        return none
    try:
        groups = pl.select(pl.lit("").str.extract_groups(layer_regex)).to_series().struct.fields
    except pl.exceptions.ComputeError as error:
        detail = " ".join(str(error).split())
        raise InputError(f"--layer-regex {layer_regex!r}: {detail}") from None
    if "layer" not in groups:
        raise InputError(f"--layer-regex {layer_regex!r}: needs a group named layer, such as (?P<layer>\\d+)")
    match = pl.col("text").str.extract_groups(layer_regex)
    module = match.struct.field("module") if "module" in groups else pl.lit(None, pl.String)
    return pl.struct(match.struct.field("layer").alias("layer"), module.alias("module")).alias("custom")


def _models(frame: pl.DataFrame) -> pl.DataFrame:
    """Add ``model_path``: module paths outside any layer.

    Any dotted text could be a plain path (``scheduler.run_batch``), so a plain one counts only when it begins as the
    layers' own paths do.
    """
    stacks = frame.filter(pl.col("path").struct.field("layer").is_not_null())["path"].struct.field("stack")
    roots = stacks.str.split(".").list.first().unique().to_list()
    plain = pl.col("plain_path")
    ours = plain.str.split(".").list.first().is_in([root for root in roots if root])
    outside = pl.col("path").struct.field("layer").is_null()
    return frame.with_columns(
        pl.when(outside).then(pl.coalesce("dict_path", pl.when(ours).then(plain))).alias("model_path")
    )


def _described(frame: pl.DataFrame) -> pl.DataFrame:
    marker, path, custom = (pl.col(name).struct.field for name in ("marker", "path", "custom"))
    what, number = marker("what"), marker("number").cast(pl.Int64)
    layer = (
        pl.when(what == "layer").then(number)
        .otherwise(pl.coalesce(custom("layer"), path("layer")).str.extract(r"^(\d{1,6})$").cast(pl.Int64))
    )  # fmt: skip
    custom_hit = custom("layer").is_not_null()
    kind = (
        pl.when((what == "forward") & number.is_not_null()).then(what)
        .when(what == "prefill_window").then(pl.lit("window"))
        .when(pl.col("boundary").is_not_null()).then(pl.lit("boundary"))
        .when(layer.is_not_null()).then(pl.lit("layer"))
        .when(pl.col("model_path").is_not_null()).then(pl.lit("model"))
    )  # fmt: skip
    module = (
        pl.when(custom_hit).then(custom("module"))
        .when(pl.col("boundary").is_not_null()).then("boundary")
        .when(layer.is_not_null()).then(path("module"))
        .otherwise(pl.col("model_path").str.split(".").list.last())
    )  # fmt: skip
    return frame.select(
        "name",
        kind.cast(KINDS).alias("kind"),
        pl.when(custom_hit | what.is_not_null()).then(None).otherwise(path("stack")).alias("stack"),
        layer.cast(pl.Int32).alias("layer"),
        module.alias("module"),
        pl.when(what != "layer").then(number).alias("number"),
        pl.coalesce(marker("tokens"), "dict_tokens").cast(pl.Int64).alias("tokens"),
    )
