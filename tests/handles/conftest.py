"""Meshes over eight devices."""

import jax
import pytest
from jax import NamedSharding, P
from jax.sharding import AxisType


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    return jax.make_mesh((8,), ("x",), axis_types=(request.param,))


@pytest.fixture
def split(mesh):
    return NamedSharding(mesh, P("x"))


@pytest.fixture
def whole(mesh):
    return NamedSharding(mesh, P())
