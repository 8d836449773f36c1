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


def test_refs_beside_one_that_is_sharded_over_the_lanes():
    assert run_with_devices(4, "-c", PROGRAM) == "done\n"
