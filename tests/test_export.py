"""`refs.export`: programs over refs that run where they weren't made."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P, lax
from jax.sharding import AxisType

import refs
from refs.errors import RefTypeError, RefValueError
from refs.testing import assert_in_place
from tests.placement import addresses
from tests.processes import run_with_devices

pytestmark = pytest.mark.as_released

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def exported(fun, *args, vjp_order=0, **kwargs):
    """The function, exported, serialized and made a function over refs again."""
    blob = refs.export.export(fun)(*args, **kwargs).serialize(vjp_order)
    return refs.export.call(refs.export.deserialize(blob))


def state():
    return {
        "w": refs.new_ref(X),
        "scale": refs.new_ref(2.0),
        "key": refs.new_ref(jax.random.key(3)),
        "idle": refs.new_ref(1),
    }


def values(tree):
    def value(x):
        x = x[...] if isinstance(x, jax.Ref) else x
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(value, tree)


def step(state, x, *, n):
    state["key"][...], key = jax.random.split(state["key"][...])
    state["w"][0] += x * state["scale"][...] + jax.random.uniform(key)
    state["w"].at[1, :2].multiply(n["n"])
    return state["w"][1].sum(), state["w"], n


def test_it_does_what_the_function_does():
    f, args = refs.jit(step), (jnp.arange(3.0),)
    n = {"n": jnp.float32(3)}
    call = exported(f, refs.tree.abstract(state()), *args, n=n)
    mine, its = state(), state()
    where = its["w"].unsafe_buffer_pointer()
    for _ in range(3):
        expected, found = f(mine, *args, n=n), call(its, *args, n=n)
        jax.tree.map(np.testing.assert_array_equal, values(found), values(expected))
        jax.tree.map(np.testing.assert_array_equal, values(its), values(mine))
    assert found[1] is its["w"]
    assert its["w"].unsafe_buffer_pointer() == where


def test_state_is_explicit_and_aliased():
    e = refs.export.export(refs.jit(step))(state(), jnp.ones(3), n={"n": jnp.float32(3)})
    assert e.fun_name == "step"
    [main] = [x for x in e.mlir_module().splitlines() if "func.func public @main" in x]
    assert main.count("tf.aliasing_output") == 2  # the key's and that of `w`
    assert "%arg0: tensor<2xui32> {tf.aliasing_output = 0" in main
    assert "%arg1: tensor<2x3xf32> {tf.aliasing_output = 1" in main
    # Without refs: lists of arrays in, lists of arrays out.
    args = jax.tree.unflatten(e.in_tree, [None] * e.in_tree.num_leaves)[0][2:]
    given = jax.tree.unflatten(jax.tree.structure(args, is_leaf=lambda x: x is None), [X[0], 3.0])
    bits = jax.random.key_data(jax.random.key(3))
    [_, w], _ = e.call([bits, X], [jnp.float32(2)], *given)
    np.testing.assert_array_equal(w[1], X[1] * [3, 3, 1])


def test_a_loop_stays_in_place():
    def swaps(r, n):
        def swap(k, n):
            r[k], r[k + 1] = r[k + 1], r[k]
            return n

        return lax.fori_loop(0, n, swap, n)

    big = jax.ShapeDtypeStruct((100_000,), jnp.float32, is_ref=True)
    call = exported(refs.jit(swaps), big, 9)
    r = refs.new_ref(np.arange(100_000.0, dtype=np.float32))
    assert_in_place(call, r, 9)
    call(r, 9)
    np.testing.assert_array_equal(r[:11], [*range(1, 10), 0, 10])


def test_the_same_ref_twice():
    def f(a, b):
        a[...] += 1
        b[...] *= 2

    r = refs.new_ref(1.0)
    call = exported(refs.jit(f), r, r)
    call(r, r)
    assert r[...] == 4


def test_two_refs_are_not_one():
    def add(a, b):
        a[...] += b[...]

    call, r = exported(refs.jit(add), refs.new_ref(X), refs.new_ref(X)), refs.new_ref(X)
    with pytest.raises(RefValueError, match="other aliases"):
        call(r, r)
    call(r, refs.new_ref(X))
    np.testing.assert_array_equal(r, 2 * X)


def test_static_arguments():
    @functools.partial(refs.jit, static_argnums=1)
    def f(r, n, x):
        r[...] += n * x

    r = refs.new_ref(1.0)
    exported(f, r, 3, 2.0)(r, 2.0)
    assert r[...] == 7


def test_a_function_without_refs_is_exported_by_jax():
    for jit in (refs.jit, jax.jit):
        e = refs.export.export(jit(lambda x: x + 1))(1.0)
        assert e.call(2.0) == 3
        with pytest.raises(RefTypeError, match=r"exported\.call"):
            refs.export.call(e)


def test_symbolic_shapes():
    @refs.jit
    def f(total, x):
        total[...] += x.sum(0)
        total[-1] = 0

    b, n = jax.export.symbolic_shape("b, n")
    total = jax.ShapeDtypeStruct((n,), jnp.float32, is_ref=True)
    call = exported(f, total, jax.ShapeDtypeStruct((b, n), jnp.float32))
    for shape in ((2, 3), (5, 4)):
        r = refs.new_ref(jnp.ones(shape[1]))
        call(r, jnp.ones(shape))
        np.testing.assert_array_equal(r, [*[shape[0] + 1] * (shape[1] - 1), 0])


def shape(*sizes, dtype=jnp.float32, is_ref=False):
    return jax.ShapeDtypeStruct(sizes, dtype, is_ref=is_ref)


SYMBOLIC = {
    "lookup": (lambda w, i: w[i].sum(), (10, 3), [("b", jnp.int32)]),
    "cache": (
        lambda k, x, p: (k.at[jnp.arange(p.shape[0]), p].set(x), x.sum())[1],
        ("b", 16, 4),
        [("b, 4", jnp.float32), ("b", jnp.int32)],
    ),
    "sums": (
        lambda h, i: (refs.vmap(lambda i: h.at[i].add(1.0))(i), i.sum())[1],
        (10,),
        [("b", jnp.int32)],
    ),
    "scan": (
        lambda n, xs: lax.scan(lambda c, x: (c + x, n.addupdate(x)), 0.0, xs)[0],
        (),
        [("b", jnp.float32)],
    ),
    "rows": (
        lambda n, xs: lax.scan(lambda c, x: (c + x[0][...].sum(), x[0].set(x[1])), 0.0, (n, xs))[0],
        ("b", 3),
        [("b", jnp.float32)],
    ),
    "half": (
        lambda w: (w[w.shape[0] // 2 :].sum(), w.at[w.shape[0] // 2 :].add(1))[0],
        ("b", 3),
        [],
    ),
    "shape": (lambda w: jnp.zeros(w.shape).sum(), ("b", 3), []),
} | {
    f"slice {s.start}:{s.stop}:{s.step}": (
        lambda w, s=s: (w.at[s].multiply(2), w[s], w.at[:, 0].at[s].add(1))[1],
        ("b", 3),
        [],
    )
    for s in (
        slice(1, None),
        slice(None, -1),
        slice(None, None, -1),
        slice(None, None, 2),
        slice(-2, None, -1),
        slice(0, 1),
        slice(1, -1, 3),
        slice(-3, None),
        slice(-3, -1),
    )
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(name):
    """What is exported for any size does what is compiled for each."""
    f, of_ref, of_args = SYMBOLIC[name]
    b, *_ = jax.export.symbolic_shape("b", constraints=["b >= 3"])
    sizes = [[b if n == "b" else int(n) for n in text.split(", ")] for text, _ in of_args]
    args = [shape(*s, dtype=d) for s, (_, d) in zip(sizes, of_args, strict=True)]
    ref = shape(*(b if n == "b" else n for n in of_ref), is_ref=True)
    call = exported(refs.jit(f), ref, *args)
    for size in (3, 8):
        random = np.random.default_rng(size)
        concrete = [[size if n is b else n for n in s] for s in sizes]
        given = [
            random.integers(0, 10, s).astype(d) for s, (_, d) in zip(concrete, of_args, strict=True)
        ]
        value = random.random([size if n == "b" else n for n in of_ref]).astype(np.float32)
        r, q = refs.new_ref(value), refs.new_ref(value)
        np.testing.assert_allclose(call(r, *given), refs.jit(f)(q, *given))
        np.testing.assert_array_equal(r, q)


def test_transformations_of_the_call():
    def f(w, seen, x):
        seen[...] += 1
        return (w[...] * x).sum()

    w, seen = refs.new_ref(X), refs.new_ref(0)
    call = exported(refs.jit(f), w, seen, X, vjp_order=1)
    found = refs.grad(call, argnums=(0, 2))(w, seen, 2 * X)
    np.testing.assert_array_equal(found[0], 2 * X)
    np.testing.assert_array_equal(found[1], X)
    assert seen[...] == 1


def test_for_another_platform():
    e = refs.export.export(refs.jit(step), platforms=("cuda", "tpu"))(
        refs.tree.abstract(state()), jnp.ones(3), n={"n": jnp.float32(3)}
    )
    assert e.platforms == ("cuda", "tpu")
    assert "tf.aliasing_output" in e.mlir_module()


@pytest.mark.slow
def test_in_a_fresh_process_on_eight_devices(tmp_path):
    assert "exported" in run_with_devices(8, "-m", "tests.test_export", "make", str(tmp_path))
    assert "called" in run_with_devices(8, "-m", "tests.test_export", "call", str(tmp_path))


def train(state, x):
    state["w"][...] -= 0.1 * jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(state["w"][...])
    state["steps"][...] += 1
    return state["steps"][...]


def sharded():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("x"))
    tree = {"w": np.ones((8, 4), np.float32), "steps": np.int32(0)}
    return refs.tree.new_ref(tree, sharding={"w": split, "steps": None}), split


def make(folder):
    state, split = sharded()
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=split)
    e = refs.export.export(refs.jit(train))(refs.tree.abstract(state), x)
    assert e.nr_devices == 8
    (folder / "train").write_bytes(e.serialize())
    print("exported")


def call(folder):
    f = refs.export.call(refs.export.deserialize(bytearray((folder / "train").read_bytes())))
    (its, split), (mine, _) = sharded(), sharded()
    x = jax.device_put(np.arange(128.0, dtype=np.float32).reshape(16, 8) / 128, split)
    g = refs.jit(train)

    where = addresses(its["w"])
    for k in range(5):
        assert f(its, x) == g(mine, x) == k + 1
    np.testing.assert_array_equal(its["w"], mine["w"])
    assert its["w"].sharding.is_equivalent_to(split, 2)
    assert addresses(its["w"]) == where
    print("called")


if __name__ == "__main__":
    import sys

    {"make": make, "call": call}[sys.argv[1]](Path(sys.argv[2]))
