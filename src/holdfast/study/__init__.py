"""Strategies of data-parallel training that leave other weights, compared from one state."""
