"""An SGLang plugin that puts nsysk3's own markers into a trace, and its kernels into Kimi-K3.

Installed as the entry point ``nsysk3 = "nsysk3.plugin:register"`` of the group ``sglang.srt.plugins``, and off unless
``NSYSK3_MARKERS=1`` (the markers) or ``NSYSK3_SP=1`` (the kernels: nsysk3.plugin.sp).  It needs nothing but the
standard library and the torch that SGLang brings, so nsysk3 can be installed beside SGLang without its other
requirements.  What it marks (see docs/metrics.md, sections 1, 2 and 8):

* ``nsysk3.rank world=3/8 pp=1/2 tp=1/4 ep=0/1 device=3 ... nsysk3=0.1.0 markers=...``, a mark with every forward;
* ``nsysk3.prefill_window``, from the start of the capture to its stop on this rank;
* ``nsysk3.forward 12 mb=3 stage=1 mode=extend reqs=1 tokens=8192`` around every batch, 12 being SGLang's forward count;
* ``nsysk3.layer 17 attn=mla mlp=moe`` around every decoder layer, and module paths around what is inside;
* ``pp.send forward=12 mb=3 bytes=...`` and ``pp.recv ...`` at the pipeline's boundary.
"""

from __future__ import annotations

import os

SWITCH = "NSYSK3_MARKERS"
SP_SWITCH = "NSYSK3_SP"


def register() -> None:
    """Register the hooks with SGLang; called once by each SGLang process, and never raises."""
    markers, kernels = os.environ.get(SWITCH) == "1", os.environ.get(SP_SWITCH, "0") not in ("", "0", "off")
    if not markers and not kernels:
        return
    from nsysk3.plugin.entry import register_hooks  # nothing of it is loaded while the plugin is off

    register_hooks(markers, kernels)
