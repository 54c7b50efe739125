"""Figures as SVG text.  Drawing scales what a result holds; it makes no number."""
