"""Paths on other storage, ``s3://bucket/run`` or ``ssh://host/run``: looked into through fsspec, read after a copy.

Only what finding and copying reports takes; whatever else works on a file works on its copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import unquote

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.run.redact import redact
from nsysk3.run.scratch import Scratch, is_full, no_room

T = TypeVar("T")
# Modules that fsspec's drivers lack, where the package of that name is all it takes.
_PACKAGES = {"s3fs", "gcsfs", "adlfs", "aiohttp", "paramiko", "requests", "webdav4", "huggingface_hub"}
_SCHEME = r"[a-z][a-z0-9+.-]+"
_URL = re.compile(rf"({_SCHEME})://", re.IGNORECASE)
_SLASHLESS = re.compile(rf"((?:{_SCHEME}::)*{_SCHEME}):(?:/|$)", re.IGNORECASE)
_CHAIN = re.compile(rf"(?:{_SCHEME}::)+(?={_SCHEME}://)", re.IGNORECASE)
# Where a URL names no host: the third slash begins the path.
_HOSTLESS = ("file", "local")
# On the web every address is a file to fsspec, and to ask for a folder reads the whole answer: the name must tell.
_WEB = ("http:", "https:")
_FILE_NAME = re.compile(r"\.(nsys-rep|sqlite3?|db|json|toml|parquet|arrow|ipynb|csv|html)$", re.IGNORECASE)


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
        return self._ask(self._exists)

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._named_as(file=True) and self._ask(lambda fs, path: bool(fs.isfile(path)))

    def is_dir(self) -> bool:
        """Whether it is a folder, or begins the names of objects."""
        return self._named_as(file=False) and self._ask(lambda fs, path: bool(fs.isdir(path)))

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

    def _named_as(self, *, file: bool) -> bool:
        """Whether it can be a file, or a folder, by its name."""
        return not self.url.startswith(_WEB) or bool(_FILE_NAME.search(self.name)) is file

    def _exists(self, fs: Any, path: str) -> bool:
        if fs.exists(path):
            return True
        if self.url.startswith(_WEB):  # the same answer where no server answers
            try:
                fs.info(path)
            except FileNotFoundError as error:
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None
        return False

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
            lacks, said = getattr(error.__cause__, "name", None), f"{_first_line(error)}; install it"
            if lacks in _PACKAGES:
                said = f"needs {lacks}: pip install {lacks}"
            raise MissingToolError(f"{self}: {said}, here and on every worker") from error
        except ValueError as error:
            known = self.url.partition(":")[0] in fsspec.available_protocols()
            hint = "" if known else "; there are s3, gs, abfs, ssh, https and others that fsspec has"
            raise InputError(f"{self}: {_first_line(error)}{hint}") from error
        except Exception as error:  # botocore, paramiko, aiohttp: each has errors of its own
            raise OSError(5, f"{type(error).__name__}: {_first_line(error)}") from error


AnyPath = Path | RemotePath


def to_path(given: str | Path | RemotePath) -> AnyPath:
    """The path that an argument names: a URL stays one, ``file://`` is a path of this machine.

    A URL that went through Path has lost a slash (``s3:/bucket``) and is understood all the same, unless a file has
    that very name.  Raises InputError for a URL that names no place, or several in a chain.
    """
    if isinstance(given, RemotePath):
        return given
    text = str(given)
    slashless = _SLASHLESS.match(text) if isinstance(given, Path) else None
    if slashless and not Path(given).exists():
        text = f"{slashless[1]}://{text[slashless.end() :]}"
    chain, found = _CHAIN.match(text), _URL.match(text)
    if chain:
        shown = redact("", text)
        raise InputError(f"{shown}: chained URLs are not read; give the last one alone, {shown[chain.end() :]}")
    if not found:
        return Path(given)
    scheme, rest = found[1].lower(), text[found.end() :]
    if not rest.strip("/") and not (rest and scheme in _HOSTLESS):
        raise InputError(f"{text}: names no place; wanted is {scheme}://{'' if scheme in _HOSTLESS else 'HOST'}/PATH")
    if scheme == "file":
        return Path("/" + unquote(rest).lstrip("/"))
    return RemotePath(f"{scheme}:/{rest}")


@contextmanager
def nearby(path: AnyPath) -> Iterator[Path]:
    """A local file or folder with what ``path`` holds: itself, or a copy that goes when the block ends.

    Raises InputError where it cannot be copied, NoRoomError where the copy cannot be written.
    """
    if isinstance(path, Path):
        yield path
        return
    scratch = Scratch()
    try:
        copy = scratch.path / path.name
        try:
            path.copy_to(copy)
        except OSError as error:
            if is_full(error):
                raise no_room(scratch.path, error) from error
            raise InputError(f"{path}: cannot be copied ({error.strerror or error})") from error
        yield copy
    finally:
        scratch.remove()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
