"""The values that everything else speaks: ids, placements, routes, orders, plans, and what times and proves them.

Pure: no torch, no input or output, no clock, no randomness. Every value is frozen and travels through msgspec.
"""
