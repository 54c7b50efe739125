"""Renderers of results; nothing here computes."""
