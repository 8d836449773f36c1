"""JAX's switches for what it will be like."""

import contextlib

import jax
import pytest


@contextlib.contextmanager
def switched_on(name):
    """Meanwhile the switch is on, if it isn't None.

    A test of one that this JAX doesn't have is skipped.
    """
    if name is None:
        yield
        return
    if not hasattr(jax.config, name):
        pytest.skip("JAX's newest")
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)
