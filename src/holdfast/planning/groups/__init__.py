"""Selective logging: which machines of a pipeline are recovered together, so that what is logged fits a limit."""
