"""Shared fixtures, `--quick`, and Hypothesis profiles: how many random programs, and which.

`dev` tries a few new ones each time, `ci` the same ones every time, `small` few of those,
`nightly` very many. CI sets the variable CI; otherwise `HYPOTHESIS_PROFILE` chooses:

    HYPOTHESIS_PROFILE=nightly python -m pytest tests/laws --hypothesis-seed=0
"""

import os
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, settings

import refs
from refs import _jax
from refs._inplace import model
from refs._origin import Site
from tests import compiling

# A program takes as long as its compilation, which says nothing about the test.
COMMON = {
    "deadline": None,
    "print_blob": True,
    "phases": set(Phase) - {Phase.explain},  # which lines ran doesn't explain a failed program
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, **COMMON)
settings.register_profile("small", max_examples=10, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=5000, **COMMON)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if "CI" in os.environ else "dev")
)

FEW = 2  # with --quick: how many of a test's parameter sets
# Files that begin first, so that no worker is left with minutes of one test at the end.
LONG = [
    "tests/test_figures.py",
    "tests/test_several_devices.py",
    "tests/test_configurations.py",
    "tests/devices/test_processes.py",
    "tests/test_examples_sharded.py",
]
ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help=f"no slow tests, and {FEW} parameter sets of each"
    )
    parser.addoption(
        "--as-released", action="store_true", help="compile every test's programs as users do"
    )
    parser.addoption(
        "--packed", action="store_true", help="every ref that a test makes is one of a pack"
    )


def pytest_configure(config):
    compiling.keep_executables()
    if not hasattr(config, "workerinput"):
        compiling.trim_cache()
    as_released = config.getoption("as_released")
    config.pluginmanager.register(compiling.Compiling(as_released))
    if as_released:  # so do the processes that tests start
        os.environ["PYTEST_ADDOPTS"] = os.environ.get("PYTEST_ADDOPTS", "") + " --as-released"
    model.SMALLEST_FENCED = 256  # The tests' arrays are small, and are to be updated in place.
    if config.getoption("packed"):
        refs.new_ref = packed_ref


def packed_ref(init_val, *, copy=True, name=None, **keywords):
    """`new_ref`, of a ref that shares a buffer with two more of its type, if it can."""
    has_array = not isinstance(init_val, jax.Ref) and jax.tree_util.all_leaves([init_val])
    if keywords or not copy or not has_array or not _jax.at_top_level():
        return new_ref(init_val, copy=copy, name=name, **keywords)
    before, ref, after = refs.pack([init_val] * 3, larger_than=2**30)
    # Its name and its line are those that the test gives and expects.
    caller = sys._getframe(1)
    ref._aval.origin.name = name
    ref._aval.origin.site = Site(caller.f_code, caller.f_lineno)
    NEIGHBOURS[ref] = before, after
    return ref


new_ref = refs.new_ref
NEIGHBOURS = weakref.WeakKeyDictionary()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """With `--quick`: no tests of other parameter sets are made."""
    yield
    if metafunc.config.getoption("quick"):
        sets = [x for x in metafunc._calls if all(m.name != "slow" for m in x.marks)]
        chosen = {k * (len(sets) - 1) // max(FEW - 1, 1) for k in range(FEW)} if sets else ()
        metafunc._calls[:] = [sets[k] for k in sorted(chosen)] or metafunc._calls[:1]


def pytest_collection_modifyitems(config, items):
    long = {ROOT / name: k for k, name in enumerate(LONG)}
    # Those as released last: a worker drops its programs when it begins to compile in another way.
    items.sort(
        key=lambda item: (
            long.get(item.path, len(long)),
            item.get_closest_marker("as_released") is not None,
        )
    )
    if config.getoption("quick"):
        slow = {item for item in items if item.get_closest_marker("slow")}
        config.hook.pytest_deselected(items=[*slow])
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(params=[lambda f: f, refs.jit], ids=["op by op", "jit"])
def jit(request):
    """A wrapper for the function under test: none, then `refs.jit`."""
    return request.param


@pytest.fixture
def n():
    """A counter."""
    return refs.new_ref(jnp.int32(0), name="n")
