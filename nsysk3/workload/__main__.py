"""``python -m nsysk3.workload``: the launcher of one node of a K3-shaped torch server."""

from __future__ import annotations

import logging
import sys

from nsysk3.errors import NsysK3Error
from nsysk3.workload.launcher import launch
from nsysk3.workload.options import parse

LOG_FORMAT = "[%(asctime)s] %(message)s"


def main() -> int:
    """Serve until told to stop; errors are one line."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr)
    try:
        return launch(parse(sys.argv[1:]), sys.argv[1:])
    except NsysK3Error as error:
        print(f"nsysk3.workload: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
