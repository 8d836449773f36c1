"""Errors about parts of refs: views, their methods and keywords. See `test_errors.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import refs
from refs import errors
from tests.errors.case import raises


@raises(
    errors.RefTypeError,
    "subtract of ref `flags` (created at FILE:N): booleans have no subtract: write what you mean, "
    "`ref[i] = …`",
)
def difference_of_booleans(r, i):
    flags = refs.new_ref(np.zeros(2, bool), name="flags")
    flags.at[0].subtract(True)


@raises(
    errors.RefTypeError,
    "subtract of ref `flag` (created at FILE:N): booleans have no subtract: write what you mean, "
    "`ref[i] = …`",
)
def difference_of_one_boolean(r, i):
    flag = refs.new_ref(np.array(True), name="flag")
    flag.at[True].at[()].subtract(True)


@raises(
    errors.RefIndexError,
    "get of ref `none` (created at FILE:N): an index array of shape (1,) is out of bounds for "
    "axis 0 of size 0",
)
def index_array_on_an_axis_of_size_0(r, i):
    refs.new_ref(np.zeros(0), name="none")[jnp.array([0])]


@raises(
    errors.RefTypeError,
    "get of ref `keys` (created at FILE:N): "
    'mode="fill" needs a `fill_value` for a ref of dtype key<fry>',
)
def keys_out_of_bounds(r, i):
    keys = refs.new_ref(jax.random.split(jax.random.key(0), 2), name="keys")
    keys.at[jnp.array([5])].get(mode="fill")


@raises(TypeError, "unexpected keyword argument 'fill_value'")
def keyword_that_a_write_does_not_have(r, i):
    r.at[0].set(1.0, fill_value=3)


@raises(
    errors.RefValueError,
    "mode 'wrap' of an index: it is 'clip', 'fill', 'drop' or 'promise_in_bounds'",
)
def mode_that_there_is_not(r, i):
    r.at[0].set(1.0, mode="wrap")


@raises(
    errors.RefValueError,
    "a part of ref `e` (created at FILE:N) at FILE:N: how it is sharded over the explicit mesh "
    "doesn't follow from its index and from the ref's own sharding, P('x',). Say it, "
    "`ref.at[i].get(out_sharding=jax.P(…))`; or index the axes that aren't sharded, use the whole "
    "value, `ref[...]`, or the parts in `refs.shard_map`",
)
def part_of_an_axis_that_is_sharded_explicitly(r, i):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        e = refs.new_ref(jax.device_put(np.zeros(4), sharding), name="e")
        refs.jit(lambda: e[jnp.array([1, 2])])()


@raises(
    errors.RefTypeError,
    "a part of ref `r` (created at FILE:N) is not an array: use its value, `view[...] + x`, or "
    "update it in place, `view[...] += x`",
)
def arithmetic_of_a_view(r, i):
    r.at[0] + 1


@raises(
    errors.RefTypeError,
    "the truth value of a part of ref `r` (created at FILE:N) is ambiguous: test "
    "`view is not None`, or its value, `view[...]`",
)
def truth_value_of_a_view(r, i):
    refs.jit(lambda r: 1 if r.at[0] else 2)(r)


NO_ROWS = raises(
    errors.RefTypeError,
    "iteration over a 0-d array, or len() of one: a part of ref `r` (created at FILE:N) is a "
    "scalar. Read it, `view[...]`",
)


@NO_ROWS
def rows_of_an_element(r, i):
    list(r.at[0])


@NO_ROWS
def length_of_an_element(r, i):
    len(r.at[0])


@raises(
    AttributeError,
    "RefView has no attribute 'sum': if you mean the array's, read it, `view[...].sum`",
)
def attribute_of_an_array_of_a_view(r, i):
    r.at[0].sum()


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): an index of type RefView; an index is made of integers, "
    "slices, None, ..., integer arrays and concrete boolean masks",
)
def view_as_an_index(r, i):
    r[i.at[0]]
