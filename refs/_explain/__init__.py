"""What a compiled function does to its refs, and to memory: for `refs.explain` and tests."""
