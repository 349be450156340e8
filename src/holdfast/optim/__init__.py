"""Order-invariant gradient sums, double-buffered optimizers, and digests and files of layer states."""
