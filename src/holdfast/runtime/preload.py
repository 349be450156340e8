"""Imported once, by the server that all processes of a job are forked from: whatever takes long to load.

Importing it starts no thread and runs no operation, so that what is forked afterwards is sound.
"""

import atexit
import gc
import os

import grpc.aio
import numpy.ctypeslib
import torch._dynamo
import torch.distributed

import holdfast.runtime.main.coordinator
import holdfast.runtime.main.library
import holdfast.runtime.main.lookups
import holdfast.runtime.main.worker

__all__: list[str] = []

# Taking torch down in an orderly way takes a second and gains nothing: the server holds no state.
atexit.register(os._exit, 0)

# numpy.ctypeslib: safetensors asks for it when a layer is encoded.
_LOADED = (grpc.aio, numpy.ctypeslib, torch._dynamo, torch.distributed, holdfast.runtime.main)

# What is loaded stays: a collection in what is forked need not look at it, 0.2 s of processor time in each, nor write
# to the memory that all of them share.
gc.freeze()
