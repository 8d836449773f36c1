"""Errors about the life of a ref. See `test_errors.py`."""

import runpy
import sys
import threading
from unittest import mock

import jax
import numpy as np

import refs
from refs import _jax, errors
from refs._buffers import exchange, records, waiting
from refs._buffers.operations import buffer_of
from refs._jit.running import quick_call
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
    local(lambda ref: buffer_of(ref).delete())[0]


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
    [program] = step.lower.args[1].__self__.table.programs()

    def consume(state):
        state[0].delete()
        raise MemoryError("on purpose")

    consume._clear_cache = lambda: None  # as jax.jit's
    program.compiled = consume
    program.call = quick_call(program, is_one_of_many=False)
    step.lower.args[1].__self__.table.changed()
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
    exchange.exchange_one(ref._store.cell, lambda held: ref[0])


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
    exchange.exchange([], write, ([],), [ref._store.cell], [], calls_back=True)


@raises(
    errors.RefTypeError,
    "get of a part of ref `r` (created at FILE:N): a view has methods for it, `view.get(…)`, or "
    "`view.at[i]` for a part of the part",
)
def function_of_a_ref_on_a_view(r, i):
    refs.get(r.at[1:], 0)


def holding(ref, use):
    """`use()` while another thread holds a ref, and nobody waits long."""
    taken, may_go_on = threading.Event(), threading.Event()

    def hold(held):
        taken.set()
        may_go_on.wait()
        return held, None

    cell = ref._store.cell
    thread = threading.Thread(target=exchange.exchange_one, args=(cell, hold), name="other")
    thread.start()
    taken.wait()
    try:
        with mock.patch.object(waiting, "LIMIT", 0.05):
            use()
    finally:
        may_go_on.set()
        thread.join()


@raises(
    errors.RefStateError,
    "use of ref `local` (created at FILE:N), after 0.05 s in which a call in thread 'other', at "
    "FILE:N, hasn't given it back: perhaps a callback of that call waits for this one",
)
def use_of_a_ref_that_another_thread_does_not_give_back(r, i):
    ref = local()
    holding(ref, lambda: ref[0])


@raises(
    errors.RefStateError,
    "use of ref `local` (created at FILE:N), after 0.05 s in which others have used it",
)
def use_of_a_ref_that_others_always_use(r, i):
    def attempt():
        raise exchange.Busy

    with mock.patch.object(waiting, "LIMIT", 0.05):
        waiting.patiently(attempt, [local()])


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
    ImportError,
    "refs needs a Python whose lists keep what they got from an iterator before it raised: a call "
    "that finds a ref in use would lose the values of those before it. CPython does",
)
def lists_that_lose_what_they_got(r, i):
    exchange.check_taking(lambda held, items: held.extend([*items]))


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
