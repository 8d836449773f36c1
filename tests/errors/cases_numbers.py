"""Errors about scalars, dtypes and what else a ref is made and read as. See `test_errors.py`."""

import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import refs
from refs import _jax, errors
from tests.errors.case import X, raises

# --- Making ---------------------------------------------------------------------------------------


@raises(
    errors.RefTypeError,
    "new_ref of an array of dtype float0, which holds no numbers: it stands for a derivative that "
    "there is none of. Make a ref of zeros, `jnp.zeros(x.shape)`",
)
def ref_of_float0(r, i):
    refs.new_ref(np.zeros((), jax.dtypes.float0))


@raises(
    errors.RefValueError,
    "new_ref with pin=True outside of a traced function, which has no pinned buffers: leave it out",
)
def pinned_ref_outside_of_a_trace(r, i):
    with mock.patch.object(_jax, "can_pin", True):
        refs.new_ref(X, pin=True)


@raises(
    errors.RefValueError,
    "new_ref with pin=True with JAX 0.10.2, which has no pinned buffers: leave it out",
)
def pinned_ref_on_an_older_jax(r, i):
    with mock.patch.object(_jax, "can_pin", False), mock.patch.object(jax, "__version__", "0.10.2"):
        refs.jit(lambda: refs.new_ref(X, pin=True)[...])()


@raises(
    errors.RefValueError,
    "empty_ref with pin=True outside of a traced function, which has no pinned buffers: leave it "
    "out",
)
def pinned_empty_ref_outside_of_a_trace(r, i):
    with mock.patch.object(_jax, "can_pin", True):
        refs.empty_ref(X, pin=True)


# --- Reading as something of Python's own ---------------------------------------------------------


@raises(
    errors.RefTypeError,
    "float() of ref `r` (created at FILE:N), of shape (3,): only a scalar is a Python number. Take "
    "an element, `float(ref[i])`",
)
def float_of_an_array(r, i):
    float(r)


@raises(
    errors.RefTypeError,
    "math.trunc() of ref `r` (created at FILE:N), of shape (3,): only a scalar is a Python number. "
    "Take an element, `math.trunc(ref[i])`",
)
def trunc_of_an_array(r, i):
    math.trunc(r)


@raises(
    errors.RefTypeError,
    "ref `x` (created at FILE:N), of dtype float32, as an index: only integers are. Convert its "
    "value, `int(ref[...])`",
)
def index_of_a_float(r, i):
    range(refs.new_ref(1.0, name="x"))


@raises(
    errors.RefTypeError,
    "format '.3f' of ref `r` (created at FILE:N), of shape (3,): it is a scalar's. Format each of "
    "its elements",
)
def format_of_an_array(r, i):
    print(f"{r:.3f}")


@raises(
    jax.errors.ConcretizationTypeError,
    """Abstract tracer value encountered where concrete value is expected: traced array with shape float32[]
The problem arose with float() of ref `x` (created at FILE:N): what it holds is known when the program runs, not while it is traced.

""",  # noqa: E501
)
def float_in_a_trace(r, i):
    refs.jit(float)(refs.new_ref(1.0, name="x"))


@raises(
    ValueError,
    "an array of ref `r` (created at FILE:N) without a copy: each read is one, so that later "
    "writes don't change it. Leave `copy=False` out, or use `refs.io_callback`, which is given the "
    "ref's own memory",
)
def array_without_a_copy(r, i):
    r.__array__(copy=False)


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): an index can't be a Ref: index with its value, "
    "`ref[i[...]]`",
)
def slice_from_a_ref(r, i):
    r[jax.ds(refs.new_ref(1), 2)]


# --- 64 bits --------------------------------------------------------------------------------------


def wide():
    with jax.enable_x64(True):
        return refs.new_ref(np.arange(3.0), name="wide")


WIDE = (
    " of ref `wide` (created at FILE:N): it is of dtype float64, where 64-bit types are disabled: "
    "the new value would have 32 bits. Write it as it was made, in `with jax.enable_x64(True):`"
)


@raises(errors.RefTypeError, "set" + WIDE)
def write_of_64_bits_where_there_are_32(r, i):
    wide()[...] = 1


@raises(errors.RefTypeError, "multiply" + WIDE)
def update_of_64_bits_where_there_are_32(r, i):
    refs.jit(lambda r: r.at[0].multiply(2.0))(wide())


# --- Ends -----------------------------------------------------------------------------------------


@raises(
    errors.RefStateError,
    "free_ref of ref `made` (created at FILE:N), which was freed at FILE:N",
)
def freed_twice_in_a_trace(r, i):
    def program():
        made = refs.new_ref(jnp.zeros(3), name="made")
        refs.free_ref(made)
        refs.free_ref(made)

    refs.jit(program)()


@raises(errors.RefStateError, "free_ref of a ref, which has ended already")
def native_freed_twice(r, i):
    native = jax.new_ref(X)
    refs.free_ref(native)
    refs.free_ref(native)


@raises(FloatingPointError, "invalid value (nan) encountered in jit(unknown)")
def nan_that_no_operation_of_a_compiled_function_makes(r, i):
    @jax.jit
    def unknown(x):
        return math.nan

    with jax.debug_nans(True):
        refs.jit(lambda r: refs.addupdate(r, ..., unknown(1.0)))(r)
