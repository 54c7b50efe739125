"""Simulated runs whose true waits, clocks and layers are known, at the scale of a real cluster."""
