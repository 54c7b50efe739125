"""Plans of four hosts with eight GPUs each, and where the examples are."""

from __future__ import annotations

from typing import Any

from conftest import ROOT

from nsysk3.launch.plan import Plan, make_plan
from nsysk3.run.config import Settings

EXAMPLES = ROOT / "nsysk3" / "launch" / "examples"


def configured(**sections: Any) -> Settings:
    """Settings of four hosts with eight GPUs each, and what a test changes in them."""
    document: dict[str, Any] = {
        "cluster": {"hosts": ["n1", "n2", "n3", "n4"], "gpus_per_host": 8}, "model": {"path": "/models/k3"},
    }  # fmt: skip
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    return Settings.model_validate(document)


def planned(pp: int = 8, *args: str, **sections: Any) -> Plan:
    """The plan for that, with SGLang's arguments ``args``."""
    return make_plan(configured(**sections), pp=pp, run_id="r1", extra_args=args)
