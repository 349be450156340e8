"""The job file: the only parser."""
