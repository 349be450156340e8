"""Exact solvers, each run in a process of its own under a time limit; they need the extra ``solver``."""
