"""All the machines of a run at once: reached together, and ended together whatever is pressed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nsysk3.errors import InputError, NsysK3Error
from nsysk3.launch.hosts import Host
from nsysk3.run.config import Settings


@contextmanager
def open_hosts(settings: Settings, run_id: str, names: Sequence[str]) -> Iterator[list[Host]]:
    """Reach hosts, all at once, and end everything of the run on all of them in the end.

    Ctrl-C ends it in order, a second Ctrl-C at once.
    """
    if len(set(names)) < len(names):
        raise InputError(f"hosts: {', '.join(names)}: each may be named once")
    cli = [settings.container.cli] if settings.container.cli else []
    hosts: list[Host] = []
    presses = 0
    try:
        for name in names:
            hosts.append(Host(settings.cluster, name, run_id, cli))
        failed = _for_all(hosts, Host.connect)
        if failed:
            raise type(failed[0])("; ".join(str(error) for error in failed))
        yield hosts
    except (KeyboardInterrupt, SystemExit):
        presses = 1
        raise
    finally:
        _close_all(hosts, presses)


def _for_all(hosts: Sequence[Host], work: Callable[[Host], object]) -> list[NsysK3Error]:
    """Do something with every host at once; gives what went wrong, in the order of the hosts."""
    failed: dict[int, NsysK3Error] = {}

    def attempt(index: int) -> None:
        try:
            work(hosts[index])
        except NsysK3Error as error:
            failed[index] = error

    for thread in [_in_thread(attempt, index) for index in range(len(hosts))]:
        thread.join()
    return [failed[index] for index in sorted(failed)]


def _close_all(hosts: Sequence[Host], presses: int) -> None:
    """Close all hosts whatever is pressed meanwhile; ``presses``: how often Ctrl-C was pressed before."""
    threads = [_in_thread(host.close, False) for host in hosts]
    pressed = 0
    while any(thread.is_alive() for thread in threads):
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            pressed += 1
            if presses + pressed == 2:
                threads += [_in_thread(host.close, True) for host in hosts]
    if pressed:
        raise KeyboardInterrupt


def _in_thread(work: Callable[[Any], object], given: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=(given,), daemon=True)
    thread.start()
    return thread
