"""``python -m nsysk3``, and what the ``nsysk3`` script calls."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Import and run the command line; Ctrl-C while it imports ends it, for there is nothing yet to clean up."""
    signal.signal(signal.SIGINT, _interrupted)
    from nsysk3.cli import main as run

    run()


def _interrupted(*_: object) -> None:
    os.write(2, b"nsysk3: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
