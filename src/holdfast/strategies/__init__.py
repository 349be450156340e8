"""Strategies: what a job does about a loss; each is a row in a file of its own."""
