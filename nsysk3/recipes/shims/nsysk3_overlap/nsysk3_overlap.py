"""``nsys recipe nsysk3_overlap``."""

# mypy: disable-error-code="import-not-found,misc"
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
import nsysk3_shim


class Overlap(nsysk3_shim.Shim):
    """What metadata.json says; nsysk3 does it."""
