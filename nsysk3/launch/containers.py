"""The command that puts a server into a container."""

from __future__ import annotations

from collections.abc import Iterable

from nsysk3.errors import InputError
from nsysk3.run.config import Container

# Set by the keeper for all that it starts; inside they mark the processes as the run's.
MARKS = ("NSYSK3_RUN", "NSYSK3_KEEPER")


def container_command(
    container: Container, *, name: str, run_id: str, env_names: Iterable[str], scratch: str
) -> list[str]:
    """What goes in front of a server's command so that it runs in a container, and in the foreground.

    Variables are handed on by name: their values stay in the environment of docker or podman, off every command line.
    The scratch folder has the same path inside.  Nothing is pulled.  Raises InputError where settings are missing.
    """
    if container.cli is None or container.image is None:
        raise InputError("container: cli and image must both be set")
    variables = dict.fromkeys((*MARKS, *env_names))
    return [
        container.cli,
        "run",
        "--rm",
        "--pull=never",
        f"--name={name}",
        f"--label=nsysk3.run={run_id}",
        f"--volume={scratch}:{scratch}",
        f"--workdir={scratch}",
        *(f"--env={variable}" for variable in variables),
        *container.options,
        container.image,
    ]
