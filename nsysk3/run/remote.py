"""Paths on other storage, ``s3://bucket/run`` or ``ssh://host/run``: looked into through fsspec, read after a copy.

Only what finding and copying reports takes; whatever else works on a file works on its copy.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import unquote

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.run.redact import redact

T = TypeVar("T")
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# Where a URL names no host: the third slash begins the path.
_HOSTLESS = ("file", "local")


class RemotePath(PurePosixPath):
    """A file or folder on storage that fsspec knows, with those methods of a Path that need no local file.

    Errors of any storage are OSErrors here, but for a missing driver (MissingToolError) and a scheme that nobody knows
    (InputError).
    """

    @property
    def url(self) -> str:
        """What fsspec is asked for; it may hold a password."""
        text = super().__str__()
        scheme, mark, rest = text.partition(":/")
        if not mark:  # relative to another
            return text
        return f"{scheme}://{'/' if scheme in _HOSTLESS else ''}{rest}"

    def __str__(self) -> str:
        return redact("", self.url)

    def exists(self) -> bool:
        """Whether there is anything of that name."""
        return self._ask(lambda fs, path: bool(fs.exists(path)))

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._ask(lambda fs, path: bool(fs.isfile(path)))

    def is_dir(self) -> bool:
        """Whether it is a folder, or begins the names of objects."""
        return self._ask(lambda fs, path: bool(fs.isdir(path)))

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies in a folder."""
        names = self._ask(lambda fs, path: [entry["name"] for entry in fs.ls(path, detail=True)])
        yield from (self / PurePosixPath(name.rstrip("/")).name for name in names)

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What in a folder has such a name."""
        return (child for child in self.iterdir() if child.match(pattern))

    def stat(self) -> SimpleNamespace:
        """``st_mtime`` (s since 1970, 0 where the storage does not say) and ``st_size``."""
        found = self._ask(lambda fs, path: dict(fs.info(path)))
        when = next((found[key] for key in ("mtime", "LastModified", "last_modified", "updated") if found.get(key)), 0)
        stamp = when.timestamp() if hasattr(when, "timestamp") else when
        return SimpleNamespace(st_mtime=stamp if isinstance(stamp, int | float) else 0, st_size=found.get("size") or 0)

    def resolve(self) -> RemotePath:
        """Itself: links are the storage's business."""
        return self

    def absolute(self) -> RemotePath:
        """Itself."""
        return self

    def read_text(self, encoding: str) -> str:
        """A small file."""
        return self._ask(lambda fs, path: bytes(fs.cat_file(path))).decode(encoding)

    def copy_to(self, place: Path) -> None:
        """Copy a file or a folder of files to a local place."""
        folder = self.is_dir()
        self._ask(lambda fs, path: fs.get(f"{path.rstrip('/')}/" if folder else path, str(place), recursive=folder))

    def _ask(self, what: Callable[[Any, str], T]) -> T:
        try:
            import fsspec
        except ImportError as error:
            raise MissingToolError(f"{self}: URLs need fsspec: pip install 'nsysk3[scale]'") from error
        try:
            fs, path = fsspec.url_to_fs(self.url)
            return what(fs, path)
        except (OSError, NsysK3Error) as error:
            if isinstance(error, OSError) and not error.strerror:  # fsspec's own have a text only
                error.strerror = _first_line(error)
            raise
        except ImportError as error:
            raise MissingToolError(f"{self}: {_first_line(error)}; install it here and on every worker") from error
        except ValueError as error:
            raise InputError(f"{self}: {_first_line(error)}") from error
        except Exception as error:  # botocore, paramiko, aiohttp: each has errors of its own
            raise OSError(5, f"{type(error).__name__}: {_first_line(error)}") from error


AnyPath = Path | RemotePath


def to_path(given: str | Path | RemotePath) -> AnyPath:
    """The path that an argument names: a URL stays one, ``file://`` is a path of this machine.

    A URL that went through Path has lost a slash (``s3:/bucket``) and is understood all the same, unless a file has
    that very name.
    """
    if isinstance(given, RemotePath):
        return given
    text = str(given)
    slashless = re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", text) if isinstance(given, Path) else None
    if slashless and not Path(given).exists():
        text = f"{slashless[1]}://{text[slashless.end() :]}"
    found = _URL.match(text)
    if not found:
        return Path(given)
    if found[1].lower() == "file":
        return Path("/" + unquote(text[found.end() :]).lstrip("/"))
    return RemotePath(found[1].lower() + ":/" + text[found.end() :])


@contextmanager
def nearby(path: AnyPath, scratch: Path | None = None) -> Iterator[Path]:
    """A local file or folder with what ``path`` holds: itself, or a copy that goes when the block ends."""
    if isinstance(path, Path):
        yield path
        return
    folder = Path(tempfile.mkdtemp(prefix="nsysk3-copy-", dir=scratch))
    try:
        try:
            path.copy_to(folder / path.name)
        except OSError as error:
            raise InputError(f"{path}: cannot be copied ({error.strerror or error})") from error
        yield folder / path.name
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
