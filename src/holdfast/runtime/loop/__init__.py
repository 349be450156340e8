"""A user's own training loop, carried by the runtime: what ``holdfast.session()`` gives, and how a script is run."""
