"""Errors about the life of a ref, and the places where it can't go. See `test_errors.py`."""

import runpy
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs
from refs import _jax, errors
from refs._buffers import exchange, records
from refs._jit.ways import prepare
from tests.errors.case import X, raises

# --- The life of a ref ----------------------------------------------------------------------------


def local(end=None):
    ref = refs.new_ref(X, name="local")
    if end is not None:
        end(ref)
    return ref


@raises(errors.RefStateError, "use of ref `local` (created at FILE:N), which was frozen at FILE:N")
def read_after_freeze(r, i):
    local(refs.freeze)[0]


@raises(errors.RefStateError, "use of ref `local` (created at FILE:N), which was freed at FILE:N")
def write_after_free(r, i):
    local(refs.free_ref)[0] = 1


@raises(errors.RefStateError, "use of ref `local` (created at FILE:N), which was frozen at FILE:N")
def argument_after_freeze(r, i):
    step = refs.jit(lambda q: r.at[0].add(q[0]))
    frozen = local()
    step.lower(frozen)
    refs.freeze(frozen)
    step(frozen)


@raises(errors.RefStateError, "use of ref `local` (created at FILE:N), which was freed at FILE:N")
def closed_over_after_free(r, i):
    mine = local()
    step = refs.jit(lambda: (r.at[0].add(1), mine[0]))
    step.lower()
    refs.free_ref(mine)
    step()


@raises(
    errors.RefStateError,
    "use of ref `local` (created at FILE:N), whose value was lost: its buffer was donated by "
    "hand. Keep a checkpoint, `ref[...]`, where a step can fail",
)
def use_of_a_lost_ref(r, i):
    local(lambda ref: ref._buffer().delete())[0]


@raises(
    errors.RefStateError,
    "use of ref `local` (created at FILE:N), whose value was lost in a call of `step` that "
    "failed with MemoryError('on purpose'). Keep a checkpoint, `ref[...]`, where a step can fail",
)
def use_of_a_ref_lost_in_a_call(r, i):
    ref = local()

    @refs.jit
    def step(ref):
        ref[0] += 1

    step(ref)
    [program] = step.lower.args[1].__self__._all()

    def consume(state):
        state[0].delete()
        raise MemoryError("on purpose")

    consume._clear_cache = lambda: None  # as jax.jit's
    program.executable.compiled = consume
    prepare(program)
    try:
        step(ref)
    except MemoryError:
        ref[0]


@raises(
    errors.RefStateError,
    "use of ref `local` (created at FILE:N), which a call is updating right now, by code that "
    "interrupted that call: the call can't end before this does. Pass it as an argument of "
    "`refs.io_callback`, which is given its memory, or use it when the call has returned",
)
def use_of_a_ref_while_it_is_updated(r, i):
    ref = local()
    exchange.exchange_one(ref._cell, lambda held: ref[0])


@raises(
    errors.RefStateError, "use of a jax.Ref whose value was lost: its array was donated or deleted"
)
def handle_of_jax_whose_array_was_deleted(r, i):
    theirs = jax.new_ref(X)
    _jax.native_buffer(theirs).delete()
    refs.jit(lambda a, b: a.__setitem__(0, b[0]))(r, theirs)


@raises(
    errors.RefStateError,
    "get of ref `local` (created at FILE:N) by code that interrupted JAX itself, a signal handler "
    "for instance: JAX can't run anything before that has returned. Read the value with "
    "`np.asarray(ref)`, or set a flag and look at it between two steps",
)
def use_of_a_ref_while_jax_does_something(r, i):
    ref = local()
    with mock.patch.object(_jax, "trace_state", mock.Mock(value=None)):
        assert np.asarray(ref)[0] == 0
        ref[0]


@raises(
    errors.RefStateError,
    "write to ref `local` (created at FILE:N) by a callback, while a call with callbacks reads it: "
    "it would wait for that call, and the call for this. Return the new value from the callback, "
    "or write it when the call has returned",
)
def write_in_a_callback_of_what_its_call_reads(r, i):
    ref = local()
    write = lambda held, seen: records.called_back(ref.__setitem__, 0, 1)  # noqa: E731
    exchange.exchange([], write, ([],), [ref._cell], [], calls_back=True)


@raises(
    errors.RefTypeError,
    "call of the method step on a Slotted, which is no pytree and can't be referred to weakly: "
    "register the class with `jax.tree_util.register_dataclass`, or give it a slot `__weakref__`",
)
def method_of_what_has_no_weak_references(r, i):
    class Slotted:
        __slots__ = ()

        @refs.jit
        def step(self):
            r[0] += 1

    Slotted().step()


