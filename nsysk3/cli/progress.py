"""What a command says on stderr while it works: a status line where somebody watches, lines where ``--verbose``."""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_type_hints

import typer

# For the whole command; --verbose sets it.
_verbose = False
_LINE_S, _REPEAT_S = 0.2, 5.0  # between lines at least; between two of the same step

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Every step as a line with its time; where an internal error arose.")
]


def be_verbose(wanted: bool) -> None:
    """Say what goes on in lines, from now on."""
    global _verbose
    _verbose = wanted


def is_verbose() -> bool:
    """Whether ``--verbose`` was given."""
    return _verbose


def verbosely(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with ``--verbose``, last of its options."""

    @functools.wraps(command)
    def with_verbosity(*args: Any, verbose: bool = False, **kwargs: Any) -> Any:
        if verbose and kwargs.get("quiet"):
            raise typer.BadParameter("--quiet and --verbose: one or the other")
        be_verbose(verbose)
        if not kwargs.get("quiet"):
            _warn_of_variables()
        return command(*args, **kwargs)

    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    named = [each.replace(annotation=hints[name]) for name, each in signature.parameters.items()]
    option = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
    with_verbosity.__annotations__ = {**hints, "verbose": Verbose}
    with_verbosity.__signature__ = signature.replace(parameters=[*named, option])  # type: ignore[attr-defined]
    return with_verbosity


def _warn_of_variables() -> None:
    """Name the variables that were meant for nsysk3, and do nothing."""
    if any(name.startswith("NSYSK3_") for name in os.environ):
        from nsysk3.run.config import ignored_variables

        for warning in ignored_variables(os.environ):
            typer.echo(f"nsysk3: {warning}", err=True)


@contextmanager
def status(quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
    """Give a function that shows one line of progress, or None where nobody would see it."""
    from rich.console import Console
    from rich.text import Text

    # The handler that polars puts before ours lets the system restart a blocked read: Ctrl-C while nsys is silent would
    # wait for its next word.
    signal.siginterrupt(signal.SIGINT, True)
    if _verbose:
        yield _steps(teller())
        return
    err = Console(stderr=True)
    if quiet or not err.is_terminal:
        yield None
        return
    with err.status("") as line:
        yield lambda text: line.update(Text(text))


def teller(quiet: bool = False) -> Callable[[str], None]:
    """Give a function that prints a line to stderr with the seconds since now, or nothing where ``quiet``."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:7.1f} s] {text}", file=sys.stderr, flush=True)

    return (lambda _: None) if quiet else say


def _steps(say: Callable[[str], None]) -> Callable[[str], None]:
    """Progress as lines, a few a second at most: new steps, and now and then how far one is that takes long."""
    last, told = "", 0.0

    def step(text: str) -> None:
        nonlocal last, told
        what, now = re.sub(r"\d+ ?%", "", text), time.monotonic()
        if now - told > (_LINE_S if what != last else _REPEAT_S):
            last, told = what, now
            say(text)

    return step
