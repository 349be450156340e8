"""Training for real: processes, stages, transports."""
