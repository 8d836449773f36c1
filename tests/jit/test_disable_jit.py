"""Under `jax.disable_jit()` a ref stays where it lies: its devices, their memory, and all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

import refs

N = jax.device_count()
X = np.arange(8, dtype=np.float32) + 1


def over_devices(axis):
    return NamedSharding(jax.make_mesh((N,), ("x",), axis_types=(AxisType.Auto,)), P(axis))


PLACES = {
    "default": lambda: None,
    "device": lambda: SingleDeviceSharding(jax.devices()[-1]),
}
if any(memory.kind == "unpinned_host" for memory in jax.devices()[0].addressable_memories()):
    PLACES["memory"] = lambda: SingleDeviceSharding(jax.devices()[0], memory_kind="unpinned_host")
if N > 1:
    PLACES |= {
        "sharded": lambda: over_devices("x"),
        "replicated": lambda: over_devices(None),
    }


def scale(r, x):
    r[...] = r[...] * x
    return r[...].mean()


OPERATIONS = {
    "set a scalar": lambda r: refs.set(r, ..., 5.0),
    "set NumPy's": lambda r: refs.set(r, ..., X + 1),
    "set JAX's": lambda r: refs.set(r, ..., jnp.arange(8.0)),
    "set a part": lambda r: refs.set(r, slice(1, 3), 0.0),
    "set one": lambda r: refs.set(r, 3, 7.0),
    "add": lambda r: r.at[...].add(1.0),
    "iadd": lambda r: r.__setitem__(..., r[...] + 1),
    "multiply": lambda r: r.at[...].multiply(2.0),
    "min": lambda r: r.at[...].min(3.0),
    "apply": lambda r: r.at[...].apply(jnp.zeros_like),
    "swap": lambda r: refs.swap(r, ..., 5.0),
    "refs.jit": refs.jit(lambda r: refs.set(r, ..., 3.0)),
    "grad": lambda r: refs.vjp(lambda x: scale(r, x), 2.0),
    "jvp": lambda r: refs.jvp(lambda x: scale(r, x), (2.0,), (1.0,)),
    "vmap": refs.vmap(lambda r: refs.set(r, ..., 9.0)),
    "checkpoint": lambda r: refs.checkpoint(lambda: refs.set(r, ..., 9.0))(),
    "cond": lambda r: refs.cond(True, lambda: refs.set(r, ..., 9.0), lambda: None),
    "scan": lambda r: refs.scan(lambda c, x: (c, refs.set(r, ..., x)), 0, jnp.arange(3.0)),
    "fori_loop": lambda r: refs.fori_loop(0, 2, lambda i, _: refs.set(r, ..., 4.0), None),
    "while_loop": lambda r: refs.while_loop(
        lambda n: n < 2, lambda n: (refs.set(r, ..., 4.0), n + 1)[1], 0
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_ref_stays_where_it_lies(operation, place):
    def made():
        return refs.new_ref(jax.device_put(X, PLACES[place]()))

    operate, expected, r = OPERATIONS[operation], made(), made()
    operate(expected)
    with jax.disable_jit():
        operate(r)
    np.testing.assert_array_equal(r, expected)
    for ref in expected, r:
        assert ref.sharding == made().sharding
        assert jax.freeze(ref).committed == jax.freeze(made()).committed


@pytest.mark.parametrize("place", PLACES)
def test_compiled_calls_of_it_go_on(place):
    r = refs.new_ref(jax.device_put(X, PLACES[place]()))
    step = refs.jit(lambda: refs.set(r, ..., r[...] + 1))
    step()
    with jax.disable_jit():
        r[...] = 0.0
        step()
    step()
    np.testing.assert_array_equal(r, np.full(8, 2.0))


def test_a_callback_does_not_write_what_a_program_reads():
    r = refs.new_ref(jnp.ones(1000))

    @refs.jit
    def later():
        x = jax.lax.fori_loop(0, 1000, lambda _, x: x + jnp.sin(x), jnp.zeros((300, 300)))
        return r[...] + x[0, 0]

    later().block_until_ready()
    for _ in range(3):
        r[...] = 1.0
        read = later()
        with jax.disable_jit():
            refs.io_callback(lambda memory: memory.fill(7), None, r)
        assert read[0] == 1
        assert r[0] == 7


def test_a_scan_over_rows_of_a_ref():
    table = refs.new_ref(jnp.arange(6.0).reshape(3, 2))

    def step(total, row):
        row[...] *= 2
        return total + row[0], None

    for around in (lambda f: f, refs.jit):
        before = np.array(table)
        with jax.disable_jit():
            total, _ = around(lambda: refs.scan(step, 0.0, table))()
        assert total == 2 * before[:, 0].sum()
        np.testing.assert_array_equal(table, 2 * before)


def counted_loop(while_loop):
    """A loop whose predicate counts the times that it is asked: one more than there are steps."""
    n = refs.new_ref(jnp.int32(0))

    def cond_fun(x):
        n[...] += 1
        return n[...] < 4

    return while_loop(cond_fun, lambda x: x + 1.0, 0.0), n


@pytest.mark.parametrize(
    "around",
    [
        lambda f: f(),
        lambda f: refs.jit(f)(),
        lambda f: refs.checkpoint(f)(),
    ],
    ids=["top level", "jit", "checkpoint"],
)
@pytest.mark.parametrize("while_loop", [refs.while_loop, jax.lax.while_loop])
def test_a_predicate_is_asked_once_before_each_step(while_loop, around):
    with jax.disable_jit():
        x, n = around(lambda: counted_loop(while_loop))
    assert (int(x), int(n[...])) == (3, 4)


def test_loops_and_branches_run_in_python():
    r, seen = refs.new_ref(jnp.zeros(2)), []

    def look(*values):
        r[...] += 1
        seen.extend(map(float, (*values, r[0])))

    with jax.disable_jit():
        refs.scan(lambda c, x: (look(c, x), (c + x, None))[1], 1.0, jnp.arange(2.0))
        refs.fori_loop(0, 1, lambda i, c: (look(i, c), c)[1], 5.0)
        refs.while_loop(lambda c: c < 8, lambda c: (look(c), c + 1)[1], 7.0)
        refs.cond(jnp.array(True), look, look, 9.0)
        refs.map(look, jnp.array([11.0]))
        refs.grad(lambda x: refs.scan(lambda c, x: (look(x), (c, None))[1], x, jnp.ones(1))[0])(1.0)
    assert seen == [1, 0, 1, 1, 1, 2, 0, 5, 3, 7, 4, 9, 5, 11, 6, 1, 7]
