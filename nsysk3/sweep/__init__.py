"""The PP x concurrency experiment: its matrix, its runs, its tables, the knee."""
