"""Scheduled faults: put around the ports of a job that is built to be struck; no other job has anything of it."""
