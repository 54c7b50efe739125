"""Files: where they are kept, and written so that nothing is lost: beside and renamed, never over what is read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_cache_dir

from nsysk3.errors import InputError, MissingToolError


def cache_folder() -> Path:
    """What can be made again is kept here: $NSYSK3_CACHE, else the platform's folder for that."""
    return Path(os.environ.get("NSYSK3_CACHE") or user_cache_dir("nsysk3"))


def unfinished_beside(export: Path) -> list[Path]:
    """What a writer of SQLite that did not finish left beside an export."""
    beside = (export.with_name(export.name + kind) for kind in ("-wal", "-journal"))
    return [file for file in beside if file.is_file()]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a file beside ``path`` to write; when the block ends well it takes the place of ``path``.

    A killed command leaves no half file.  A link is followed, and what is no regular file (a pipe, a device) is written
    to as it is, never replaced.  Raises MissingToolError, in one line, when the place cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            if path.is_dir():
                raise MissingToolError(f"{path}: is a directory; give the name of a file")
            yield path
            return
        place = path.resolve()
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:100]}.")
        os.close(handle)
        beside = Path(name)
        try:
            yield beside
            beside.chmod(0o644)
            beside.replace(place)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        raise MissingToolError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_text(path: Path, text: str, inputs: Iterable[Path] = ()) -> None:
    """Write text to ``path`` (see ``replacing``), unless it is one of ``inputs``."""
    keep_inputs(path, inputs)
    with replacing(path) as beside:
        beside.write_text(text, "utf-8")


def keep_inputs(path: Path, inputs: Iterable[Path]) -> None:
    """Raises InputError when ``path`` is one of the files that are being read."""
    with suppress(OSError):
        if any(each.resolve() == path.resolve() for each in inputs):
            raise InputError(f"{path}: is an input; give another --out")
