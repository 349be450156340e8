"""How a job begins on this machine, and what is left to do at its end."""
