"""Lies beside the target that imports it, as people's helpers do."""

CLASSES = 5
