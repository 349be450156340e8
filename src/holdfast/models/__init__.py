"""Models that ship with Holdfast, each built as an ordered list of layers."""
