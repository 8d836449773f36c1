"""Lanes of `refs.vmap` while refs are still refs: their analysis, and primitives on shared refs."""