@raises(
    ImportError,
    "refs needs Python's global interpreter lock: what makes its updates atomic are the places "
    "where threads can switch, and a free-threaded Python has other ones. Run with PYTHON_GIL=1, "
    "or use a Python with the lock",
)
def import_without_the_lock(r, i):
    with mock.patch.object(sys, "_is_gil_enabled", create=True, return_value=False):
        runpy.run_path(exchange.__file__)


@raises(
    errors.RefStateError,
    "freeze of ref `r` (created at FILE:N) inside a traced function, which would end it "
    "once, when tracing, and not in each call: freeze it outside, or read `ref[...]`",
)
def freeze_of_an_outer_ref_in_a_trace(r, i):
    refs.jit(lambda: refs.freeze(r))()


@raises(
    errors.RefStateError,
    "freeze of ref `r` (created at FILE:N) inside a traced function that did not make it: "
    "do it where the ref was made, or read `ref[...]`",
)
def freeze_of_an_argument_in_a_trace(r, i):
    refs.jit(lambda q: (q.at[0].add(1), refs.freeze(q)))(r)


@raises(errors.RefStateError, "use of ref `local` (created at FILE:N), which was frozen at FILE:N")
def use_after_freeze_in_a_trace(r, i):
    def program():
        r[0] = 5
        ref = local()
        refs.freeze(ref)
        return ref[0]

    refs.jit(program)()


@raises(errors.RefStateError, "use of ref `local` (created at FILE:N), which was freed at FILE:N")
def write_after_free_in_a_trace(r, i):
    def program():
        ref = local()
        refs.free_ref(ref)
        refs.set(ref, ..., 1)

    refs.jit(program)()


# --- Where refs can't go --------------------------------------------------------------------------


@raises(
    errors.RefEscapeError,
    "set of ref `local` (created at FILE:N) outside the traced function that it belongs to:"
    " there it stands for a value that isn't known yet. Return its value, `ref[...]`, or "
    "return the ref itself from `refs.jit`",
)
def traced_ref_that_outlived_its_trace(r, i):
    kept = []
    refs.jit(lambda: kept.append(local()))()
    kept[0][0] = 1


@raises(
    errors.RefEscapeError,
    "call of ref `r` (created at FILE:N) outside the traced function that it belongs to: "
    "there it stands for a value that isn't known yet. Return its value, `ref[...]`, or "
    "return the ref itself from `refs.jit`",
)
def traced_argument_that_outlived_its_trace(r, i):
    kept = []
    refs.jit(kept.append)(r)
    refs.jit(lambda q: q[0])(kept[0])


@raises(
    errors.RefEscapeError,
    "function <lambda> at FILE:N traced for scan returned a mutable array reference of type"
    " Ref{float32[3]}, ref `r` (created at FILE:N) at output tree path result[1], but "
    "mutable array references cannot be returned.\n\n"
    "the body of a loop, a branch or an inner `jax.jit` can use refs, but not return them: "
    "return the value, `ref[...]`, or use the ref where it is in scope",
)
def returned_from_a_scan_body(r, i):
    refs.jit(lambda r: lax.scan(lambda c, _: (c, r), 0, length=2))(r)


@raises(
    errors.RefEscapeError,
    "function local at FILE:N traced for cond returned a mutable array reference of type"
    " Ref{float32[3]}, ref `local` (created at FILE:N), but mutable array references cannot"
    " be returned.\n\n"
    "the body of a loop, a branch or an inner `jax.jit` can use refs, but not return them: "
    "return the value, `ref[...]`, or use the ref where it is in scope",
)
def returned_from_a_branch(r, i):
    refs.jit(lambda: lax.cond(True, local, local))()


@raises(
    errors.RefEscapeError,
    "function <lambda> at FILE:N traced for jit returned a mutable array reference of type "
    "Ref{float32[3]}, ref `r` (created at FILE:N), but mutable array references cannot be "
    "returned.\n\n"
    "the body of a loop, a branch or an inner `jax.jit` can use refs, but not return them: "
    "return the value, `ref[...]`, or use the ref where it is in scope",
)
def returned_from_an_inner_jit(r, i):
    refs.jit(lambda r: (r.at[0].add(1), jax.jit(lambda q: q)(r)))(r)


