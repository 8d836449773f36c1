"""In each of JAX's configurations, in a process of its own: some laws and some of its functions."""

import jax
import pytest

from tests.processes import PYTEST, run_with, run_with_devices

CONFIGURATIONS = {
    "jax_enable_x64": "1",
    "jax_debug_nans": "1",
    "jax_debug_infs": "1",
    "jax_enable_checks": "1",
    "jax_check_tracer_leaks": "1",
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_disable_jit": "1",
    "jax_remat3": "1",
    "jax_custom_vjp3": "1",
    "jax_custom_jvp3": "1",
}
SWEEP = ["tests/sweep/test_sweep.py"]
LAWS = ["tests/laws/test_jit.py", "tests/laws/test_vmap.py"]
# There a law of its own is in tests/laws/test_eager.py: JAX's loops take no refs apart in Python.
WITHOUT_LAWS = {"jax_disable_jit"}
FEW = {"HYPOTHESIS_PROFILE": "small", "SWEEP": "97"}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_in(name):
    if name not in jax.config.values:
        pytest.skip("this JAX doesn't have it")
    files = [*SWEEP, *([] if name in WITHOUT_LAWS else LAWS)]
    run_with({name.upper(): CONFIGURATIONS[name], **FEW}, *PYTEST, *files)


@pytest.mark.parametrize("options", [[], ["-p", "tests.explicit_mesh"]], ids=["plain", "mesh"])
def test_with_eight_devices(monkeypatch, options):
    for name, value in FEW.items():
        monkeypatch.setenv(name, value)
    run_with_devices(8, *PYTEST, *options, *SWEEP, *LAWS)
