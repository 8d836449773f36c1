"""Programs of other libraries under `refs`' transformations, with refs in them.

Each is compared with the library under JAX's own. `.ci/run` installs the libraries (the extra
`libraries` in pyproject.toml); without one, its tests are left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

T = jnp.float32


class Program(NamedTuple):
    """`plain(x)`, a scalar; and `stateful(w, n, x)`: the same if `w` holds 1.5, counting in `n`."""

    plain: Callable[[Any], Any]
    stateful: Callable[[Any, Any, Any], Any]


def of(fun: Callable[[Any, Any], Any]) -> Program:
    """The program `fun(w, x)`, with `w` an array, and read from a ref."""

    def stateful(w: Any, n: Any, x: Any) -> Any:
        n[...] += 1
        return fun(w[...], x)

    return Program(lambda x: fun(T(1.5), x), stateful)


def diffrax_solve(adjoint: str) -> Program:
    diffrax = pytest.importorskip("diffrax")

    def solve(w: Any, x: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -args * y),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=x,
            args=w,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
            adjoint=getattr(diffrax, adjoint)(),
        ).ys[0]

    return of(solve)


def diffrax_reads_a_ref() -> Program:
    """The vector field itself reads the ref."""
    diffrax = pytest.importorskip("diffrax")

    def solve(rate: Callable[[], Any], x: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: -rate() * y)
        return diffrax.diffeqsolve(term, diffrax.Heun(), t0=0.0, t1=1.0, dt0=0.1, y0=x).ys[0]

    def stateful(w: Any, n: Any, x: Any) -> Any:
        n[...] += 1
        return solve(lambda: w[...], x)

    return Program(lambda x: solve(lambda: T(1.5), x), stateful)


def equinox_loop(kind: str) -> Program:
    loop = pytest.importorskip("equinox.internal").while_loop

    def power(w: Any, x: Any) -> Any:
        return loop(
            lambda c: c[0] < 5,
            lambda c: (c[0] + 1, jnp.sin(w * c[1])),
            (0, x),
            max_steps=16,
            kind=kind,
        )[1]

    return of(power)


def equinox_model() -> Program:
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(2, "scalar", 8, 2, key=jax.random.key(0))

    def apply(w: Any, x: Any) -> Any:
        return eqx.tree_at(lambda m: m.layers[-1].bias, mlp, replace_fn=lambda b: b + w)(
            jnp.stack([x, w])
        )

    return of(apply)


def optimistix_root() -> Program:
    optx = pytest.importorskip("optimistix")

    def root(w: Any, x: Any) -> Any:
        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        return optx.root_find(lambda y, c: y**3 + w * y - c, solver, x, args=x).value

    return of(root)


def optimistix_least_squares() -> Program:
    optx = pytest.importorskip("optimistix")

    def fit(w: Any, x: Any) -> Any:
        solver = optx.LevenbergMarquardt(rtol=1e-5, atol=1e-5)
        residuals = lambda y, c: jnp.stack([y - c, w * y - 1.0])  # noqa: E731
        return optx.least_squares(residuals, solver, x, args=x).value

    return of(fit)


def lineax_solve() -> Program:
    lx = pytest.importorskip("lineax")

    def solve(w: Any, x: Any) -> Any:
        matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]]) * w
        return lx.linear_solve(lx.MatrixLinearOperator(matrix), jnp.stack([x, w])).value.sum()

    return of(solve)


def nnx_model() -> Program:
    nnx = pytest.importorskip("flax.nnx")

    def make() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(2, 4, rngs=rngs), jnp.tanh, nnx.Linear(4, 1, rngs=rngs))

    graph, state = nnx.split(make())

    def apply(w: Any, x: Any) -> Any:
        return nnx.merge(graph, jax.tree.map(lambda p: p * w, state))(jnp.stack([x, w]))[0]

    return of(apply)


def optax_inner_steps() -> Program:
    """A gradient through three steps of an optimizer."""
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(0.1)

    def trained(w: Any, x: Any) -> Any:
        p, state = x, optimizer.init(x)
        for _ in range(3):
            updates, state = optimizer.update(jax.grad(lambda p: (w * p - 1) ** 2)(p), state, p)
            p = optax.apply_updates(p, updates)
        return p

    return of(trained)


def pallas_kernel() -> Program:
    """Kernels for a function and for its derivative, as kernels are written."""
    pl = pytest.importorskip("jax.experimental.pallas")

    def scaled(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * y_ref[...]

    def times(x: Any, y: Any) -> Any:
        return pl.pallas_call(scaled, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)

    @jax.custom_vjp
    def product(x: Any, y: Any) -> Any:
        return times(x, y)

    product.defvjp(
        lambda x, y: (times(x, y), (x, y)), lambda xy, g: (times(g, xy[1]), times(xy[0], g))
    )
    return of(lambda w, x: product(jnp.full(8, x), jnp.arange(8, dtype=x.dtype) * w).sum())


def random_stream() -> Program:
    """JAX's own stateful generator, a pytree with a ref in it."""
    random = pytest.importorskip("jax.experimental.random")
    if not hasattr(random, "stateful_rng"):
        pytest.skip("this JAX has no stateful_rng")

    def draw(w: Any, x: Any) -> Any:
        rng = random.stateful_rng(jnp.int32(3))
        return (x * rng.normal(size=4) + w * rng.uniform(size=4)).sum()

    return of(draw)


