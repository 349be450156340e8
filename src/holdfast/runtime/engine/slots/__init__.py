"""A module as layers: cut at the list of its blocks, by slots in its own forward pass."""
