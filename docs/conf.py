"""How these pages become a site: `make site`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

project = "Holdfast"
author = copyright = "the authors of Holdfast"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["monitoring"]
html_theme = "furo"
html_title = "Holdfast"
html_show_sphinx = False
html_static_path: list[str] = []
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"

_LINK = re.compile(r"\[([^\]\[]+)\]\(([^):#\s]+)[^)\s]*\)")


def _within(app: Any, name: str, source: list[str]) -> None:
    """A site has only these pages: a folder, or a page elsewhere in the repository, is told by its name.

    Nor does it load anything from elsewhere: diagrams are shown as they are written.
    """

    def told(link: re.Match[str]) -> str:
        target = (Path(app.srcdir, name).parent / link[2]).resolve()
        beyond = target.is_dir() or (target.suffix == ".md" and not target.is_relative_to(app.srcdir))
        return f"{link[1]} (`{target.relative_to(Path(app.srcdir).parent)}`)" if beyond else link[0]

    source[0] = _LINK.sub(told, source[0]).replace("```mermaid", "```text")


def setup(app: Any) -> None:
    """See Sphinx."""
    app.connect("source-read", _within)
