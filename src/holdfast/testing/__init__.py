"""Public test tools: simulated cluster, in-memory transport, oracles."""
