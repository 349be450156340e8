"""Texts that are meant for URLs and are none: each would be the name of a folder, here, that nobody looks into."""

from __future__ import annotations

import re

from holdfast.errors import ConfigError

__all__ = ["refuse_mistyped"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
_NEARLY = re.compile(
    r"\s*(?P<scheme>s3|file)\s*(?:[:;]|[.,]?(?=//))(?P<slashes>/*)(?P<rest>.*)", re.DOTALL | re.IGNORECASE
)


def refuse_mistyped(text: str, what: str = "") -> None:
    """Refuses what looks like a URL of a place for blobs and is none.

    Args:
        text: a folder or a URL.
        what: names the key before the text, such as ``checkpoint.url: ``.

    Raises:
        ConfigError: it is neither; says what was probably meant.

    >>> refuse_mistyped("s3//bucket/x")
    Traceback (most recent call last):
    holdfast.errors.ConfigError: s3//bucket/x: is no URL; expected s3://bucket/x, or ./s3//bucket/x for a folder
    """
    if _URL.fullmatch(text):
        return
    if nearly := _NEARLY.fullmatch(text):
        scheme = nearly["scheme"].lower()
        root = "/" if scheme == "file" and nearly["slashes"] else ""
        meant = f"{scheme}://{root}{nearly['rest']}"
        raise ConfigError(f"{what}{text}: is no URL; expected {meant}, or ./{text} for a folder")
    if "://" in text:
        raise ConfigError(f"{what}{text}: is no URL; expected a folder, file://PATH or s3://BUCKET/PREFIX")
