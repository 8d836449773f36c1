"""refs.jit and the state's memory: in place, freed when it can be, nothing lost in a failure."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs._buffers.operations import buffer_of

pytestmark = pytest.mark.as_released

X = np.arange(4, dtype=np.float32)


def ref(name=None):
    return refs.new_ref(X, name=name)


def holds(r, *values):
    np.testing.assert_array_equal(np.array(r[...]), np.float32(values))


# --- In place -------------------------------------------------------------------------------------


def aliases(compiled):
    """Input numbers that the compiled program aliases to outputs."""
    header = compiled.as_text().split("\n", 1)[0]
    found = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header)
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", found.group(1)) if found else []
    return {int(i): int(o or 0) for o, i in pairs}


def test_every_written_ref_is_aliased_and_no_read_only_one():
    written = [refs.new_ref(jnp.full((k + 1,), k, jnp.float32)) for k in range(4)]
    same_type = [refs.new_ref(jnp.zeros(3)) for _ in range(3)]
    read = [refs.new_ref(jnp.ones(3)) for _ in range(2)]
    untouched = refs.new_ref(jnp.ones(3))

    @refs.jit
    def step(written, read, untouched, x):
        total = sum(r[0] for r in read)
        for r in written:
            r[0] += total
        same_type[0][...] = x
        same_type[1][1] = x[0]
        same_type[2][...] += read[0][...]
        return x, total, jnp.zeros(3)

    compiled = step.lower(written, read, untouched, jnp.ones(3)).compile()
    # State comes first among inputs and outputs: 4 passed, 3 closed over.
    assert aliases(compiled) == {k: k for k in range(7)}
    read_pointers = [r.unsafe_buffer_pointer() for r in (*read, untouched)]
    kept = [buffer_of(r) for r in (*read, untouched)]
    step(written, read, untouched, jnp.ones(3))
    assert [r.unsafe_buffer_pointer() for r in (*read, untouched)] == read_pointers
    assert not any(b.is_deleted() for b in kept)
    np.testing.assert_array_equal(same_type[2][...], [1, 1, 1])


def test_a_thousand_steps_move_nothing():
    sizes = [1, 2, 3, 7, 10, 31, 64, 100, 128, 333, 10**3, 2000, 4096, 5555, 10**4, 30_000,
             65_536, 10**5, 300_000, 10**6]  # fmt: skip
    assert len(sizes) == 20
    tree = {f"r{n}": refs.new_ref(jnp.zeros(n)) for n in sizes}

    @refs.jit
    def step(tree, k):
        for r in tree.values():
            r[k % r.size] += 1
        tree["r7"][...] *= 1

    step(tree, 0)
    pointers = {k: r.unsafe_buffer_pointer() for k, r in tree.items()}
    for k in range(1, 1000):
        step(tree, k)
    assert {k: r.unsafe_buffer_pointer() for k, r in tree.items()} == pointers
    for n, r in zip(sizes, tree.values(), strict=True):
        assert float(jnp.sum(r[...])) == 1000, n


def test_eager_and_jitted_steps_share_the_buffer():
    r = ref()
    pointer = r.unsafe_buffer_pointer()
    step = refs.jit(lambda: r.at[0].add(1))
    for _ in range(3):
        step()
        r[1] += 1
        r[...] += 1
    assert r.unsafe_buffer_pointer() == pointer
    holds(r, 6, 7, 5, 6)


def test_the_buffer_is_freed_with_the_refs_and_the_function():
    def make():
        r = ref()
        step = refs.jit(r.at[0].set)
        step(1.0)
        return r, step

    r, step = make()
    handle, buffer = weakref.ref(r), weakref.ref(buffer_of(r))
    del r
    gc.collect()
    assert handle() is not None  # the function closes over it
    del step
    gc.collect()
    assert handle() is None
    assert buffer() is None


def test_ref_arguments_are_not_kept():
    step = refs.jit(lambda r, x: r.at[0].set(x))
    r = ref()
    step(r, 1.0)
    handle, buffer = weakref.ref(r), weakref.ref(buffer_of(r))
    del r
    gc.collect()
    assert handle() is None
    assert buffer() is None
    step(ref(), 1.0)


# --- Failures -------------------------------------------------------------------------------------


def test_a_trace_that_raises_and_later_calls():
    r = ref()
    fail = [True]

    @refs.jit
    def step(x):
        r[0] = x
        if fail[0]:
            raise ZeroDivisionError("on purpose")

    pointer = r.unsafe_buffer_pointer()
    with pytest.raises(ZeroDivisionError):
        step(5.0)
    holds(r, 0, 1, 2, 3)
    assert r.unsafe_buffer_pointer() == pointer
    fail[0] = False
    step(5.0)
    holds(r, 5, 1, 2, 3)


def callback(kind, fail):
    def host(x):
        if fail[0]:
            raise ZeroDivisionError("on purpose")
        return np.asarray(x)

    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if kind == "pure":
            return jax.pure_callback(host, shape, x)
        return jax.experimental.io_callback(host, shape, x, ordered=kind == "ordered")

    return call


@pytest.mark.parametrize("kind", ["pure", "io", "ordered"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_callback_that_raises(kind, nested):
    r, s, read = ref("r"), ref("s"), ref("read")
    fail = [False]
    call = callback(kind, fail)

    @refs.jit
    def step(s, x):
        r[0] += 10

        def body(c, _):
            r[1] = call(r[0] + read[0])
            s[...] += x
            return c, None

        if nested:
            lax.scan(body, 0, length=2)
        else:
            body(0, None)

    def same_everywhere(*arrays):
        for ref_, expected in zip((r, s, read), arrays, strict=True):
            np.testing.assert_array_equal(np.array(ref_[...]), np.float32(expected))

    times = 2 if nested else 1
    step(s, 1.0)
    after = [10, 10, 2, 3], X + times, X
    same_everywhere(*after)
    fail[0] = True
    for _ in range(2):
        with pytest.raises(Exception, match="on purpose"):
            step(s, 1.0)
        same_everywhere(*after)
    fail[0] = False
    pointers = [c.unsafe_buffer_pointer() for c in (r, s)]
    for _ in range(2):
        step(s, 1.0)
    same_everywhere([30, 30, 2, 3], X + 3 * times, X)
    assert [c.unsafe_buffer_pointer() for c in (r, s)] == pointers
