"""Errors of `refs.io_callback` and `refs.pure_callback`. See `test_errors.py`."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import refs
from refs import _jax, errors
from refs._callbacks import callback
from tests.errors.case import X, raises

F32 = jax.ShapeDtypeStruct((), "float32")
LANES = np.arange(2)


def fails(*_):
    raise ZeroDivisionError("on purpose")


def nothing(*_):
    pass


# --- What it is called with -----------------------------------------------------------------------


@raises(errors.RefTypeError, "io_callback of a ArrayImpl: it calls a function")
def callback_that_is_no_function(r, i):
    refs.io_callback(jnp.zeros(3), None, r)


@raises(
    errors.RefTypeError,
    "pure_callback of `nothing` with a sharding: put it in `refs.shard_map`, where every device "
    "calls with its own part",
)
def callback_with_a_sharding(r, i):
    refs.pure_callback(nothing, None, r, sharding="anything")


@raises(
    errors.RefValueError,
    "pure_callback with vmap_method='each': it is one of None, 'sequential', "
    "'sequential_unrolled', 'expand_dims', 'broadcast_all', 'legacy_vectorized'",
)
def callback_with_an_unknown_vmap_method(r, i):
    refs.pure_callback(nothing, None, r, vmap_method="each")


@raises(
    errors.RefTypeError,
    "io_callback of `nothing`: result_shape_dtypes has a type, which has no shape and dtype. Give "
    "a `jax.ShapeDtypeStruct(shape, dtype)` for each result, or None for no results",
)
def callback_with_results_of_no_type(r, i):
    refs.io_callback(nothing, float, r)


@raises(
    errors.RefTypeError,
    "io_callback of `nothing` with an array of PRNG keys: NumPy has none. Pass "
    "`jax.random.key_data(keys)`",
)
def callback_on_keys(r, i):
    refs.io_callback(nothing, None, r, jax.random.key(0))


@raises(
    errors.RefTypeError,
    "io_callback of `nothing` with an array of dtype int4: XLA packs several elements into a byte, "
    "and NumPy can't. Convert it before, `x.astype('int8')` for instance",
)
def callback_on_half_a_byte(r, i):
    refs.io_callback(nothing, None, refs.new_ref(jnp.zeros(3, "int4")), r)


@raises(
    errors.RefValueError,
    "io_callback of `nothing` on ref `r` (created at FILE:N), which is spread over devices: each "
    "has only a part of the memory. Put it in `refs.shard_map`, where every device calls with its "
    "own part",
)
def callback_on_a_ref_on_several_devices(r, i):
    with mock.patch.object(callback, "store_of", return_value=mock.Mock(sharding="some")):
        refs.io_callback(nothing, None, r)


@raises(
    errors.RefValueError,
    "io_callback of `nothing` at FILE:N in a program that XLA spreads over 4 devices: each has "
    "only a part of the memory. Put it in `refs.shard_map`, where every device calls with its own "
    "part",
)
def callback_in_a_program_for_several_devices(r, i):
    with mock.patch.object(_jax.callbacks, "devices_outside_shard_map", return_value=4):
        refs.jit(lambda: refs.io_callback(nothing, None, r))()


@raises(
    errors.RefValueError,
    "io_callback with ordered=True inside `shard_map`: the devices run side by side. Calls that "
    "touch one ref are made in order on each device",
)
def ordered_callback_in_shard_map(r, i):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(x):
        refs.io_callback(nothing, None, x, ordered=True)
        return x

    refs.shard_map(step, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(X)


# --- On a GPU -------------------------------------------------------------------------------------


@raises(errors.RefValueError, "io_callback of `nothing` with device='tpu': it is None or 'gpu'")
def callback_on_an_unknown_device(r, i):
    refs.io_callback(nothing, None, r, device="tpu")


@raises(
    errors.RefTypeError,
    "io_callback of `nothing` with device='gpu' and results: write them to refs",
)
def results_of_a_callback_on_a_gpu(r, i):
    refs.io_callback(nothing, F32, r, device="gpu")


@raises(
    errors.RefTypeError,
    "io_callback of `nothing` with device='gpu' at top level: call it under `refs.jit`",
)
def callback_on_a_gpu_at_top_level(r, i):
    refs.io_callback(nothing, None, r, device="gpu")


@raises(
    errors.RefTypeError,
    "io_callback of `nothing` at FILE:N with device='gpu', in a program for the CPU: there its "
    "arrays are NumPy's. Leave `device` out",
)
def callback_on_a_gpu_without_one(r, i):
    refs.jit(lambda: refs.io_callback(nothing, None, r, device="gpu"))()


@raises(
    errors.RefTypeError,
    "io_callback of `nothing` at FILE:N with device='gpu' in a lane of vmap, or on a part of a "
    "ref: it can be given whole refs only. Pass the ref and the index, or leave `device` out",
)
def callback_on_a_part_on_a_gpu(r, i):
    part = refs.functionalize(lambda r: refs.io_callback(nothing, None, r.at[0], device="gpu"))
    jax.jit(part).trace(X).lower(lowering_platforms=("cuda",))


# --- What it does ---------------------------------------------------------------------------------


@raises(
    errors.CallbackError,
    "io_callback of `fails` at FILE:N raised ZeroDivisionError: on purpose. The refs of the call "
    "keep their old values",
)
def callback_that_raises(r, i):
    def step():
        r[...] = 7
        refs.io_callback(fails, None, r)

    refs.jit(step)()


@raises(
    errors.CallbackError,
    "io_callback of `fails` at FILE:N raised ZeroDivisionError: on purpose. The refs of the call "
    "keep their old values, but ref `mine` (created at FILE:N): large and in the callback's hands, "
    "no copy was made (keep_old=True makes one), and what had been written by then is there",
)
def callback_that_raises_with_a_ref_in_hand(r, i):
    mine = refs.new_ref(X, name="mine")
    refs.jit(lambda: refs.io_callback(fails, None, mine, keep_old=False))()


@raises(
    errors.CallbackError,
    "pure_callback of `fails` at FILE:N raised ZeroDivisionError: on purpose. The refs of the call "
    "keep their old values",
)
def callback_in_a_lane_that_raises(r, i):
    refs.vmap(lambda x: refs.pure_callback(fails, F32, x, vmap_method="sequential"))(X)


@raises(
    errors.RefEscapeError,
    "io_callback of `append` at FILE:N keeps the memory of ref `r` (created at FILE:N) after it "
    "has returned: from then on that memory is used for other things. Keep a copy of the NumPy "
    "array that the callback is given, `array.copy()`",
)
def callback_that_keeps_a_ref(r, i):
    kept = []
    refs.jit(lambda: refs.io_callback(kept.append, None, r))()


@raises(
    errors.RefEscapeError,
    "io_callback of `append` at FILE:N keeps the memory of an argument after it has returned: from "
    "then on that memory is used for other things. Keep a copy of the NumPy array that the "
    "callback is given, `array.copy()`",
)
def callback_that_keeps_an_argument(r, i):
    kept = []
    refs.jit(lambda: refs.io_callback(kept.append, None, r[...] + 1))()


@raises(
    errors.RefEscapeError,
    "io_callback of `keeps_and_fails` at FILE:N keeps the memory of ref `r` (created at FILE:N) "
    "after it has returned: from then on that memory is used for other things. Keep a copy of the "
    "NumPy array that the callback is given, `array.copy()`",
)
def callback_that_keeps_a_ref_and_raises(r, i):
    kept = []

    def keeps_and_fails(x):
        kept.append(x[1:])
        fails()

    refs.jit(lambda: refs.io_callback(keeps_and_fails, None, r))()


@raises(
    errors.RefTypeError,
    "pure_callback of `two` at FILE:N returned 2 arrays, where result_shape_dtypes has 0",
)
def results_that_were_not_announced(r, i):
    def two(x):
        return 1, 2

    refs.jit(lambda: refs.pure_callback(two, None, r))()


@raises(
    errors.RefValueError,
    "pure_callback of `copy` at FILE:N returned an array of shape (3,) as result 0, where "
    "result_shape_dtypes has ()",
)
def result_of_another_shape(r, i):
    refs.pure_callback(np.copy, F32, r)


@raises(
    errors.RefTypeError,
    "pure_callback of `copy` at FILE:N returned an array of dtype float32 as result 0, where "
    "result_shape_dtypes has int32: cast it, `x.astype('int32')`",
)
def result_of_another_dtype(r, i):
    refs.pure_callback(np.copy, jax.ShapeDtypeStruct((3,), "int32"), r)


@raises(
    errors.RefIndexError,
    "io_callback of `nothing` at FILE:N on a part of ref `r` (created at FILE:N): index 3 is out "
    "of bounds for axis 0 with size 3",
)
def callback_on_what_is_not_there(r, i):
    refs.jit(lambda k: refs.io_callback(nothing, None, r.at[k]))(3)


@raises(
    errors.RefIndexError,
    "io_callback of `nothing` at FILE:N on a part of ref `r` (created at FILE:N): the part is out "
    "of bounds, there are only (1,) of (2,)",
)
def callback_on_what_is_partly_there(r, i):
    refs.jit(lambda k: refs.io_callback(nothing, None, r.at[jax.ds(k, 2)]))(2)


# --- Under transformations ------------------------------------------------------------------------


@raises(
    errors.RefTypeError,
    "pure_callback of `sum` at FILE:N in a function that is differentiated with respect to what it "
    "is given: what Python does can't be differentiated. Give the function around it a rule "
    "(`jax.custom_vjp`), or pass `jax.lax.stop_gradient(x)`",
)
def derivative_of_a_callback(r, i):
    refs.grad(lambda x: refs.pure_callback(np.sum, F32, x))(X)


@raises(
    errors.MissingRuleError,
    "vmap of pure_callback of `sum` at FILE:N: say how it is mapped, vmap_method='sequential' "
    "(called for one lane after the other), 'expand_dims' or 'broadcast_all' (once for all)",
)
def lanes_of_a_pure_callback(r, i):
    refs.vmap(lambda x: refs.pure_callback(np.sum, F32, x))(X)


@raises(
    errors.RefTypeError,
    "vmap of pure_callback of `nothing` at FILE:N: with vmap_method='expand_dims' it is called "
    "once for all lanes, and can't be given a part of a ref in each. Pass the ref and the index, "
    "or use 'sequential'",
)
def parts_of_refs_in_one_call_for_all_lanes(r, i):
    mine = refs.new_ref(jnp.zeros((2, 3)))

    def lane(row, k):
        refs.pure_callback(nothing, None, row.at[k], vmap_method="expand_dims")

    refs.vmap(lane)(mine, LANES)


@raises(
    errors.RefTypeError,
    "io_callback of `nothing` at FILE:N in a checkpointed function that is differentiated: the "
    "backward pass would call it again. Call it outside of `checkpoint`, or use `pure_callback` if "
    "that does no harm",
)
def checkpointed_callback(r, i):
    @refs.checkpoint
    def loss(x):
        refs.io_callback(nothing, None, r)
        return x * r[0]

    refs.grad(loss)(1.0)
