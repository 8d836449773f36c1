"""The fixture of the tests of `refs.reversible` that compare derivatives."""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
