"""Holdfast trains PyTorch models on a grid of workers and keeps training, bitwise exactly, while workers die."""

from holdfast.config.job import Job
from holdfast.config.load import load_job, parse_job
from holdfast.config.profiles import load_profile
from holdfast.core.faults import Fault
from holdfast.runtime.train import Summary, train

__all__ = ["Fault", "Job", "Summary", "__version__", "load_job", "load_profile", "parse_job", "train"]

__version__ = "0.1.0"