def jax_root() -> Program:
    def root(w: Any, x: Any) -> Any:
        def newton(f: Any, y: Any) -> Any:
            return lax.fori_loop(0, 20, lambda _, y: y - f(y) / jax.grad(f)(y), y)

        return lax.custom_root(
            lambda y: y**3 + w * y - x, x, newton, lambda g, y: y / g(jnp.ones_like(y))
        )

    return of(root)


PROGRAMS = {
    "diffrax_solve": lambda: diffrax_solve("RecursiveCheckpointAdjoint"),
    "diffrax_backsolve": lambda: diffrax_solve("BacksolveAdjoint"),
    "diffrax_reads_a_ref": diffrax_reads_a_ref,
    "equinox_checkpointed": lambda: equinox_loop("checkpointed"),
    "equinox_bounded": lambda: equinox_loop("bounded"),
    "equinox_model": equinox_model,
    "optimistix_root": optimistix_root,
    "optimistix_least_squares": optimistix_least_squares,
    "lineax_solve": lineax_solve,
    "nnx_model": nnx_model,
    "optax_inner_steps": optax_inner_steps,
    "pallas_kernel": pallas_kernel,
    "random_stream": random_stream,
    "jax_root": jax_root,
}
WAYS = {
    "grad": (jax.grad, refs.grad),
    "jit_grad": (lambda f: jax.jit(jax.grad(f)), lambda f: refs.jit(refs.grad(f))),
    "grad_jit": (lambda f: jax.grad(jax.jit(f)), lambda f: refs.grad(refs.jit(f))),
    "jit": (jax.jit, refs.jit),
    "value_and_grad": (jax.value_and_grad, refs.value_and_grad),
    "checkpoint": (
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: refs.grad(refs.checkpoint(f)),
    ),
}


@pytest.fixture(params=PROGRAMS)
def program(request: Any) -> Program:
    return PROGRAMS[request.param]()


@pytest.mark.parametrize("way", WAYS)
def test_without_a_ref(program: Program, way: str) -> None:
    natively, with_refs = (transform(program.plain) for transform in WAYS[way])
    expected = or_skip(natively, T(0.7))
    jax.tree.map(close, with_refs(T(0.7)), expected)


@pytest.mark.parametrize("way", WAYS)
def test_with_refs(program: Program, way: str) -> None:
    natively, with_refs = WAYS[way]
    expected = or_skip(natively(program.plain), T(0.7))
    w, n = refs.new_ref(T(1.5)), refs.new_ref(0)
    call = with_refs(lambda x: program.stateful(w, n, x))
    for times in (1, 2):
        jax.tree.map(close, call(T(0.7)), expected)
        assert n[...] == times
    close(w[...], T(1.5))


