"""A pytest plugin: tests run on an explicit mesh of all devices, on which arrays are replicated.

python -m pytest -p tests.explicit_mesh
"""

import jax
from jax.sharding import AxisType


def pytest_configure():
    # Here and not when it is imported: pytest imports each file that it searches for examples.
    jax.set_mesh(jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Explicit,)))
