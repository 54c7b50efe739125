"""The command line: parse, call, print.

Commands import what they need when they run, so that ``nsysk3 --help`` answers at once.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from nsysk3 import __version__
from nsysk3.cli.analyze import analyze
from nsysk3.cli.compare import compare
from nsysk3.cli.demo import demo
from nsysk3.cli.export import export
from nsysk3.cli.export_trace import export_trace
from nsysk3.cli.layers import layers
from nsysk3.cli.report import report
from nsysk3.cli.rules import rules_app
from nsysk3.cli.simulate import simulate
from nsysk3.errors import NsysK3Error
from nsysk3.report.text import clean

app = typer.Typer(
    name="nsysk3",
    help="Where each GPU's time went in a prefill window, from Nsight Systems traces.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: half the start-up time, and it pipes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(analyze)
app.command()(compare)
app.command()(export)
app.command()(export_trace)
app.command()(report)
app.command()(layers)
app.command()(simulate)
app.command()(demo)
app.add_typer(rules_app, name="rules")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nsysk3 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Where each GPU's time went in a prefill window, from Nsight Systems traces."""


def main() -> None:
    """Run the command line; every foreseen error is one line on stderr and an exit code."""
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    # The reader (head, less) went away: end as any Unix tool does, not with the exit code of a failed gate.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a bar that the terminal's encoding lacks is no reason to fail
            stream.reconfigure(errors="replace")
    try:
        app()
    except NsysK3Error as error:
        _fail(str(error), error.exit_code)
    except _StoppedError:
        _fail("interrupted", 130)
    except MemoryError:
        _fail("out of memory; analyse fewer reports at once or a shorter --window", 3)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            _fail(f"the output cannot be written ({error.strerror})", 3)
        if os.environ.get("NSYSK3_DEBUG"):
            raise
        detail = " ".join(str(error).split())[:300]
        _fail(f"internal error, please report it ({type(error).__name__}: {detail}); NSYSK3_DEBUG=1 shows where", 70)


def _fail(text: str, code: int) -> None:
    print(f"nsysk3: {clean(' '.join(text.split()), 4000)}", file=sys.stderr)
    sys.exit(code)


class _StoppedError(BaseException):
    """Ctrl-C, or a request to end.  Not KeyboardInterrupt: typer would take that for itself and say nothing."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Let the command clean up as it unwinds."""
    raise _StoppedError
