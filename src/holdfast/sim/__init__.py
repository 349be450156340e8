"""Whole jobs in virtual time: what happens to machines, and what becomes of a job by each strategy."""
