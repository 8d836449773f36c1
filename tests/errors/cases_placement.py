"""Errors about where refs lie. See `test_errors.py`."""

import jax
import numpy as np

import refs
from refs import errors
from tests.errors.case import X, raises
from tests.errors.cases_lanes import sharded

HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


ABSTRACT = jax.ShapeDtypeStruct((3,), np.float32, sharding=HOST, is_ref=True)


@raises(
    errors.RefTypeError,
    f"{ABSTRACT} stands for a ref in the host's memory, which JAX's types of arguments don't tell "
    "from the device's: pass the ref itself, `refs.empty_ref(...)`",
)
def abstract_ref_in_host_memory(r, i):
    refs.jit(lambda r: r.addupdate(1)).lower(ABSTRACT)


@raises(
    errors.RefTypeError,
    "reshard of ref `r` (created at FILE:N) inside a traced function: a ref stays where it is "
    "while a program runs. Reshard it outside, or place its value, "
    "`jax.lax.with_sharding_constraint(ref[...], sharding)`",
)
def reshard_in_a_traced_function(r, i):
    refs.jit(lambda r: refs.reshard(r, jax.devices()[0]))(r)


@raises(
    errors.RefTypeError,
    "reshard of a ref, a ref of JAX's own: make one that can be moved, "
    "`refs.new_ref(ref[...], sharding=sharding)`",
)
def reshard_of_a_ref_of_jax(r, i):
    refs.reshard(jax.new_ref(X), jax.devices()[0])


@raises(
    errors.RefTypeError,
    "reshard of ref `p[0]` (created at FILE:N), which lies in the buffer of a pack: make a ref "
    "with a buffer of its own, `refs.new_ref(ref[...], sharding=sharding)`",
)
def reshard_of_a_packed_ref(r, i):
    refs.reshard(refs.pack([X, X], name="p")[0], jax.devices()[0])


@raises(
    errors.RefTypeError,
    "with_sharding_constraint of ref `r` (created at FILE:N): it takes an array. Place its value, "
    "`jax.lax.with_sharding_constraint(ref[...], sharding)`; a ref is moved by "
    "`refs.reshard(ref, sharding)`, outside of traced functions",
)
def sharding_constraint_of_a_ref(r, i):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    refs.jit(lambda r: jax.lax.with_sharding_constraint(r, sharding))(r)


@raises(
    errors.RefValueError,
    "the value of ref `r` (created at FILE:N) as a NumPy array: parts of it lie on other "
    "processes' devices. Gather it, `jax.experimental.multihost_utils.process_allgather(ref[...], "
    "tiled=True)`, or read the parts of this process, `ref.addressable_shards`",
)
def numpy_array_of_parts_elsewhere(r, i):
    class Elsewhere:
        is_fully_addressable = is_fully_replicated = False

    r._store.sharding = Elsewhere()
    try:
        np.asarray(r)
    finally:
        r._store.sharding = None


@raises(
    errors.RefValueError,
    "the address of ref `r` (created at FILE:N), which lies on several devices: each part has its "
    "own. Inside `with refs.tree.borrow(ref) as x` they are those of the `data` of "
    "`x.addressable_shards`",
)
def address_of_several_parts(r, i):
    class OnTwo:
        device_set = frozenset((0, 1))

    r._store.sharding = OnTwo()
    try:
        r.unsafe_buffer_pointer()
    finally:
        r._store.sharding = None


@raises(
    errors.RefValueError,
    "reshard of ref `placed` (created at FILE:N) to devices of other processes: somebody has put "
    "it on devices of process 0, and others may have another value. Make the same ref in all "
    "processes, `refs.new_ref(value, sharding=sharding)`",
)
def reshard_of_a_local_ref_to_other_processes(r, i):
    class OfOthers:
        is_fully_addressable = False

    refs.reshard(refs.new_ref(X, sharding=jax.devices()[0], name="placed"), OfOthers())


@raises(
    errors.RefTypeError,
    "ref `k` (created at FILE:N), a PRNG key, in the host's memory, where JAX can't tell it from "
    "one in the device's: leave it there, `sharding.with_memory_kind('device')`",
)
def key_in_host_memory(r, i):
    refs.new_ref(jax.random.key(0), sharding=HOST, name="k")


@raises(
    errors.RefValueError,
    "ref `r` (created at FILE:N) is written in the branch or loop at FILE:N, which devices take or "
    "leave for themselves, as its predicate varies over mesh axis 'd': what the ref holds is the "
    "same on every device. Decide for all (`jax.lax.pmax(predicate, 'd')`), or pass the ref with a "
    "spec that names the axis; if it is made here, make it of a value that varies "
    "(`jax.lax.pcast`)",
)
def devices_that_decide_by_themselves(r, i):
    def body(x):
        refs.cond(x[0] > 1, lambda: refs.set(r, ..., 2.0), lambda: None)

    sharded(body)(X)
