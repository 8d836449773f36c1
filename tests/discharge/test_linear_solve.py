"""`custom_linear_solve`, and what is made of it, whose functions read refs.

The oracle is NumPy's dense solution, or JAX's derivative of the same solver over arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

import refs
from tests.discharge.helpers import primitives

A = np.float32([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 5.0]])
SKEW = np.float32([[4.0, 1.0, 0.0], [-2.0, 3.0, 0.5], [0.1, 0.0, 2.0]])
B = np.float32([1.0, -2.0, 0.5])
close = np.testing.assert_allclose


def dense(matvec, b):
    return jnp.linalg.solve(jax.jacobian(matvec)(jnp.zeros_like(b)), b)


def custom(matvec, b):
    return lax.custom_linear_solve(matvec, b, dense, transpose_solve=dense)


SOLVERS = {
    "cg": lambda f, b: cg(f, b, tol=1e-7)[0],
    "cg, preconditioned": lambda f, b: cg(f, b, tol=1e-7, M=lambda v: f(v) * 0 + v / 4)[0],
    "gmres": lambda f, b: gmres(f, b, tol=1e-7)[0],
    "bicgstab": lambda f, b: bicgstab(f, b, tol=1e-7)[0],
    "custom": custom,
    "custom, symmetric": lambda f, b: lax.custom_linear_solve(f, b, dense, symmetric=True),
}
WAYS = {
    "jit": refs.jit,
    "grad": lambda f: refs.jit(refs.grad(lambda a, b: (f(a, b) * B).sum(), (0, 1))),
    "grad, op by op": lambda f: refs.grad(lambda a, b: (f(a, b) * B).sum(), (0, 1)),
    "checkpoint": lambda f: refs.grad(lambda a, b: (refs.checkpoint(f)(a, b) * B).sum(), (0, 1)),
    "scan": lambda f: refs.jit(
        lambda a, b: lax.scan(lambda b, _: (f(a, b), b.sum()), b, None, length=3)
    ),
    "branch": lambda f: refs.jit(lambda a, b: lax.cond(b[0] > 0, f, lambda a, b: b, a, b)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_as_over_an_array(solver, way):
    """Derivatives with respect to what the ref holds, too."""
    solve = SOLVERS[solver]
    over_arrays = WAYS[way](lambda a, b: solve(lambda v: a @ v, b))
    over_a_ref = WAYS[way](lambda r, b: solve(lambda v: r[...] @ v, b))
    wanted = over_arrays(jnp.asarray(A), jnp.asarray(B))
    got = over_a_ref(refs.new_ref(jnp.asarray(A)), jnp.asarray(B))
    jax.tree.map(lambda x, y: close(x, y, rtol=1e-4, atol=1e-6), got, wanted)
    if way == "jit":
        close(got, np.linalg.solve(A, B), rtol=1e-4)


@pytest.mark.parametrize("solve", [custom, SOLVERS["gmres"]], ids=["custom", "gmres"])
def test_a_map_that_is_not_symmetric(solve, jit):
    r = refs.new_ref(jnp.asarray(SKEW))
    close(jit(lambda b: solve(lambda v: r[...] @ v, b))(B), np.linalg.solve(SKEW, B), rtol=1e-4)
    gradient = jit(refs.grad(lambda b: solve(lambda v: r[...] @ v, b)[0]))(jnp.asarray(B))
    close(gradient, np.linalg.inv(SKEW)[0], rtol=1e-4)
    _, along = jit(lambda b: refs.jvp(lambda b: solve(lambda v: r[...] @ v, b), (b,), (b,)))(B)
    close(along, np.linalg.solve(SKEW, B), rtol=1e-4)


def test_lanes_that_share_the_ref_and_lanes_with_one_each(jit):
    shared = refs.new_ref(jnp.asarray(A))
    bs = jnp.stack([B, 2 * B])
    close(
        jit(refs.vmap(lambda b: cg(lambda v: shared[...] @ v, b)[0]))(bs),
        [np.linalg.solve(A, B), np.linalg.solve(A, 2 * B)],
        rtol=1e-3,
    )
    each = refs.new_ref(jnp.stack([A, SKEW]))
    close(
        jit(refs.vmap(lambda r, b: custom(lambda v: r[...] @ v, b)))(each, bs),
        [np.linalg.solve(A, B), np.linalg.solve(SKEW, 2 * B)],
        rtol=1e-4,
    )


def test_the_ref_is_written_before_and_after(jit):
    r = refs.new_ref(jnp.asarray(A))

    def step(b):
        r[...] *= 2
        x = cg(lambda v: r[...] @ v, b)[0]
        r[0] = x
        return x

    close(jit(step)(B), np.linalg.solve(2 * A, B), rtol=1e-4)
    close(r[...], [np.linalg.solve(2 * A, B), 2 * A[1], 2 * A[2]], rtol=1e-4)


def test_an_auxiliary_result_and_a_tree(jit):
    r = refs.new_ref(jnp.float32(2))

    def solve(matvec, b):
        return jax.tree.map(lambda x: x / r[...], b), {"used": r[...]}

    b = {"x": jnp.asarray(B), "y": (jnp.float32(3),)}
    x, aux = jit(
        lambda b: lax.custom_linear_solve(
            lambda v: jax.tree.map(lambda x: r[...] * x, v), b, solve, has_aux=True
        )
    )(b)
    close(x["x"], B / 2)
    assert x["y"][0] == 1.5
    assert aux["used"] == 2


def test_the_solver_stays_one():
    """Its derivative is that of the solution, not of the steps."""
    r = refs.new_ref(jnp.asarray(A))
    pure = refs.discharge(refs.make_jaxpr(lambda b: cg(lambda v: r[...] @ v, b)[0])(B))
    assert primitives(pure)["custom_linear_solve"] == 1


def test_beside_jaxs_own_refs():
    """Outside of this library's functions, JAX's refusal stays JAX's."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        jax.jit(lambda b: cg(lambda v: jax.new_ref(A)[...] @ v, b)[0])(B)
    assert not isinstance(caught.value, refs.errors.RefError)
