"""Nsight Systems exports as typed polars frames."""
