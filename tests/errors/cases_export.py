"""Errors about exported programs. See `test_errors.py`."""

import pickle

import jax

import refs
from refs import errors
from tests.errors.case import X, raises


@refs.jit
def add(a, b):
    a[...] += b[...]


@raises(
    errors.RefTypeError,
    "export of `add` over a ref in the host's memory, where JAX exports nothing: export it over "
    "refs in the device's, and call it with any refs",
)
def export_over_a_ref_in_the_hosts_memory(r, i):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    refs.export.export(add)(refs.new_ref(X, sharding=place), r)


@raises(
    errors.RefTypeError,
    "export of `count`, which closes over ref `r` (created at FILE:N): where it will be called "
    "that ref isn't. Pass it as an argument",
)
def export_of_a_closure(r, i):
    @refs.jit
    def count(x):
        r[0] += x

    refs.export.export(count)(1.0)


@raises(
    errors.RefTypeError,
    "export of `make`, which returns a ref (created at FILE:N), a ref that it makes: return its "
    "value, and make the ref where the program is called",
)
def export_of_a_function_that_makes_a_ref(r, i):
    def make(r):
        r[0] = 1
        return refs.new_ref(r[...])

    refs.export.export(refs.jit(make))(r)


@raises(
    errors.RefTypeError,
    "export of `add` over refs of a pack: export it over the refs' types, "
    "`refs.tree.abstract(state)`, and call it with any refs",
)
def export_over_a_pack(r, i):
    refs.export.export(add)(*refs.pack([X, X]))


@raises(
    errors.RefTypeError,
    "export.call of `f`, a program of arrays: call it itself, `exported.call(...)`",
)
def call_of_an_exported_program_of_arrays(r, i):
    def f(x):
        return x

    refs.export.call(jax.export.export(jax.jit(f))(X))


@raises(
    errors.RefValueError,
    "call of the exported `add` with arguments of the structure PyTreeDef(((*,), {})): it was "
    "exported for PyTreeDef(((*, *), {}))",
)
def exported_program_with_other_arguments(r, i):
    refs.export.call(refs.export.export(add)(r, i))(r)


@raises(
    errors.RefTypeError,
    "call of the exported `add` with an array where a ref is expected: make one with "
    "`refs.new_ref`",
)
def exported_program_with_an_array_for_a_ref(r, i):
    refs.export.call(refs.export.export(add)(r, i))(r, X)


@raises(
    errors.RefValueError,
    "call of the exported `add` with ref `r` (created at FILE:N), and with other aliases among its "
    "refs than it was exported with: the same ref stands where two do, or two where one does",
)
def exported_program_with_other_aliases(r, i):
    refs.export.call(refs.export.export(add)(r, i))(r, r)


@raises(
    errors.RefValueError,
    "call of the exported `add` with ref `i` (created at FILE:N), of shape (3,) and dtype int8: "
    "float32[3] is expected there",
)
def exported_program_with_a_ref_of_another_type(r, i):
    refs.export.call(refs.export.export(add)(r, refs.new_ref(X)))(r, i)


@raises(
    errors.RefTypeError,
    "export.call of a bytes: it takes a jax.export.Exported. Of what `serialize` has given, "
    "`refs.export.deserialize(blob)` makes one",
)
def call_of_what_is_serialized(r, i):
    refs.export.call(b"")


@raises(
    errors.RefIndexError,
    "get of a ref (created at FILE:N): whether `0:10:` lies inside an axis of size b isn't known: "
    "say so of the symbol, `jax.export.symbolic_shape(..., constraints=['b >= 10'])`, or use "
    "`jax.ds`",
)
def slice_of_a_symbolic_axis(r, i):
    (b,) = jax.export.symbolic_shape("b")
    refs.jit(lambda w: w[0:10]).trace(jax.ShapeDtypeStruct((b,), X.dtype, is_ref=True))


@raises(errors.RefValueError, "get of a ref (created at FILE:N): the step of a slice can't be 0")
def slice_of_a_symbolic_axis_without_a_step(r, i):
    (b,) = jax.export.symbolic_shape("b")
    refs.jit(lambda w: w[::0]).trace(jax.ShapeDtypeStruct((b,), X.dtype, is_ref=True))


@raises(
    TypeError,
    "cannot pickle or deepcopy what is compiled of `bump`: it belongs to this process. "
    "`refs.export.export` makes bytes of a function",
)
def pickle_of_a_compiled_function(r, i):
    def bump(r):
        r[...] += 1.0

    pickle.dumps(refs.jit(bump).lower(r).compile())
