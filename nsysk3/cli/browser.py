"""Show a page to whoever sits at this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Without one of these a Linux has no desktop, and what would open is a browser of text in this very terminal.
_DESKTOPS = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME")


def show(page: Path) -> bool:
    """Show a page in the browser; False where none can be opened: over ssh, in a container."""
    import webbrowser

    if sys.platform == "linux" and not any(os.environ.get(name) for name in _DESKTOPS):
        return False
    try:
        return webbrowser.open(page.absolute().as_uri())
    except (OSError, webbrowser.Error):
        return False