def test_lanes(program: Program) -> None:
    x = jnp.array([0.3, 0.7, 1.1], T)
    expected = or_skip(jax.vmap(program.plain), x)
    close(refs.vmap(program.plain)(x), expected)
    w, n = refs.new_ref(T(1.5)), refs.new_ref(0)

    def lane(x: Any) -> Any:
        value = program.stateful(w, refs.new_ref(0), x)
        n.at[...].add(1)
        return value

    close(refs.vmap(lane)(x), expected)
    close(refs.jit(refs.vmap(lane))(x), expected)
    assert n[...] == 6


def or_skip(call: Callable[..., Any], *args: Any) -> Any:
    """What JAX itself makes of a program, if it can."""
    try:
        return call(*args)
    except Exception as error:
        pytest.skip(f"JAX: {type(error).__name__}: {str(error)[:80]}")


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_linear_operator_over_a_ref_has_no_derivative():
    lx = pytest.importorskip("lineax")
    matrix = refs.new_ref(jnp.array([[2.0, 1.0], [1.0, 3.0]], T), name="matrix")
    like = jax.ShapeDtypeStruct((2,), T)

    def solve(matrix: Any, x: Any, read: Callable[[Any], Any]) -> Any:
        held = read(matrix)
        operator = lx.FunctionLinearOperator(lambda v: held[...] @ v, like)
        return lx.linear_solve(operator, jnp.stack([x, x])).value.sum()

    wanted = jax.grad(lambda m: jnp.linalg.solve(m, jnp.ones(2, T)).sum())(matrix[...])
    close(refs.grad(solve)(matrix, T(1), lambda r: r[...]), wanted)
    for argnum in (0, 1):
        with pytest.raises(refs.errors.MissingRuleError, match="linear_solve"):
            refs.grad(solve, argnum)(matrix, T(1), lambda r: r)
    with pytest.raises(refs.errors.MissingRuleError, match="linear_solve"):
        refs.jit(refs.grad(lambda x: solve(matrix, x, lambda r: r)))(T(1))


GLOBAL = refs.new_ref(jnp.array([[2.0, 1.0], [1.0, 3.0]], T), name="GLOBAL")


@pytest.mark.parametrize("solver", ["LU", "CG"])
@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit])
def test_a_linear_operator_over_a_global_ref_has_no_derivative(solver, wrap):
    lx = pytest.importorskip("lineax")
    solvers = {"LU": lx.LU(), "CG": lx.CG(rtol=1e-5, atol=1e-5)}
    like = jax.ShapeDtypeStruct((2,), T)

    def solve(_):
        spd = lx.positive_semidefinite_tag
        operator = lx.FunctionLinearOperator(lambda v: GLOBAL[...] @ v, like, spd)
        return lx.linear_solve(operator, jnp.ones(2, T), solvers[solver]).value.sum()

    with pytest.raises((refs.errors.MissingRuleError, TypeError)):
        wrap(refs.grad(solve))(GLOBAL)


def test_counts_of_a_solvers_function():
    optx = pytest.importorskip("optimistix")
    calls = refs.new_ref(0)

    def equation(y: Any, args: Any) -> Any:
        calls.addupdate(1)
        return y**2 - args

    solver = optx.Newton(rtol=1e-5, atol=1e-5)
    root = refs.jit(lambda x: optx.root_find(equation, solver, T(1), args=x).value)
    close(root(T(2)), 2**0.5)
    assert calls[...] > 1


@pytest.mark.parametrize("is_over_refs", [False, True])
def test_a_model_that_may_only_be_changed_in_the_trace_that_it_is_made_in(is_over_refs):
    nnx = pytest.importorskip("flax.nnx")
    calls = refs.new_ref(0)
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # It counts its keys.

    def apply(model, x):
        if is_over_refs:
            calls[...] += 1
        return model(x)

    x = jnp.ones(8)
    expected = jax.jit(lambda model, x: model(x))(dropout, x)
    np.testing.assert_array_equal(refs.jit(apply)(dropout, x), expected)
    assert calls[...] == is_over_refs
