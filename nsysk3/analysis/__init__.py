"""Pure functions from trace frames to the numbers of docs/metrics.md."""
