"""Imported once, behind :mod:`holdfast.runtime.preload`, by the server of a job whose model is one of transformers.

Importing it starts no thread and runs no operation, so that what is forked afterwards is sound. Whatever is wrong with
the library is told where it is used: a server has nobody to tell.
"""

import contextlib
import gc
import os

__all__: list[str] = []

os.environ["HF_HUB_OFFLINE"] = "1"  # which the library reads as it is imported

with contextlib.suppress(Exception):
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401 - it is there for whoever is forked

gc.freeze()
