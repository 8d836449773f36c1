"""`refs.vmap` over refs whose type says that the mapped axis is sharded."""

from tests.processes import run_with_devices

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, refs
from jax.sharding import NamedSharding, PartitionSpec as P

same = np.testing.assert_array_equal
for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        for jit in (lambda f: f, refs.jit):
            x = np.arange(16.0).reshape(8, 2)
            rows = refs.new_ref(jax.device_put(x, NamedSharding(mesh, P("d"))))
            weights, total, best = (
                refs.new_ref(jax.device_put(np.ones(2), NamedSharding(mesh, P()))) for _ in "123"
            )

            def lane(row, y):
                row[...] += weights[...]
                total[...] += row[...]
                best.at[...].max(row[...])
                return (row[...] * y).sum()

            ys = jax.device_put(np.ones(8), NamedSharding(mesh, P("d")))
            out = jit(lambda rows, ys: refs.vmap(lane)(rows, ys))(rows, ys)
            same(rows[...], x + 1)
            same(out, (x + 1).sum(1))
            same(total[...], 1 + (x + 1).sum(0))
            same(best[...], (x + 1).max(0))
            assert rows.sharding.spec[0] == "d"
print("done")
"""


WITHOUT_REFS = """
import jax, jax.numpy as jnp, numpy as np, refs
from jax import P
from jax.sharding import AxisType, NamedSharding

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
x = jnp.arange(16.0).reshape(4, 4)

# Lanes over one axis, and each lane's rows over the other.
inside = jax.shard_map(
    jnp.sin, mesh=mesh, in_specs=P("model"), out_specs=P("model"), axis_names={"model"}
)
placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
for transform in (lambda t: t.vmap(inside), lambda t: t.jit(t.vmap(inside))):
    expected, got = (transform(t)(placed) for t in (jax, refs))
    np.testing.assert_array_equal(got, expected)
    assert got.sharding == expected.sharding

with jax.set_mesh(mesh):
    placed = jax.device_put(x, P("data", "model"))

    @jax.shard_map(in_specs=P("model"), out_specs=P(None))
    def total(x):
        return jax.lax.psum(x, axis_name="model")

    expected, got = (t.vmap(total)(placed) for t in (jax, refs))
    np.testing.assert_array_equal(got, expected)
    assert got.sharding == expected.sharding

    # A cotangent that is yet to be summed over a mesh axis.
    whole = jax.device_put(x, P(None, None, reduced={"data"}))
    expected, got = (t.jit(t.grad(lambda w: (2 * w).sum()))(whole) for t in (jax, refs))
    assert got.sharding.spec == expected.sharding.spec == P(None, None, unreduced={"data"})
    try:
        refs.vmap(lambda a, b: a * b, in_axes=(None, 0))(placed, placed)
    except ValueError as error:
        assert "Unmapped values passed to vmap cannot be sharded" in str(error)
    else:
        raise AssertionError("not refused")

auto = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
for spec, name in ((P("x"), "y"), (P(), ("x", "y"))):
    f = jax.shard_map(lambda x: x, mesh=auto, in_specs=spec, out_specs=spec)
    texts = {str(jax.make_jaxpr(t.vmap(f, spmd_axis_name=name))(x)) for t in (jax, refs)}
    assert len(texts) == 1, texts
print("done")
"""


def test_a_function_without_refs_is_mapped_as_jax_does():
    assert run_with_devices(4, "-c", WITHOUT_REFS) == "done\n"


def test_refs_beside_one_that_is_sharded_over_the_lanes():
    assert run_with_devices(4, "-c", PROGRAM) == "done\n"
