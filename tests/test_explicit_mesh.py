"""A ref on an explicit mesh keeps the sharding that its type names, whatever is written to it."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import refs
from refs.errors import RefValueError

N = jax.device_count()
X = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.fixture(params=[1, 4] if N == 4 else [1])
def mesh(request):
    n = request.param
    mesh = jax.make_mesh((n,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:n])
    with jax.set_mesh(mesh):
        yield mesh


def placed(mesh, spec, x=X):
    return jax.device_put(x, NamedSharding(mesh, spec))


def partitions(x):
    """How an array lies, and how its type says that it does."""
    spec = x.sharding.spec
    assert jax.typeof(x).sharding.spec.partitions == (*spec, *[None] * (x.ndim - len(spec)))
    return jax.typeof(x).sharding.spec.partitions


def eagerly(program, *args):
    return program(*args)


def op_by_op(program, *args):
    with jax.disable_jit():
        return program(*args)


def compiled(program, *args):
    return refs.jit(program)(*args)


def in_a_scan(program, *args):
    def body(_, __):
        return None, program(*args)

    return jax.tree.map(lambda x: x[0], refs.jit(lambda: refs.scan(body, None, length=1)[1])())


ways = pytest.mark.parametrize("run", [eagerly, op_by_op, compiled, in_a_scan])
specs = pytest.mark.parametrize("spec", [P("x"), P(None, None)], ids=["sharded", "replicated"])
INDICES = {
    "all": ...,
    "all rows": np.s_[0:8],
    "rows the other way": np.s_[::-1],
    "columns": np.s_[:, 1:],
    "a column": np.s_[:, 1],
    "a row": 3,
    "rows": np.s_[2:5],
    "every other row": np.s_[::2],
    "an element": (3, 1),
    "an array of rows": np.array([1, 6]),
    "elements": (np.array([1, 6]), np.array([0, 2])),
    "a mask": X.sum(1) > 30,
    "an array of columns": (slice(None), np.array([2, 0])),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", [eagerly, compiled, in_a_scan])
@specs
def test_writes_of_any_part(run, spec, mesh):
    r = refs.new_ref(placed(mesh, spec))
    before = partitions(r[...])

    def program():
        for i in INDICES.values():
            r[i] = X[i] + 1
            r.at[i].add(2.0)
            r.at[i].multiply(3.0)
            r.at[i].min(40.0)

    run(program)
    want = X.copy()
    for i in INDICES.values():
        want[i] = np.minimum((X[i] + 3) * 3, 40)
    np.testing.assert_array_equal(r[...], want)
    assert partitions(r[...]) == before == tuple(r.sharding.spec)


@ways
@specs
def test_indices_that_are_traced_or_sharded_themselves(run, spec, mesh):
    r = refs.new_ref(placed(mesh, spec))
    rows = placed(mesh, P("x"), np.array([1, 5, 5, 0], np.int32))

    def program(i, rows):
        r[i] = 0.0
        r.at[rows].add(1.0)
        r.at[rows, i].multiply(2.0)
        r.at[2:].at[rows].add(1.0)

    run(program, jnp.int32(2), rows)
    want = X.copy()
    want[2] = 0
    np.add.at(want, rows, 1)
    np.multiply.at(want, (np.asarray(rows), 2), 2)
    np.add.at(want[2:], rows, 1)
    np.testing.assert_array_equal(r[...], want)
    assert partitions(r[...]) == tuple(r.sharding.spec)


@ways
@pytest.mark.parametrize("of_value", [P(None, "x"), P()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("of_ref", [P("x"), P()], ids=["sharded", "replicated"])
def test_a_value_that_is_sharded_otherwise(run, of_value, of_ref, mesh):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    r = refs.new_ref(placed(mesh, of_ref, x))
    value, types = placed(mesh, of_value, x + 1), []

    def program(value):
        r[...] = value
        types.append(jax.typeof(r[...]))

    run(program, value)
    np.testing.assert_array_equal(r[...], x + 1)
    assert {partitions(r[...]), *[t.sharding.spec.partitions for t in types]} == {
        jax.typeof(r).sharding.spec.partitions
    }


@specs
def test_a_ref_of_keys(spec, mesh):
    keys = jax.random.split(jax.random.key(0), 8)
    r = refs.new_ref(placed(mesh, P(*spec[:1]), keys))
    r[...] = keys[::-1]
    refs.jit(lambda: r.__setitem__(2, keys[0]))()
    r[3] = keys[0]
    want = np.asarray(jax.random.key_data(keys))[::-1].copy()
    want[2:4] = jax.random.key_data(keys[0])
    np.testing.assert_array_equal(jax.random.key_data(r[...]), want)
    assert partitions(r[...]) == tuple(r.sharding.spec)


@pytest.mark.parametrize("run", [eagerly, op_by_op, compiled])
def test_refs_that_are_made_inside_and_copied(run, mesh):
    def program(x):
        made = refs.empty_ref(jax.typeof(x)), refs.new_ref(x), copy.copy(refs.new_ref(x))
        for r in made:
            r[...] = 1.0
            r[2] = 0.0
        return [refs.freeze(r) for r in made]

    for out in run(program, placed(mesh, P("x"))):
        assert out.sum() == 21
        assert partitions(out) == ("x", None)


@pytest.mark.parametrize("run", [eagerly, compiled])
@specs
def test_parts_that_are_read_with_a_sharding(run, spec, mesh):
    r = refs.new_ref(placed(mesh, spec))

    def program():
        return [r.at[i].get(out_sharding=P()) for i in INDICES.values()]

    for got, i in zip(run(program), INDICES.values(), strict=True):
        np.testing.assert_array_equal(got, X[i])
        assert set(partitions(got)) <= {None}
    got = run(lambda: r.at[::-1].get(out_sharding=NamedSharding(mesh, P("x"))))
    np.testing.assert_array_equal(got, X[::-1])
    assert partitions(got) == ("x", None)


@pytest.mark.parametrize("run", [eagerly, compiled])
def test_views_and_fillings_that_are_read_with_a_sharding(run, mesh):
    r = refs.new_ref(placed(mesh, P("x")))
    rows = np.array([1, 9, 5, 2])
    got = run(lambda: r.at[rows].get(mode="fill", fill_value=-1, out_sharding=P("x")))
    np.testing.assert_array_equal(got, np.where(rows[:, None] < 8, X[rows % 8], -1))
    assert partitions(got) == ("x", None)
    got = run(lambda: r.at[rows].at[2:, 1].get(out_sharding=P()))
    np.testing.assert_array_equal(got, X[rows[2:], 1])


@pytest.mark.slow
def test_gradients(mesh):
    rows = np.array([1, 5])

    def loss(r, w):
        r[...] = w * X
        r[rows] = w * 2
        r.at[rows].multiply(w)
        return (r[...] ** 2).sum() + (r.at[rows].get(out_sharding=P()) ** 3).sum()

    def pure(w):
        x = (w * X).at[rows].set(w * 2 * w)
        return (x**2).sum() + (x[rows] ** 3).sum()

    r = refs.new_ref(placed(mesh, P("x")))
    for jit in (lambda f: f, refs.jit):
        got = jit(refs.grad(lambda w: loss(r, w)))(2.0)
        np.testing.assert_allclose(got, jax.grad(pure)(2.0), rtol=1e-6)
    assert partitions(r[...]) == ("x", None)


def test_jacobians(mesh):
    x, w = placed(mesh, P("x")), refs.new_ref(placed(mesh, P("x")))
    expected = jax.jacrev(lambda x: (2 * x.sum(1), x[:, 0]))(x)
    got = refs.jacrev(lambda w: (2 * w[...].sum(1), w[:, 0]))(w)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, expected)


def test_lanes_add_to_a_ref_on_the_mesh(mesh):
    rows, total = (refs.new_ref(placed(mesh, spec)) for spec in (P("x"), P(None, None)))

    def lane(row, y):
        total.at[0].add(row[...])
        row.at[1].add(y)
        return row[...]

    y = placed(mesh, P("x"), np.arange(8, dtype=np.float32))
    out = refs.jit(lambda y: refs.vmap(lane)(rows, y))(y)
    want = X.copy()
    want[:, 1] += np.arange(8)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(total[0], X[0] + X.sum(0))
    assert partitions(rows[...]) == partitions(out) == ("x", None)


READS = {
    "read": lambda r, i: r[i],
    "get": lambda r, i: r.at[i].get(),
    "swap": lambda r, i: refs.swap(r, i, 1.0),
    "+=": lambda r, i: r.__setitem__(i, r[i] + 1),
    "apply": lambda r, i: r.at[i].apply(jnp.sin),
}


@pytest.mark.parametrize("run", [eagerly, compiled])
@pytest.mark.parametrize("case", ["of a sharded axis", "sharded itself"])
def test_a_part_whose_sharding_is_not_known(run, case, mesh):
    spec, of_index, said = P("x"), P(), r"\('x', None\)"
    if case == "sharded itself":
        spec, of_index, said = P(None, None), P("x"), r"\(None, None\)"
    r = refs.new_ref(placed(mesh, spec), name="e")
    rows = placed(mesh, of_index, np.array([1, 1, 2, 3], np.int32))
    text = (
        r"^a part of ref `e` \(created at .*\) at .*: how it is sharded over the explicit mesh "
        rf"doesn't follow from its index and from the ref's own sharding, P{said}\. Say it, "
        r"`ref\.at\[i\]\.get\(out_sharding=jax\.P\(…\)\)`; or index the axes that aren't sharded, "
        r"use the whole value, `ref\[\.\.\.\]`, or the parts in `refs\.shard_map`"
    )
    for act in READS.values():
        with pytest.raises(RefValueError, match=text):
            run(lambda rows, act=act: act(r, rows), rows)
    np.testing.assert_array_equal(r[...], X)


def test_a_ref_on_one_device_of_what_is_on_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(mesh, P("d")))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    r = refs.new_ref(x, sharding=device)
    assert r.sharding == device
    r[0] = 5.0
    np.testing.assert_array_equal(r, [5, 1, 2, 3])
    np.testing.assert_array_equal(x, [0, 1, 2, 3])


@pytest.mark.parametrize("name", ["checkpoint", "jacrev", "vmap"])
def test_a_write_where_no_mesh_is_set(name):
    mesh = jax.make_mesh((N,), ("x",), (AxisType.Explicit,))
    count = refs.new_ref(jnp.int32(0), sharding=NamedSharding(mesh, P()))

    def f(x):
        count[...] = 3
        return x * 2

    getattr(refs, name)(f)(jnp.ones(2))
    assert count[...] == 3
    assert partitions(count) == ()


def test_derivatives_in_lanes_accumulate():
    mesh = jax.make_mesh((N,), ("x",), (AxisType.Explicit,))
    total = refs.new_ref(jnp.zeros((8, 4)), sharding=NamedSharding(mesh, P("x")))

    def f(x):
        total[...] += 1.0
        return x**2

    with jax.set_mesh(mesh):
        slopes = refs.vmap(refs.grad(f))(jnp.arange(3.0))
    np.testing.assert_array_equal(slopes, [0, 2, 4])
    np.testing.assert_array_equal(total[...], np.full((8, 4), 3))
    assert partitions(total) == ("x", None)
