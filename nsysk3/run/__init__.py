"""Run directories and the traces in them."""
