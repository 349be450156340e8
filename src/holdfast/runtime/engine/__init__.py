"""What computes: layers, their gradients in two halves, their updates; and what stands in for it."""