@raises(
    errors.RefEscapeError,
    "only one reference to a mutable array may be passed as an argument to a function, but "
    "when tracing <lambda> at FILE:N for jit the mutable array reference of type "
    "Ref{float32[3]}, ref `r` (created at FILE:N) appeared at both a and b.\n\n"
    "JAX's own functions take each ref once, either as an argument or closed over: close "
    "over the ref, or use `refs.jit`, which takes it any number of times. A loop over the rows of "
    "a ref that it uses besides can run over indices, and read `ref[i]`",
)
def passed_twice_to_an_inner_jit(r, i):
    refs.jit(lambda r: jax.jit(lambda a, b: a[0] + b[0])(r, r))(r)


@raises(
    errors.RefTypeError,
    "static argument 0 holds ref `r` (created at FILE:N): a static argument is part of the "
    "compiled program, and a ref changes. Pass it as an ordinary argument",
)
def static_argument(r, i):
    refs.jit(lambda q, x: x, static_argnums=0)(r, 1)


@raises(
    errors.RefTypeError,
    "static argument 'q' holds ref `r` (created at FILE:N): a static argument is part of "
    "the compiled program, and a ref changes. Pass it as an ordinary argument",
)
def static_argument_by_name(r, i):
    refs.jit(lambda *, q: 1, static_argnames="q")(q=(1, r))


@raises(
    errors.RefValueError,
    "Non-hashable static arguments are not supported: argument 1 is of type list: make it "
    "hashable, a tuple for instance, or don't make it static",
)
def static_argument_without_a_hash(r, i):
    refs.jit(lambda q, x: x, static_argnums=1)(r, [1])


@raises(
    errors.RefStateError,
    "trace of `step` under `jax.disable_jit`, where a function is run as it is: trace, lower or "
    "compile it outside",
)
def lowering_without_jit(r, i):
    def step():
        r[0] = 1.0

    with jax.disable_jit():
        refs.jit(step).lower()


@raises(errors.RefTypeError, "Expected a callable value, got 3, for jit")
def jit_of_no_function(r, i):
    refs.jit(3)


@raises(
    errors.RefTypeError,
    "a compiled function was called with arguments of other types, or other aliases among its "
    "refs, than it was compiled for, or with static ones, which it has already:\n"
    "Argument args[0] compiled with Ref{float32[3]} and called with Ref{int8[3]}\n"
    "Argument kwargs['k'][1] compiled with ~float32[] and called with ~int32[]",
)
def compiled_for_others(r, i):
    refs.jit(lambda q, k: q[0]).lower(r, k=(1, 2.0)).compile()(i, k=(1, 2))


@raises(
    errors.RefTypeError,
    "a jax.ShapeDtypeStruct with is_ref stands for no ref in particular: pass a ref, "
    "`refs.empty_ref(...)` for instance. `trace`, `lower` and `eval_shape` of a `refs.jit` "
    "function take it",
)
def abstract_ref(r, i):
    refs.jit(lambda q: q[0])(jax.ShapeDtypeStruct((3,), jnp.float32, is_ref=True))


@raises(
    errors.RefTypeError,
    "Found a JAX Tracer object passed as an argument to a custom_vjp function in a position "
    "indicated by nondiff_argnums as non-differentiable. Tracers cannot be passed as "
    "non-differentiable arguments to custom_vjp functions; instead, nondiff_argnums should only be "
    "used for arguments that can't be or contain JAX tracers, e.g. function-valued arguments. In "
    "particular, array-valued arguments should typically not be indicated as nondiff_argnums."
    "\n\n\n"
    "a ref that is an argument of the traced function, of `refs.jit` for instance, is such a "
    "tracer: let the custom function take it as an ordinary argument, whose rules may read and "
    "write it all the same, or close over the ref",
)
def traced_ref_in_nondiff_argnums(r, i):
    f = jax.custom_vjp(lambda r, x: x, nondiff_argnums=(0,))
    f.defvjp(lambda r, x: (x, None), lambda r, _, g: (g,))
    refs.jit(refs.grad(f, 1))(r, 1.0)


@raises(
    errors.RefTypeError,
    "pack of a tree with ref `r` (created at FILE:N): a ref can't hold a ref. Give its value, "
    "`refs.pack(jax.tree.map(lambda ref: ref[...], tree))`",
)
def pack_of_a_ref(r, i):
    refs.pack({"a": 1.0, "b": r})


@raises(
    errors.RefTypeError,
    "pack of a tree with a str at `p['b']`: its leaves are arrays and scalars. Take out what is "
    "none",
)
def pack_of_a_string(r, i):
    refs.pack({"a": 1.0, "b": "x"}, name="p")
