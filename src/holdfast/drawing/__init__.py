"""Draws schedules and runs: as text for a terminal, as SVG for a browser, as a trace for https://ui.perfetto.dev.

What is drawn is a value, and what comes out is text. What the pictures share is in :mod:`~holdfast.drawing.svg` and
:mod:`~holdfast.drawing.axis`, what the traces share in :mod:`~holdfast.drawing.trace_events`.
"""
