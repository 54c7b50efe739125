"""Steps over many reports: in this process, in several of this machine, or on a Dask cluster."""
