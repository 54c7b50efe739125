"""Make the pictures of img/ again, with a headless Chromium: ``python docs/pictures.py``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import browser  # noqa: E402 - lies beside the tests that look at pages too

TRACE = ROOT / "fixtures" / "sglang-h200" / "pp2-markers.sqlite"
WIDTH = 1100
# What to show of which page, from the top of the first element to the end of the second.
PICTURES = {
    "budget.png": ("h200-pp1-vs-pp2.html", "#fig-budget", "#fig-budget"),
    "verdict-zh.png": ("kimi-k3-pp1-vs-pp8.html", "body", "#verdict"),
    "budget-zh.png": ("kimi-k3-pp1-vs-pp8.html", "#fig-budget", "#fig-budget"),
    "timeline.png": ("en.html", "#fig-timeline", "#fig-timeline"),
    "timeline-zh.png": ("zh.html", "#fig-timeline", "#fig-timeline"),
}
AREA = """new Promise((done) => document.fonts.ready.then(() => setTimeout(() => {  // once its fonts and figures stand
  const [from, to] = [%r, %r].map((each) => document.querySelector(each).getBoundingClientRect());
  done([Math.max(from.top + scrollY - 12, 0), to.bottom + scrollY + 12]);
}, 500)))"""


def main() -> None:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        for lang in ("en", "zh"):
            words = ["report", TRACE, "--window", "prefill", "--lang", lang, "--out", f"{folder}/{lang}.html", "-q"]
            subprocess.run([sys.executable, "-c", "from nsysk3.cli import main; main()", *words], check=True)
        page.show(WIDTH)
        for name, (source, first, last) in PICTURES.items():
            file = Path(folder) / source
            page.open(file if file.exists() else ROOT / "reports" / source)
            top, bottom = page.ask(AREA % (first, last))
            area = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top}
            page.screenshot(ROOT / "docs" / "img" / name, clip=area)


if __name__ == "__main__":
    main()
