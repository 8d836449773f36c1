"""What depends on where programs run: on a CPU, or on a GPU, on which the tests run too."""

import jax
import pytest

ON_CPU = jax.default_backend() == "cpu"

# Fences are conditionals there, and scatters of a few rows loops over them: see `refs/_inplace`.
as_on_cpu = pytest.mark.skipif(not ON_CPU, reason="what is compiled for a CPU")

# Elsewhere JAX copies it to the host and back.
in_host_memory = pytest.mark.skipif(not ON_CPU, reason="callbacks on the memory itself")
