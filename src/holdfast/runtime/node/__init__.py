"""One machine: its agent, the processes that it starts, and the networks that they are in."""
