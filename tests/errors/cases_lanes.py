"""Errors of vmap, of shard_map and of loops. See `test_errors.py`."""

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

import refs
from refs import _jax, errors
from tests.errors.case import X, raises

# --- vmap -----------------------------------------------------------------------------------------


@raises(
    errors.RefValueError,
    "vmap: lane-dependent write to ref `r` (created at FILE:N) at FILE:N: all lanes share"
    " it, so after the map it would depend on the order of the 3 lanes. Map it "
    "(`in_axes`), only accumulate into it (`ref[...] += …`, at an index array "
    "`ref.at[i].add(…)`; or only `.multiply`, only `.min` or only `.max`), or loop (`refs.scan`)",
)
def lanes_that_write_what_they_share(r, i):
    def lane(x):
        r[0] = x

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: use of what other lanes write to ref `i` (created at FILE:N) at FILE:N: all "
    "lanes share it, so after the map it would depend on the order of the 3 lanes. Map it"
    " (`in_axes`), only accumulate into it (`ref[...] += …`, at an index array "
    "`ref.at[i].add(…)`; or only `.multiply`, only `.min` or only `.max`), or loop (`refs.scan`)",
)
def lanes_that_read_what_they_accumulate(r, i):
    def lane(x):
        i[0] += 1
        return i[0]

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: use of what other lanes write to ref `r` (created at FILE:N) at FILE:N: all "
    "lanes share it, so after the map it would depend on the order of the 3 lanes. Map it"
    " (`in_axes`), only accumulate into it (`ref[...] += …`, at an index array "
    "`ref.at[i].add(…)`; or only `.multiply`, only `.min` or only `.max`), or loop (`refs.scan`)",
)
def lanes_that_overwrite_and_accumulate(r, i):
    def lane(x):
        r[0] = 5
        r[1] += x

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: `min` besides `max` of ref `r` (created at FILE:N) at FILE:N: all "
    "lanes share it, so after the map it would depend on the order of the 3 lanes. Map it"
    " (`in_axes`), only accumulate into it (`ref[...] += …`, at an index array "
    "`ref.at[i].add(…)`; or only `.multiply`, only `.min` or only `.max`), or loop (`refs.scan`)",
)
def lanes_that_accumulate_in_two_ways(r, i):
    def lane(x):
        r.at[0].max(x)
        r.at[0].min(5)

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: use of what other lanes write to a ref at FILE:N: all lanes share it, so after"
    " the map it would depend on the order of the 3 lanes. Map it (`in_axes`), only "
    "accumulate into it (`ref[...] += …`, at an index array "
    "`ref.at[i].add(…)`; or only `.multiply`, only `.min` or only `.max`), or loop (`refs.scan`)",
)
def lanes_that_swap_a_nameless_ref(r, i):
    nameless = jax.new_ref(jnp.zeros(3))

    def lane(x):
        return refs.swap(nameless, 0, 1.0)

    refs.vmap(lane)(X)


@raises(
    errors.MissingRuleError,
    "lanes accumulate into a shared ref through several indices, or a reshaped or "
    "transposed view of it: index the ref once",
)
def lanes_that_accumulate_into_a_reshaped_ref(r, i):
    native = jax.new_ref(jnp.zeros((3, 1)))

    def lane(x):
        jax.jit(lambda q: jax.ref.addupdate(q.reshape(3), 0, x))(native)

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: ref `table` (created at FILE:N) is passed twice, mapped over axes 0 and 1: "
    "each lane has one view of it",
)
def a_ref_mapped_over_two_axes(r, i):
    table = refs.new_ref(jnp.zeros((2, 2)), name="table")
    refs.vmap(lambda a, b: None, in_axes=(0, 1))(table, table)


@raises(
    errors.RefValueError,
    "vmap over arguments with 2 and 3 lanes: they must have the same number",
)
def lanes_of_different_number(r, i):
    refs.vmap(lambda a, b: None)(r, jnp.zeros(2))


@raises(
    errors.RefValueError,
    "vmap over no argument: nothing in `in_axes` is an axis. Give one, or axis_size",
)
def lanes_of_no_number(r, i):
    refs.vmap(lambda a: None, in_axes=None)(r)


@raises(
    errors.RefValueError,
    "vmap over ref `r` (created at FILE:N), which the function also closes over, or is given "
    "with None in `in_axes`: that would be the whole ref, in every lane. Use the mapped argument "
    "only",
)
def a_ref_mapped_and_closed_over(r, i):
    def lane(row):
        row[...] = r[0]

    refs.vmap(lane)(r)


