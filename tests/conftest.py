"""Shared fixtures, `--quick`, and Hypothesis profiles: how many random programs, and which.

`dev` tries a few new ones each time, `ci` the same ones every time, `small` few of those,
`nightly` very many. CI sets the variable CI; otherwise `HYPOTHESIS_PROFILE` chooses:

    HYPOTHESIS_PROFILE=nightly python -m pytest tests/laws --hypothesis-seed=0
"""

import gc
import os
import sys
import weakref

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, settings

import refs
from refs import _jax
from refs._inplace import body
from refs._origin import Site

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

FEW = 3  # with --quick: how many of a test's parameter sets


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help=f"no slow tests, and {FEW} parameter sets of each"
    )
    parser.addoption(
        "--packed", action="store_true", help="every ref that a test makes is one of a pack"
    )


def pytest_configure(config):
    body.SMALLEST_FENCED = 256  # The tests' arrays are small, and are to be updated in place.
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


def pytest_collection_modifyitems(config, items):
    if not config.getoption("quick"):
        return
    of_function = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            of_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {
        sets[k * (len(sets) - 1) // max(FEW - 1, 1)]
        for sets in of_function.values()
        for k in range(FEW)
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(scope="module", autouse=True)
def _leave_old_objects_alone():
    """What earlier files left, programs mostly, isn't searched again by each garbage collection.

    That was up to a tenth of the time of all tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=[lambda f: f, refs.jit], ids=["op by op", "jit"])
def jit(request):
    """A wrapper for the function under test: none, then `refs.jit`."""
    return request.param


@pytest.fixture
def n():
    """A counter."""
    return refs.new_ref(jnp.int32(0), name="n")
