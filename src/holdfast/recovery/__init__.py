"""Strategies and the actions that recoveries consist of."""
