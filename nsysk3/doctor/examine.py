"""All of the doctor: settings, this machine, the hosts, and what follows from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from nsysk3 import __version__
from nsysk3.doctor.here import look_here
from nsysk3.doctor.hosts import Looked, look_at_hosts
from nsysk3.doctor.lines import HERE, Ability, Diagnosis, Line, cannot
from nsysk3.errors import NsysK3Error
from nsysk3.launch.request import read_hosts, with_allocation
from nsysk3.launch.transport import is_this_machine
from nsysk3.run.config import CONFIG_NAME, Settings, load_settings

# A sweep's servers run without nsys.
_ONLY_PROFILE = ("nsys",)


def examine(config: Path | None, hosts: str | None, say: Callable[[str], None]) -> Diagnosis:
    """Look at everything; raises InputError for ``hosts`` that name none, never for what it finds.

    ``config``, ``hosts``: as on the command line of profile.  ``say`` is told what is being waited for.
    """
    say("looking at this machine")
    settings, wrong = _settings(config, read_hosts(hosts))
    here = [_self(), wrong or Line(HERE, "settings", "ok", _source(config)), *look_here()]
    looked = look_at_hosts(settings, say)
    there = [_hinted(line, settings) for line in looked.lines]
    profile = list(_profile(settings, there, looked.layout))
    abilities = (*_reading(here), *profile, _sweep(there, looked.layout), _kernels(looked))
    failed = [f"--config {config}: {wrong.text}"] if config is not None and wrong else []
    if (config is not None or hosts is not None) and not any(each.works for each in profile):
        failed.append(f"profile on {shortened(settings.cluster.hosts)}")
    return Diagnosis((*here, *there), abilities, looked.clocks, tuple(failed))


def _settings(config: Path | None, hosts: list[str] | None) -> tuple[Settings, Line | None]:
    """The settings; where they are wrong the defaults and what is wrong, for the rest can still be looked at."""
    try:
        return with_allocation(load_settings(config, overrides={"cluster.hosts": hosts})), None
    except NsysK3Error as error:
        fallback = load_settings(Path(os.devnull), overrides={"cluster.hosts": hosts}, environ={})
        return fallback, Line(HERE, "settings", "cannot", str(error), "below are the defaults")


def _source(config: Path | None) -> str:
    """Where the settings are from."""
    named = config or os.environ.get("NSYSK3_CONFIG") or (CONFIG_NAME if Path(CONFIG_NAME).is_file() else None)
    return str(named) if named else f"defaults: no {CONFIG_NAME} here"


def _self() -> Line:
    version = ".".join(map(str, sys.version_info[:3]))
    return Line(HERE, "nsysk3", "ok", f"{__version__}, Python {version}, {sys.executable}")


def _hinted(line: Line, settings: Settings) -> Line:
    """Where this very Python has the SGLang that the server's Python lacks, that is the way out."""
    lacks = line.name == "server" and line.state == "cannot" and is_this_machine(line.where)
    if lacks and settings.server.engine == "sglang" and find_spec("sglang"):
        return replace(line, fix=f"set server.python to {sys.executable}, which has it")
    return line


def _reading(here: list[Line]) -> Iterator[Ability]:
    missing = cannot(here, "packages")
    text = missing[0].text if missing else "reports and exports of Nsight Systems, compare, report, simulate"
    yield Ability("analyze", not missing, text)
    (nsys,) = (line for line in here if line.name == "nsys export")
    yield Ability("export", nsys.state != "cannot", nsys.brief or nsys.text)


def _profile(settings: Settings, there: list[Line], layout: str | None) -> Iterator[Ability]:
    names = settings.cluster.hosts
    here = len(names) == 1 and is_this_machine(names[0])
    works, text = _can_serve(there, layout)
    if here:
        yield Ability("profile here", works, text)
        yield Ability("profile on hosts", None, f"none named: --hosts a,b or cluster.hosts in {CONFIG_NAME}")
    else:
        yield Ability("profile here", None, "not looked at: nsysk3 doctor --hosts localhost")
        yield Ability("profile on hosts", works, f"{shortened(names)}: {text}")


def _can_serve(lines: list[Line], layout: str | None) -> tuple[bool, str]:
    """Whether a server can be started, with the options of one that could, or why not."""
    against = cannot(lines)
    if against:
        hosts = len({line.where for line in lines})
        reasons: dict[str, list[str]] = {}
        for line in against:
            reasons.setdefault(f"{line.name} {line.brief}".strip(), []).append(line.where)
        said = (each + (f" ({shortened(where)})" if len(where) < hosts else "") for each, where in reasons.items())
        return False, f"{', '.join(said)}: see above"
    return layout is not None, f"such as {layout}" if layout else "no layout fits"


def _sweep(there: list[Line], layout: str | None) -> Ability:
    works, text = _can_serve([line for line in there if line.name not in _ONLY_PROFILE], layout)
    same = text == _can_serve(there, layout)[1]
    return Ability("sweep", works, "as profile, without nsys" if works else "as profile" if same else text)


def _kernels(looked: Looked) -> Ability:
    why = next((f"{host}: {each}" for host, each in looked.kernels.items() if each), None)
    if not looked.kernels:
        return Ability("kernels", False, "no host could be asked")
    return Ability("kernels", why is None, why or "--sp nsysk3 with CUDA kernels")


def shortened(names: Sequence[str]) -> str:
    """Hosts in a few words."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]} ({len(names)})"
