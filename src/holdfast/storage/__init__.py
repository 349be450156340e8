"""Checkpoints and the stores that they are kept in; knows neither torch nor gRPC."""
