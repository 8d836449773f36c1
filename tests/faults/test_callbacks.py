"""Callbacks that raise, and callbacks that touch refs: the running call's, and others."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import refs
from refs.errors import RefStateError
from tests.faults.harness import Switch, held, is_caused_by, times, within_limit


def ref(name, n=3):
    return refs.new_ref(jnp.zeros(n, jnp.int32), name=name)


# --- Programs with a callback ---------------------------------------------------------------------

KINDS = {
    "pure": lambda host, x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "io": lambda host, x: io_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "ordered": lambda host, x: io_callback(
        host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True
    ),
    "debug": lambda host, x: (jax.debug.callback(lambda x: (host(x), None)[1], x), x + 1)[1],
}


def at_top(body, x):
    body(x)


def in_a_scan(body, x):
    lax.scan(lambda c, _: (c, body(x)), 0, length=1)


def in_a_branch(body, x):
    lax.cond(x[0] >= 0, lambda: body(x), lambda: None)


def on_another_thread(body, x):
    """XLA runs the two halves of a step on threads of its own, if they are long enough."""

    def step(carry, _):
        body(carry[0])
        return (jnp.sin(carry[0]), jnp.sort(carry[1])), None

    lax.scan(step, (jnp.zeros(100_000), jnp.ones(100_000)), length=1)


PLACES = at_top, in_a_scan, in_a_branch, on_another_thread
places = pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind, place, host, a, b=None):
    """A step that adds 1 to `a` (and `b`), by way of a callback that runs `host()` first."""

    def call(x):
        host()
        return np.asarray(x) + 1

    @refs.jit
    def step(b):
        def body(trigger):
            new = KINDS[kind](call, a[...] + (trigger[0] * 0).astype(jnp.int32))
            a[...] = new
            if b is not None:
                b[...] += new - a[...] + 1

        place(body, a[...])

    return lambda: step(b)


# --- Callbacks that raise -------------------------------------------------------------------------


@places
@kinds
def test_a_callback_that_raises(kind, place):
    a, b, host = ref("a"), ref("b"), Switch()
    step = made(kind, place, host, a, b)
    step()
    for error in ZeroDivisionError, KeyboardInterrupt:
        host.error = error
        before = held(a)
        with pytest.raises(BaseException, match="on purpose"):
            within_limit(step)
        assert held(a) == held(b) == before
        host.error = None
        step()
        assert held(a) == held(b) == before + 1


@places
def test_the_first_call_raises(place):
    a, b, host = ref("a"), ref("b"), Switch()
    host.error = ZeroDivisionError
    step = made("pure", place, host, a, b)
    with pytest.raises(Exception, match="on purpose"):
        within_limit(step)
    assert held(a) == held(b) == 0
    host.error = None
    step()
    assert held(a) == held(b) == 1


@pytest.mark.parametrize("place", [at_top, in_a_scan], ids=lambda f: f.__name__)
@kinds
def test_many_callbacks_that_raise(kind, place):
    a, b, host = ref("a"), ref("b"), Switch()
    step = made(kind, place, host, a, b)
    step()
    good = 1
    for k in range(times(100, 1000)):
        host.error = ZeroDivisionError
        with pytest.raises(Exception, match="on purpose"):
            step()
        assert held(a) == held(b) == good
        host.error = None
        if k % 10 == 0:
            step()
            good += 1
    step()
    assert held(a) == held(b) == good + 1


def test_a_callback_that_keeps_what_it_is_given():
    a, kept = ref("a"), []
    step = refs.jit(lambda: a.at[...].add(KINDS["pure"](lambda x: kept.append(x) or x, a[...]) + 1))
    step()
    step()
    assert held(a) == 3
    assert [np.asarray(x).tolist() for x in kept] == [[0] * 3, [1] * 3]


# --- Callbacks that touch another ref -------------------------------------------------------------

add = refs.jit(lambda r: r.at[...].add(1))


def copied(r):
    """Writes to another ref what it reads of `r`."""
    ref("copy").set(r[...])


READS = {
    "read": lambda r: r[...],
    "np.asarray": np.asarray,
    "reading step": refs.jit(copied),
    "reading checkpoint": lambda r: refs.checkpoint(lambda q: q.set(r[...]))(ref("copy")),
    "reading branch": lambda r: refs.cond(
        jnp.array(True), lambda q: q.set(r[...]), lambda q: None, ref("copy")
    ),
    "reading lanes": lambda r: refs.vmap(lambda q: q.set(r[0]))(ref("copy")),
}
TOUCHES = {
    **READS,
    "iadd": lambda r: r.__setitem__(..., r[...] + 1),
    "addupdate": lambda r: refs.addupdate(r, ..., 1),
    "swap": lambda r: refs.swap(r, ..., r[...] + 1),
    "step": add,
    "first call of a step": lambda r: refs.jit(lambda: r.at[...].add(1))(),
    "checkpoint": lambda r: refs.checkpoint(lambda: r.addupdate(1))(),
    "loop": lambda r: refs.fori_loop(0, 1, lambda k, c: r.addupdate(1), None),
    "gradient": lambda r: refs.grad(lambda x: (r.addupdate(1), x)[1])(1.0),
}
WRITES = [name for name in TOUCHES if name not in READS]
touches = pytest.mark.parametrize("touch", TOUCHES)


@places
@touches
def test_a_callback_that_touches_another_ref(touch, place):
    a, other = ref("a"), ref("other")
    add(other)
    step = made("io", place, lambda: TOUCHES[touch](other), a)
    for k in range(3):
        within_limit(step)
        assert held(a) == k + 1
        assert held(other) == (k + 2 if touch in WRITES else 1)


def test_a_callback_whose_own_callback_raises():
    """The inner call fails, and with it the outer: both have their old values."""
    a, inner, host = ref("a"), ref("inner"), Switch()
    nested = made("pure", at_top, host, inner)
    step = made("io", in_a_scan, nested, a)
    within_limit(step)
    host.error = ZeroDivisionError
    with pytest.raises(Exception, match="on purpose"):
        within_limit(step)
    assert held(a) == held(inner) == 1
    host.error = None
    within_limit(step)
    assert held(a) == held(inner) == 2


def test_a_callback_that_makes_and_drops_refs():
    a = ref("a")
    step = made("io", in_a_scan, lambda: add(ref("short-lived")), a)
    for _ in range(10):
        within_limit(step)
    assert held(a) == 10


def test_a_callback_that_leaves_the_work_to_another_thread():
    a, other = ref("a"), ref("other")

    def host():
        worker = threading.Thread(target=add, args=(other,))
        worker.start()
        worker.join()

    step = made("io", at_top, host, a)
    for k in range(3):
        within_limit(step)
        assert held(a) == held(other) == k + 1


# --- Callbacks that touch the running call's own ref ----------------------------------------------


@places
@touches
def test_a_callback_that_touches_the_ref_that_its_call_updates(touch, place):
    a, b = ref("a"), ref("b")
    meddle, seen = [False], []

    def host():
        if meddle[0]:
            try:
                TOUCHES[touch](a)
            except RefStateError as error:
                seen.append(str(error))
                raise

    step = made("io", place, host, a, b)
    within_limit(step)
    meddle[0] = True
    with pytest.raises(Exception) as caught:  # noqa: PT011  # JAX's own, which quotes ours
        within_limit(step)
    assert is_caused_by(caught.value, RefStateError)
    assert "`a` (created at" in seen[0]
    assert held(a) == held(b) == 1
    meddle[0] = False
    within_limit(step)
    assert held(a) == held(b) == 2


@touches
def test_a_callback_that_gets_over_it(touch):
    """It catches the error: then the call goes on, and the ref gets its new value."""
    a, refused = ref("a"), []

    def host():
        try:
            TOUCHES[touch](a)
        except RefStateError as error:
            refused.append(error)

    step = made("io", at_top, host, a)
    for k in range(3):
        within_limit(step)
        assert held(a) == k + 1 == len(refused)


def test_what_is_in_use_is_not_called_lost():
    a, said = ref("a"), []

    def host():
        with pytest.raises(RefStateError) as caught:
            a[...]
        said.append(str(caught.value))

    within_limit(made("io", at_top, host, a))
    assert "lost" not in said[0]


@pytest.mark.parametrize("touch", ["read", "np.asarray"])
@places
def test_a_callback_that_reads_what_its_call_only_reads(touch, place):
    a, read, seen = ref("a"), ref("read"), []
    add(read)

    @refs.jit
    def step():
        def body(trigger):
            def host(x):
                seen.append(np.asarray(TOUCHES[touch](read)).tolist())
                return np.asarray(x)

            a[...] += KINDS["io"](host, read[...])

        place(body, a[...])

    within_limit(step)
    assert held(a) == 1
    assert seen == [[1, 1, 1]]


@pytest.mark.parametrize("touch", ["addupdate", "swap", "step"])
def test_a_callback_that_writes_what_its_call_only_reads(touch):
    """It goes through or is refused; the running call has read the old value in either case."""
    a, read, refused = ref("a"), ref("read"), []
    add(read)

    def host(x):
        try:
            TOUCHES[touch](read)
        except RefStateError as error:
            refused.append(error)
        return np.asarray(x)

    step = refs.jit(lambda: a.at[...].add(KINDS["io"](host, read[...]) + read[...]))
    within_limit(step)
    assert held(a) == 2
    assert held(read) == (1 if refused else 2)


def test_a_callback_that_ends_its_calls_ref():
    a, b = ref("a"), ref("b")
    for end in refs.freeze, refs.free_ref:
        step = made("io", at_top, lambda end=end: end(a), a, b)
        with pytest.raises(Exception, match="RefStateError"):
            within_limit(step)
        assert held(a) == held(b) == 0
