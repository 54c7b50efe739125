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
from typing import Annotated, NoReturn

import typer

from nsysk3 import __version__
from nsysk3.cli.analyze import analyze
from nsysk3.cli.cleanup import cleanup
from nsysk3.cli.compare import compare
from nsysk3.cli.demo import demo
from nsysk3.cli.doctor import doctor
from nsysk3.cli.export import export
from nsysk3.cli.export_trace import export_trace
from nsysk3.cli.layers import layers
from nsysk3.cli.nccl_bench import nccl_bench
from nsysk3.cli.open_run import open_run
from nsysk3.cli.profile import profile
from nsysk3.cli.progress import is_verbose, verbosely
from nsysk3.cli.recipes import recipes_app
from nsysk3.cli.report import report
from nsysk3.cli.rules import rules_app
from nsysk3.cli.simulate import simulate
from nsysk3.cli.sweep import sweep, sweep_app
from nsysk3.cli.usage import ClickError, UsageError, explain
from nsysk3.errors import InterruptedRunError, NsysK3Error
from nsysk3.report.text import clean

app = typer.Typer(
    name="nsysk3",
    help="Where each GPU's time went in a prefill window, from Nsight Systems traces.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: half the start-up time, and it pipes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(verbosely(analyze))
app.command()(verbosely(compare))
app.command()(verbosely(report))
app.command("open")(verbosely(open_run))
app.command()(verbosely(layers))
app.command()(verbosely(export))
app.command()(verbosely(export_trace))
app.command()(verbosely(profile))
app.command()(verbosely(nccl_bench))
app.command()(verbosely(cleanup))
app.command()(verbosely(doctor))
app.command()(verbosely(simulate))
app.command()(verbosely(demo))
sweep_app.callback()(verbosely(sweep))
app.add_typer(sweep_app, name="sweep")
app.add_typer(rules_app, name="rules")
app.add_typer(recipes_app, name="recipes")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a bar that the terminal's encoding lacks is no reason to fail
            stream.reconfigure(errors="replace")
    try:
        code = app(prog_name="nsysk3", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as stop:
        if _reader_left(stop):
            _die_of_broken_pipe()
        raise
    except BrokenPipeError:
        _die_of_broken_pipe()
    except NsysK3Error as error:
        _fail(str(error), error.exit_code)
    except UsageError as error:
        print("\n".join(clean(line, 4000) for line in explain(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    except ClickError as error:
        _fail(str(error), 2)
    except (_StoppedError, typer.Abort):
        _fail("interrupted", InterruptedRunError.exit_code)
    except MemoryError:
        _fail("out of memory; analyse fewer reports at once or a shorter --window", 3)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            _fail(f"the output cannot be written ({error.strerror})", 3)
        if os.environ.get("NSYSK3_DEBUG") or is_verbose():
            raise
        detail = " ".join(str(error).split())[:300]
        _fail(f"internal error, please report it ({type(error).__name__}: {detail}); --verbose shows where", 70)
    _be_deaf()
    sys.exit(code if isinstance(code, int) else 0)


def _be_deaf() -> None:
    """All is done: Ctrl-C now, or once more, changes neither the last word nor the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _fail(text: str, code: int) -> NoReturn:
    _be_deaf()
    if code == InterruptedRunError.exit_code:
        sys.unraisablehook = _say_nothing
    print(f"nsysk3: {clean(' '.join(text.split()), 4000)}", file=sys.stderr)
    sys.exit(code)


def _say_nothing(_: sys.UnraisableHookArgs) -> None:
    """An object that Ctrl-C left half made, such as an event loop, may fail as it goes: nobody's business."""


def _reader_left(stop: BaseException | None) -> bool:
    """Whether typer or rich ended the command because whoever reads its output did."""
    while stop is not None:
        if isinstance(stop, BrokenPipeError):
            return True
        stop = stop.__context__
    return False


def _die_of_broken_pipe() -> NoReturn:
    """End as any Unix tool does when its reader (head, less) went away, not with the exit code of a failed gate.

    Only now: while hosts are talked to, a broken pipe is an error like others and must not end the command.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    sys.exit(128 + signal.SIGPIPE)


class _StoppedError(BaseException):
    """Ctrl-C, or a request to end.  Not KeyboardInterrupt: typer would take that for itself and say nothing."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Let the command clean up as it unwinds; one that does so already has more to say than "interrupted"."""
    if not isinstance(sys.exception(), InterruptedRunError):
        raise _StoppedError
