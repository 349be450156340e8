"""Computes the profiles of GPT-3 Medium, 3.35B and 6.7B on an A100-80GB from operations and bytes; see README.md.

    python profiles/estimate.py

writes the three JSON files beside it.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.config.profiles import save_profile
from holdfast.reproduce.gpt3 import SHAPES, estimate


def main() -> None:
    """Writes the files."""
    for shape in SHAPES:
        save_profile(estimate(shape), Path(__file__).with_name(f"{shape.name}.json"))


if __name__ == "__main__":
    main()
