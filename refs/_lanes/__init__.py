"""Batching at the ref level: what `refs.vmap` needs while refs are still refs."""
