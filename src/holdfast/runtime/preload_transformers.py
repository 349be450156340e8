"""Imported once, behind :mod:`holdfast.runtime.preload`, by the server of a job whose model is one of transformers.

Importing it starts no thread and runs no operation, so that what is forked afterwards is sound.
"""

import gc

import transformers.modeling_utils
import transformers.models.auto.modeling_auto

__all__: list[str] = []

_LOADED = (transformers.modeling_utils, transformers.models.auto.modeling_auto)

gc.freeze()
