"""A folder for what lies between two steps, that goes with the process that made it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from uuid import uuid4

from nsysk3.errors import MissingToolError

PREFIX = "nsysk3-scratch-"
# Where a worker has its scratch files; None: under the system's folder for temporary files ($TMPDIR).
scratch_under: ContextVar[Path | None] = ContextVar("scratch_under", default=None)
# A folder so young may belong to someone who has yet to lock it.
_YOUNG_S = 60
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class NoRoomError(MissingToolError):
    """Nowhere to write scratch files: the whole run's trouble, whichever report met it."""


class Scratch:
    """A new folder under ``scratch_under``: ``path``.

    It goes by ``remove``, with this object, or when the process ends.  A process that is killed leaves its folder, and
    loses the lock on it: the next Scratch there removes it.  Raises NoRoomError.
    """

    def __init__(self) -> None:
        try:
            # Of a $TMPDIR that cannot be used Python makes /tmp, which may be the small disk that it should not be.
            under = scratch_under.get() or Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
            _sweep(under)
            self.path = under / f"{PREFIX}{uuid4().hex}"
            self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
            self.path.mkdir(mode=0o700, parents=scratch_under.get() is not None)
            lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise no_room(scratch_under.get() or os.environ.get("TMPDIR") or tempfile.tempdir, error) from error
        weakref.finalize(self, os.close, lock)
        with suppress(OSError):  # a file system without locks: nobody will take it for left behind
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def no_room(where: object, error: BaseException) -> NoRoomError:
    """What to say where scratch files cannot be written."""
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
    folder = str(where).partition(f"/{PREFIX}")[0]  # the one that can be another
    return NoRoomError(
        f"{folder}: no room for scratch files ({reason}); set TMPDIR, or a Dask worker's --local-directory, "
        "to a folder with more"
    )


def is_full(error: OSError) -> bool:
    """Whether a file could not be written because of where, not what, it is."""
    return error.errno in _FULL


def to_its_end(what: Callable[[], object]) -> None:
    """Do all of it, also when Ctrl-C comes again meanwhile: that stops the main thread alone, which only waits here."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(what).result()


def _sweep(under: Path) -> None:
    """Remove what killed processes of this user left."""
    for left in under.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another's, gone, or in use
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
