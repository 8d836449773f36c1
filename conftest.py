"""What every docstring's examples may use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

# It is only for type checkers: see `dev.py lint`.
collect_ignore_glob = ["tests/typing/*"]


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace):
    doctest_namespace.update(refs=refs, jax=jax, jnp=jnp, np=np)
