"""In which order workers run their operations: builders, list schedulers, when each operation starts, and lower bounds.

Pure: no torch, no input or output, no clock, no randomness.
"""
