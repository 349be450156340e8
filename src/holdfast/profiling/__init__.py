"""Measures a job: what each layer costs, and what a message costs."""