@raises(
    errors.RefTypeError,
    "vmap: in_axes is False: it must be an integer, None, or a tuple with an entry for each "
    "positional argument",
)
def axes_that_are_no_axes(r, i):
    refs.vmap(lambda a: None, in_axes=False)(r)


MAPS_ITSELF = (
    "vmap over refs, with a {}, which says itself how it is mapped: let the lanes take and return "
    "arrays, and make it of them inside or outside"
)


class Rows(_jax.MappingSpec): ...


@raises(errors.RefTypeError, MAPS_ITSELF.format("Rows"))
def an_axis_of_a_type_that_maps_itself(r, i):
    refs.vmap(lambda r, x: r.set(x), in_axes=(0, Rows()))(r, X)


@raises(errors.RefTypeError, MAPS_ITSELF.format("BCOO"))
def a_result_that_maps_itself(r, i):
    refs.vmap(lambda r: BCOO.fromdense(r[...], nse=1))(refs.new_ref(jnp.ones((3, 2))))


@raises(
    errors.RefTypeError,
    "vmap: in_axes has a str for ref `r` (created at FILE:N): it takes integers and None",
)
def an_axis_that_is_no_integer(r, i):
    refs.vmap(lambda a: None, in_axes=("rows",))(r)


@raises(
    errors.RefValueError,
    "vmap over axis 1 of ref `r` (created at FILE:N) of shape (3,), which has no such axis",
)
def an_axis_that_is_not_there(r, i):
    refs.vmap(lambda a: None, in_axes=1)(r)


@raises(
    errors.RefValueError,
    "vmap: in_axes=(0, 0) doesn't fit the 1 positional arguments: it must be an integer, "
    "None, or a tuple with an entry for each, of which every one is a prefix of the "
    "argument's structure",
)
def axes_for_other_arguments(r, i):
    refs.vmap(lambda a: None, in_axes=(0, 0))(r)


@raises(
    errors.RefTypeError,
    "vmap over a view of ref `r` (created at FILE:N): map over the ref, or an index, and "
    "take the view inside",
)
def lanes_over_a_view(r, i):
    refs.vmap(lambda view: None)(r.at[:2])


@raises(
    errors.RefValueError,
    "write of a value of each lane's own to ref `r` (created at FILE:N) at FILE:N: "
    "`jax.vmap` doesn't map what it does to a ref from outside. Use `refs.vmap`, or `refs.map` for "
    "`jax.lax.map` in batches",
)
def a_native_map_of_a_write(r, i):
    def lane(x):
        r[0] += x

    refs.jit(lambda xs: jax.lax.map(lane, xs, batch_size=2))(X)


@raises(
    errors.RefValueError,
    "`jax.vmap` can't map a branch that touches a ref: `refs.vmap` can, and `refs.map` in the "
    "place of `jax.lax.map` in batches",
)
def a_native_map_of_a_branch(r, i):
    refs.jit(jax.vmap(lambda x: jax.lax.cond(x > 1, lambda: r.at[0].add(1), lambda: None)))(X)


@raises(
    errors.RefValueError,
    "performing a set/swap operation with vmapped value on an unbatched array reference of type "
    "Ref{float32[3]}, ref `r` (created at FILE:N). Move the array reference to be an argument to "
    "the vmapped function?\n\n"
    "`jax.vmap` doesn't map what loops and inner jits do to a ref: `refs.vmap` can, and `refs.map` "
    "in the place of `jax.lax.map` in batches",
)
def write_of_lanes_of_jax_in_an_inner_jit(r, i):
    refs.jit(jax.vmap(jax.jit(lambda x: r.set(x, idx=0))))(X)


@raises(
    errors.RefValueError,
    "a lane of vmap returns a view of ref `table` (created at FILE:N): return its value, "
    "`view[...]`, or the ref",
)
def a_lane_that_returns_a_view(r, i):
    refs.vmap(lambda row: row.at[1:])(refs.new_ref(jnp.zeros((2, 3)), name="table"))


@raises(
    errors.RefValueError,
    "a ref that is made inside is returned twice, once for 0 and once for -1: it becomes "
    "one ref. Return it once",
)
def a_lane_that_returns_a_ref_along_two_axes(r, i):
    def lane(x):
        made = refs.new_ref(x)
        return made, made

    refs.vmap(lane, out_axes=(0, -1))(jnp.zeros((2, 3)))


