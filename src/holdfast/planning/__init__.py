"""Finds plans: balanced stages, failures moved to where they cost least, and schedules near the physical limit.

Pure functions of frozen values, but for two modules: :mod:`~holdfast.planning.library` keeps plans in a folder, and
:mod:`~holdfast.planning.solvers.process` runs a solver in a process of its own.
"""
