"""The pass knows primitives by their parameters: each program has the values that XLA gives it.

The programs are those of `primitive_cases`, over arrays and over refs.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs import _inplace, _jax
from refs._inplace import rewrite
from tests.inplace import access_cases, structure_cases  # noqa: F401, they fill `GROUPS`
from tests.inplace.primitive_cases import GROUPS

pytestmark = pytest.mark.as_released


@pytest.fixture(autouse=True)
def _with_all_index_types():
    with jax.enable_x64(True):
        yield


@functools.cache
def all_of(group):
    """The programs of a group as one, and what it is called with."""
    functions, arrays, operands = zip(*GROUPS[group], strict=True)

    def program(arrays, operands):
        return [f(x, *given) for f, x, given in zip(functions, arrays, operands, strict=True)]

    return program, [*map(jnp.asarray, arrays)], [tuple(map(jnp.asarray, o)) for o in operands]


OF_INDEX_TYPES = {
    *("scatter_index_types_dropped", "scatter_index_types_clipped", "gather", "masked_rows"),
    "slices",
}


def expected(group):
    """What XLA makes of the programs.

    What is permuted and written over itself under another shape it has wrong (`overlaps.py`): that
    is run op by op. With `xla_cpu_use_fusion_emitters=false` it has indices of 8 and 16 bits wrong:
    here they have 32.
    """
    program, arrays, operands = all_of(group)

    def widened(x):
        is_narrow = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4
        return x.astype(jnp.int32) if is_narrow else x

    if group in OF_INDEX_TYPES:
        operands = jax.tree.map(widened, operands)
    return (program if group == "shapes" else jax.jit(program))(arrays, operands)


def over_refs(program):
    """The same on what refs hold, which the results of the same type are written to."""

    def run(held, operands):
        results = program([r[...] for r in held], operands)
        for r, result in zip(held, results, strict=True):
            first = jax.tree.leaves(result)[0]
            if (first.shape, first.dtype) == (r.shape, r.dtype):
                r[...] = first
        return results

    return refs.jit(run)


def on_several(program):
    """The pass for several devices; its programs compute the same on one."""

    def run(*args):
        leaves, tree = jax.tree.flatten(args)
        closed, shapes = jax.make_jaxpr(
            lambda *leaves: program(*jax.tree.unflatten(tree, leaves)), return_shape=True
        )(*leaves)
        new = rewrite(closed.jaxpr, True, True)
        out = jax.core.eval_jaxpr(new, closed.consts, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return jax.jit(run)


def bits(x):
    return np.asarray(x).tobytes()


def differences(want, got):
    """The numbers of the programs whose results aren't, bit by bit, what they should be."""
    return [
        k
        for k, pair in enumerate(zip(want, got, strict=True))
        if [*map(bits, jax.tree.leaves(pair[0]))] != [*map(bits, jax.tree.leaves(pair[1]))]
    ]


@pytest.mark.parametrize("group", GROUPS)
def test_values(group):
    program, arrays, operands = all_of(group)
    want = expected(group)
    assert not differences(want, jax.jit(refs.in_place(program))(arrays, operands))
    held = [*map(refs.new_ref, arrays)]
    assert not differences(want, over_refs(program)(held, operands))
    for r, x, result in zip(held, arrays, want, strict=True):
        first = jax.tree.leaves(result)[0]
        is_written = (first.shape, first.dtype) == (x.shape, x.dtype)
        assert bits(r[...]) == bits(first if is_written else x)


@pytest.mark.parametrize("group", ["masked_in_other_ways", "slices", "deposits", "pad"])
def test_values_on_several_devices(group):
    program, arrays, operands = all_of(group)
    want = expected(group)
    assert not differences(want, on_several(program)(arrays, operands))


def test_the_table_has_each_primitive_that_the_pass_names():
    source = "".join(path.read_text() for path in Path(_inplace.__file__).parent.glob("*.py"))
    found = {
        getattr(module, name).name
        for module, prefix in ((lax, "lax"), (_jax, "_jax"))
        for name in re.findall(rf"\b{prefix}\.(\w+_p)\b", source)
    }
    used = set()
    for group in GROUPS:
        program, arrays, operands = all_of(group)
        closed = jax.jit(program).trace(arrays, operands).jaxpr
        _jax.any_equation(closed, lambda eqn: used.add(_jax.primitive_of(eqn).name))
    assert len(found) > 20
    assert not found - used


LONG = jax.ShapeDtypeStruct((2**31 + 300,), jnp.int8)
FAR = 2**31 + 5


def deposit(x):
    return x + lax.pad(x[:9], jnp.int8(0), [(FAR, LONG.size - FAR - 9, 0)])


def parts_apart(x):
    """They are one gather."""
    return jnp.concatenate([x[FAR : FAR + 9] * 2, x[:9] * 2])


def many_slices(x):
    return [x[FAR + 9 * k : FAR + 9 * (k + 1)].sum() for k in range(20)]


@pytest.mark.parametrize("program", [deposit, parts_apart, many_slices])
def test_places_of_more_than_31_bits(program):
    with jax.enable_x64(False):
        text = jax.jit(refs.in_place(program)).lower(LONG).as_text()
    assert re.search(rf"dense<\[?{FAR}\b", text)
