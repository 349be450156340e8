"""Membership, the coordinator and its messages."""
