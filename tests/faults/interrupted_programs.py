"""The programs that are interrupted: each makes a step of several counters. See `Counters`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import refs
from refs import _jax
from refs._buffers.stores import store_of
from refs._callbacks import eager
from tests.faults.harness import Counters, add_one

PROGRAMS = {}


def program(make):
    """Registers a program: given counters, it returns a function that adds 1 to each of them."""
    PROGRAMS[make.__name__] = make
    return make


@program
def closed_over(counters):
    return refs.jit(lambda: add_one(*counters.refs))


@program
def arguments_and_results(counters):
    x = jnp.arange(3)

    @refs.jit
    def step(tree, x, y):
        for r in tree["refs"]:
            r[...] += 1
        return {"sum": x + y, "first": tree["refs"][0][...]}, x * y

    return lambda: step({"refs": counters.refs}, x, y=np.float32(2))


@program
def aliased(counters):
    first, *rest = counters.refs

    @refs.jit
    def step(a, others, b):
        b[...] += 1  # a and b are one, and that is closed over as well
        first[...] += a[...] - b[...]
        for r in others:
            r[...] += 1

    return lambda: step(first, rest, first)


@program
def views(counters):
    step = refs.jit(lambda views: [v.add(1) for v in views] and None)
    return lambda: step([r.at[...] for r in counters.refs])


@program
def returned_refs(counters):
    @refs.jit
    def step(held):
        for r in held:
            r[...] += 1
        return held[0], refs.new_ref(held[1][...]), held[2][...]

    return lambda: step(counters.refs)


@program
def overlapping(counters):
    """Another function writes some of them, in another order."""
    whole = refs.jit(add_one)
    part = refs.jit(lambda *held: [r.at[...].add(0) for r in held] and None)

    def both():
        part(*counters.refs[3:0:-1])
        whole(*counters.refs)

    return both


@program
def that_reads(counters):
    """Two more refs, which the call only reads."""
    ones = [refs.new_ref(jnp.int32(k)) for k in (0, 1)]
    part = refs.jit(lambda *held: [r.at[...].add(0) for r in held] and None)

    @refs.jit
    def whole():
        for r in counters.refs:
            r[...] += ones[0][...] + ones[1][...]

    def both():
        part(*counters.refs[3:0:-1])
        whole()

    for _ in range(6):
        both()
    return both


@program
def with_a_callback(counters):
    def host(x):
        return np.asarray(x) + 1

    @refs.jit
    def step():
        for r in counters.refs[:2]:
            r[...] = jax.pure_callback(host, jax.ShapeDtypeStruct(r.shape, r.dtype), r[...])
        for r in counters.refs[2:]:
            r[...] += 1

    return step


@program
def several_types_in_turn(counters):
    """Each call is of another type than the last, so that no call finds what the last one left."""
    turns = [0]
    xs = [jnp.zeros(n, jnp.int32) for n in (1, 2)]

    @refs.jit
    def step(held, x):
        for r in held:
            r[...] += 1 + jnp.sum(x)

    def turn():
        turns[0] += 1
        step(counters.refs, xs[turns[0] % 2])

    return turn


@program
def long_running(counters):
    """Most interrupts come while XLA is at work, and are raised when it returns."""

    @refs.jit
    def step():
        total = jax.lax.fori_loop(0, 2000, lambda k, x: x + jnp.sin(x), jnp.ones(50))
        for r in counters.refs:
            r[...] += jnp.where(jnp.isnan(total[0]), 2, 1)

    return step


@program
def a_callback_at_top_level(counters):
    refs.jit(add_one)(*counters.refs, refs.new_ref(0))

    def host(held):
        for x in held:
            x += 1

    return lambda: refs.io_callback(host, None, counters.refs)


# --- First calls ----------------------------------------------------------------------------------
# JAX traces and compiles, and then runs the program from Python: many places, and slow.


@program
def first_calls(counters):
    """Each call is the first one of its function, which is traced and compiled."""

    def step():
        one = np.int32(1)  # a new function, which nobody has a cache for
        refs.jit(lambda: [r.at[...].add(one) for r in counters.refs] and None)()

    return step


@program
def at_top_level(counters):
    """A transformation outside of `refs.jit`: traced in each call, and run op by op."""

    def loss(x):
        add_one(*counters.refs)
        return x**2

    return lambda: refs.vjp(loss, 2.0)


@program
def at_top_level_that_reads(counters):
    """What it reads was written together with what it writes."""
    one = refs.new_ref(jnp.int32(0))
    refs.jit(add_one)(*counters.refs, one)

    def loss(x):
        for r in counters.refs:
            r[...] += one[...]
        return x**2

    return lambda: refs.vjp(loss, 2.0)


@program
def a_first_callback_at_top_level(counters):
    """Each call renews the buffers by a program that runs for the first time."""
    step = a_callback_at_top_level(counters)

    def first():
        _jax.forget_fast_path(eager._alone)
        step()

    return first


@program
def cleared(counters):
    """JAX has forgotten its programs, as it does where a context or a placement is new to it."""
    step = refs.jit(add_one)

    def again():
        jax.clear_caches()
        step(*counters.refs)

    return again


@program
def a_first_callback_in_jit(counters):
    """The refs are large, so that no copies are kept. Each call is the first of its function."""

    def host(held):
        for x in held:
            x += 1

    return lambda: refs.jit(lambda held: refs.io_callback(host, None, held))(counters.refs)


# --- Eager operations -----------------------------------------------------------------------------
# Each is a transaction of its own, on one ref.

EAGER = {
    "iadd": lambda r: r.__setitem__(..., r[...] + 1),
    "set": lambda r: refs.set(r, ..., np.asarray(r) + 1),
    "addupdate": lambda r: refs.addupdate(r, ..., 1),
    "at_add": lambda r: r.at[...].add(1),
    "at_apply": lambda r: r.at[...].apply(lambda x: x + 1),
    "swap": lambda r: refs.swap(r, ..., np.asarray(r) + 1),
    "masked": lambda r: r.at[np.ones(3, bool)].add(1),
}


def with_new_kernels(operation):
    """An operation whose kernels are all compiled, and run for the first time."""

    def step(r):
        store_of(r).kernels.updaters.clear()
        operation(r)

    return step


def cleared_update(r):
    jax.clear_caches()
    refs.addupdate(r, ..., 1)


FIRST_EAGER = {f"first_{name}": with_new_kernels(EAGER[name]) for name in ("addupdate", "swap")}
FIRST_EAGER["cleared_addupdate"] = cleared_update

FIRST = ["first_calls", "at_top_level", "at_top_level_that_reads"]
# Their kernels run for the first time, which makes signals wait.
FIRST_RUNS = [
    *FIRST_EAGER,
    "a_first_callback_at_top_level",
    "a_first_callback_in_jit",
    "cleared",
]
CALLS = [name for name in PROGRAMS if name not in (*FIRST, *FIRST_RUNS)]

# The same, of counters some of which share a buffer.
PACKED = [f"packed_{name}" for name in ("closed_over", "arguments_and_results", "aliased", "views")]
PACKED_EAGER = [f"packed_{name}" for name in EAGER]
PACKED_FIRST = [f"packed_{name}" for name in FIRST]


def made(name):
    """Counters, and a step of them that has been called before."""
    is_packed, name = name.startswith("packed_"), name.removeprefix("packed_")
    if name in EAGER | FIRST_EAGER:
        counters = Counters([(3,)], packed=int(is_packed))
        step = functools.partial((EAGER | FIRST_EAGER)[name], *counters.refs)
    elif is_packed:
        counters = Counters(packed=3)
        step = PROGRAMS[name](counters)
    else:
        counters = Counters([(20_000,)] if name == "a_first_callback_in_jit" else Counters.SHAPES)
        step = PROGRAMS[name](counters)
    step()
    step()  # `several_types_in_turn` has two kinds of calls
    return counters, step
