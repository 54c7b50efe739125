"""``python -m nsysk3``, and what the ``nsysk3`` script calls."""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """Import and run the command line; Ctrl-C while it imports ends it, for there is nothing yet to clean up."""
    signal.signal(signal.SIGINT, _interrupted)
    sys.unraisablehook = _press_again
    from nsysk3.cli import main as run

    run()


def _interrupted(*_: object) -> None:
    os.write(2, b"nsysk3: interrupted\n")
    os._exit(130)


def _press_again(lost: sys.UnraisableHookArgs) -> None:
    """Ctrl-C in a callback of Python's own, such as one of an import, where it goes nowhere: it comes again."""
    if issubclass(lost.exc_type, (Exception, SystemExit, GeneratorExit)):
        sys.__unraisablehook__(lost)
        return
    again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()


if __name__ == "__main__":
    main()
