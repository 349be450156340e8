"""Trackers: what ``holdfast track`` tells a run to, while it goes on and afterwards."""
