"""Strategies that answer failures of data-parallel training, compared from one state."""
