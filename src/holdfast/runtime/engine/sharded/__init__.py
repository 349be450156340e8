"""The compute engine of a stage of several GPUs whose layers are sharded over them (FSDP2), for numerics ``fast``."""