# --- shard_map ------------------------------------------------------------------------------------


def sharded(fun, in_specs=None, out_specs=None):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    in_specs = jax.P("d") if in_specs is None else in_specs
    return refs.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@raises(
    errors.RefValueError,
    "write of a value that varies over mesh axis 'd' to ref `r` (created at FILE:N) at "
    "FILE:N: what that holds is the same on every device. Reduce the value first "
    "(`jax.lax.psum(value, 'd')`), or pass the ref with a spec that names the axis; if it "
    "is made here, make it of a value that varies (`jax.lax.pcast`)",
)
def devices_that_write_what_they_share(r, i):
    def body(x):
        r[0] = x[0]

    sharded(body)(X)


@raises(
    errors.RefTypeError,
    "shard_map: in_specs has P('d',) for a view of ref `r` (created at FILE:N): pass the "
    "ref, and take the view of a shard inside",
)
def a_view_that_is_split(r, i):
    sharded(lambda v: None)(r.at[:2])


@raises(
    errors.RefValueError,
    "shard_map: in_specs=(P(), P()) doesn't fit the 1 arguments: it must be a "
    "PartitionSpec, or a tuple with an entry for each, of which every one is a prefix of "
    "the argument's structure",
)
def specs_for_other_arguments(r, i):
    sharded(lambda a: None, (jax.P(), jax.P()))(r)


@raises(
    errors.RefTypeError,
    "shard_map: in_specs has None for ref `r` (created at FILE:N): it takes a PartitionSpec",
)
def a_ref_without_a_spec(r, i):
    sharded(lambda a, b: None, (jax.P(), None))(X, r)


@raises(
    errors.RefValueError,
    "shard_map: ref `r` (created at FILE:N) is passed twice, with specs P('d',) and P(): "
    "each device has one shard of it",
)
def a_ref_that_is_split_twice(r, i):
    sharded(lambda a, b: None, (jax.P("d"), jax.P()))(r, r)


@raises(
    errors.RefValueError,
    "shard_map over ref `r` (created at FILE:N), which the function also closes over: that "
    "would be the whole ref, on every device. Use the argument only",
)
def a_ref_split_and_closed_over(r, i):
    def body(a):
        a[0] = r[0]

    sharded(body)(r)


# --- Loops ----------------------------------------------------------------------------------------


@raises(
    errors.RefTypeError,
    "scan over a view of ref `r` (created at FILE:N): scan over the ref, or over indices,"
    " and take the view inside",
)
def scan_over_a_view(r, i):
    refs.scan(lambda carry, row: (carry, None), 0, r.at[:2])


@raises(
    errors.RefTypeError,
    "while_loop: its carry holds ref `r` (created at FILE:N), which stays the same ref: "
    "close over it",
)
def a_loop_that_carries_a_ref(r, i):
    refs.while_loop(lambda carry: False, lambda carry: carry, r)


@raises(
    errors.RefValueError,
    "vmap: ref `r` (created at FILE:N), which the lanes share, can't be given to the "
    "batching rule of the custom_vmap function at FILE:N: let the function return what is to be "
    "written, and write it outside",
)
def batching_rule_of_what_lanes_sum_up_in(r, i):
    f = jax.custom_batching.custom_vmap(lambda q, x: x)
    f.def_vmap(lambda n, is_batched, q, x: (x, True))

    def lane(x):
        r[...] += x
        f(r, x)

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "scan: xs holds a scalar, which has no rows: close over it",
)
def scan_over_a_scalar(r, i):
    refs.scan(lambda c, x: (c, x), 0, (r, 1.0))


@raises(
    errors.RefTypeError,
    "operands by position and by the keyword `operand`: choose one",
)
def operands_by_position_and_by_keyword(r, i):
    refs.cond(True, lambda x: x, lambda x: x, r, operand=r)


@raises(
    TypeError,
    "function lane at FILE:N returned a value of type <class 'str'> at output component ['b'], "
    "which is not a valid JAX type",
)
def a_lane_that_returns_no_array(r, i):
    def lane(x):
        return {"a": (r[0], x), "b": "x"}

    refs.vmap(lane)(X)


@raises(errors.RefTypeError, "Expected a callable value, got 3, for cond")
def branch_that_is_no_function(r, i):
    refs.cond(True, lambda: 2, 3)
