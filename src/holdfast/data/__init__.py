"""Map-style datasets and the pure choice of samples for a micro-batch."""
