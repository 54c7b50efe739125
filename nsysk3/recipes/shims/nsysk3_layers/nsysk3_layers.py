"""``nsys recipe nsysk3_layers``."""

# mypy: disable-error-code="import-not-found,misc"
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
import nsysk3_shim


class Layers(nsysk3_shim.Shim):
    """What metadata.json says; nsysk3 does it."""
