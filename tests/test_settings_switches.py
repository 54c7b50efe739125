"""Settings that are written as a switch and are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsysk3.errors import InputError
from nsysk3.run.config import load_settings

NUMBERS = ["analyze.workers", "cluster.gpus_per_host", "load.request_timeout_s", "model.path"]


@pytest.mark.parametrize("setting", NUMBERS)
def test_a_switch_is_no_number(setting: str, tmp_path: Path) -> None:
    section, name = setting.split(".")
    path = tmp_path / "nsysk3.toml"
    path.write_text(f"[{section}]\n{name} = true\n")
    with pytest.raises(InputError, match=f"{setting}: takes neither true nor false$"):
        load_settings(path)
    path.write_text("[server]\nmarkers = false\n[analyze]\ncache = true\nworkers = 2\n")
    settings = load_settings(path)
    assert (settings.server.markers, settings.analyze.cache, settings.analyze.workers) == (False, True, 2)
