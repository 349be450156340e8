"""Decisions in order: a chain of numbered entries, each put once, and whoever puts the next one leads.

Whichever store keeps it, a chain has one promise: of all that are put under a number, one is there, for ever. A
coordinator that takes over puts an entry of its own first; the one before it learns from its next entry, whose number
is taken then, that it does not lead any more. So no lease is needed for safety: signs of life only tell others when to
try (see ``leading``).
"""
