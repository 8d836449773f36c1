"""JAX's new forms of `scan`, `checkpoint` and custom rules mean over refs what the old ones do.

Each program runs with JAX as it is, and with the switch on: results, contents and derivatives are
the same. What JAX 0.12 itself has wrong in its new `scan` (it goes forwards if it should go in
reverse, can't be mapped or differentiated backwards, and is dropped in `jax.jit` if nothing uses
its rows) is right where this library discharges it.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.switches import switched_on

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="JAX 0.10 can't map its new checkpoints"
)
X = np.float32([0.5, -1.0, 2.0])
W = np.float32([[1.0, 2.0, 3.0], [0.5, 0.25, 1.0], [-1.0, 1.0, 2.0], [0.1, 0.2, 0.3]])
SWITCHES = ["jax_scan3", "jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3"]


def carried(r, x):
    def body(c, w):
        r[...] += c * w
        return c * 0.5, jnp.sin(c) * w[0]

    c, ys = lax.scan(body, x, jnp.asarray(W))
    return c + ys.sum()


def in_reverse(r, x):
    def body(c, w):
        r[1:] *= 0.5
        r[0] += c
        return c + w[1], (c, r[1])

    c, (ys, zs) = lax.scan(body, x, jnp.asarray(W), reverse=True, unroll=2)
    return c + ys[0] * 3 + zs[-1]


def only_carries(r, x):
    return lax.fori_loop(0, 3, lambda i, c: c * r[i] + x, x) * 2


def over_rows(r, x):
    rows = refs.new_ref(jnp.asarray(W))

    def body(c, row):
        row[...] *= c
        return c + row[0], row[1]

    c, ys = refs.scan(body, x, rows)
    r[...] += rows[...].sum(0)
    return c + ys.sum()


def rows_by_jax(r, x):
    def body(total, i):
        r[i] = r[i] * x + total
        return total + r[i], None

    return lax.scan(body, jnp.float32(0), jnp.arange(3))[0]


def mapped(r, x):
    r[...] = lax.map(lambda v: jnp.sin(v) * x, r[...])
    return lax.map(lambda v: v * v, r[...]).sum()


def nested(r, x):
    def inner(c, i):
        r[i] += c
        return c * 0.9, r[i]

    def outer(c, w):
        c, ys = lax.scan(inner, c + w[0], jnp.arange(3))
        return c, ys.sum()

    c, ys = lax.scan(outer, x, jnp.asarray(W), reverse=True)
    return c * ys.sum()


def no_steps(r, x):
    return lax.scan(lambda c, i: (c * r[i], c), x, jnp.arange(0))[0]


def in_a_branch(r, x):
    def loops(x):
        return lax.fori_loop(0, 2, lambda i, c: c * r[i], x)

    return lax.cond(r[0] > 0, loops, lambda x: x * r[1], x)


def in_a_jit(r, x):
    @jax.jit
    def inner(x):
        r[...] *= 2
        return lax.scan(lambda c, w: (c + w.sum(), c), x, jnp.asarray(W))[0]

    return inner(x) * inner(2 * x)


def checkpointed(r, x):
    @jax.checkpoint
    def layer(x):
        r[0] += jnp.sin(x)
        return jnp.cos(x * r[1])

    return layer(layer(x)) + r[0]


def checkpointed_with_a_policy(r, x):
    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(lambda r, x: jnp.tanh(r[...] @ W[0] * x), policy=policy)
    return layer(r, layer(r, x))


def checkpointed_loop(r, x):
    @jax.checkpoint
    def steps(x):
        def body(i, x):
            r[i] *= jnp.sin(x)
            return x * 0.5 + r[i]

        return lax.fori_loop(0, 3, body, x)

    return steps(x)


def with_a_jvp(r, x):
    @jax.custom_jvp
    def f(x, y):
        r[2] += x
        return jnp.sin(x) * y

    f.defjvp(lambda p, t: (f(*p), 3 * t[0] + 5 * t[1]))
    return f(x, r[0]) + f(2 * x, 1.0)


def with_a_jvp_for_a_ref(r, x):
    @jax.custom_jvp
    def f(r, x):
        r[1] = r[1] * x
        return r[0] * x

    @f.defjvp
    def rule(primals, tangents):
        (r, x), (r_dot, x_dot) = primals, tangents
        r[1] = r[1] * x
        r_dot[1] = 7 * r_dot[1]
        return r[0] * x, 2 * r_dot[0] * x + 4 * x_dot

    return f(r, x) + r[1]


def with_zeros(r, x):
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def f(n, x, y):
        r[0] += n
        return x * y

    def rule(n, primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        is_zero = type(dy) is jax.custom_derivatives.SymbolicZero
        return f(n, x, y), dx * n + (0 if is_zero else 100 * dy)

    f.defjvp(rule, symbolic_zeros=True)
    return f(3, x, 2.0) + f(4, 2 * x, lax.stop_gradient(x))


def with_a_vjp(r, x):
    @jax.custom_vjp
    def f(x, y):
        r[2] += x
        return jnp.sin(x) * y

    def forward(x, y):
        r[2] += 2 * x
        return jnp.sin(x) * y, (x, jnp.cos(y))

    f.defvjp(forward, lambda saved, g: (g * saved[1] * 3, g * saved[0]))
    return f(x, r[0]) + f(2 * x, 1.0)


def with_a_vjp_for_a_ref(r, x):
    @jax.custom_vjp
    def f(r, x):
        r[1] = r[1] * x
        return r[0] * x

    def forward(r, x):
        r[1] = r[1] * x
        return r[0] * x, (r[0], x)

    f.defvjp(forward, lambda saved, g: (jnp.full(3, g * saved[1]), g * saved[0] * 2))
    return f(r, x) + r[1]


def with_residuals_in_a_tree(r, x):
    @jax.custom_vjp
    def f(x):
        return {"y": x * r[0]}

    f.defvjp(
        lambda x: ({"y": x * r[0]}, {"a": (x, None), "b": [r[1], 2.0]}),
        lambda saved, g: (g["y"] * saved["b"][0] * saved["b"][1] + saved["a"][0],),
        symbolic_zeros=False,
    )
    return f(x)["y"]


def whose_backward_rule_counts(r, x):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def backward(x, g):
        r[2] += 1
        return (g * r[2] * x,)

    f.defvjp(lambda x: (jnp.sin(x), x), backward)
    return f(f(x))


def with_rules_in_a_loop(r, x):
    @jax.custom_vjp
    def f(r, x):
        r[0] += x
        return x * r[1]

    f.defvjp(
        lambda r, x: (f(r, x), r[1]),
        lambda saved, g: (None, 2 * g * saved),
    )
    return lax.fori_loop(0, 3, lambda i, x: f(r, x), x)


def with_rules_in_a_checkpoint(r, x):
    f = jax.custom_jvp(lambda x: jnp.sin(x) * 2)
    f.defjvp(lambda p, t: (f(*p), t[0] * 3 * p[0]))

    @jax.checkpoint
    def layer(x):
        r[0] = f(x) * r[0]
        return jax.nn.relu(f(x + 0.1))

    return layer(layer(x)) + r[0]


def a_checkpoint_whose_vjp_rule_writes(r, x):
    @jax.custom_vjp
    def f(x):
        r[0] += 1
        return x * 2

    def forward(x):
        r[0] += 10 * x
        return x * 2, (r[1], x)

    f.defvjp(forward, lambda saved, g: (3 * g * saved[0],))
    return jax.checkpoint(lambda x: f(jnp.sin(f(x))))(x) * r[0]


def a_checkpoint_whose_jvp_rule_writes(r, x):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    @f.defjvp
    def rule(primals, tangents):
        r[2] += r[1]
        return f(*primals), tangents[0] * 7

    return jax.checkpoint(lambda x: jax.checkpoint(f)(x) + f(2 * x))(x)


def a_checkpoint_whose_rule_closes_over_a_value(r, x):
    y = lax.stop_gradient(r[1] * 3)

    @jax.custom_vjp
    def f(x):
        r[0] += 1
        return x * y

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * 5,))
    return jax.checkpoint(f)(x)


PROGRAMS = {
    f.__name__: f
    for f in (
        *(carried, in_reverse, only_carries, over_rows, rows_by_jax, mapped, nested, no_steps),
        *(in_a_branch, in_a_jit, checkpointed, checkpointed_with_a_policy, checkpointed_loop),
        *(with_a_jvp, with_a_jvp_for_a_ref, with_zeros, with_a_vjp, with_a_vjp_for_a_ref),
        *(with_residuals_in_a_tree, whose_backward_rule_counts, with_rules_in_a_loop),
        *(with_rules_in_a_checkpoint, a_checkpoint_whose_vjp_rule_writes),
        *(a_checkpoint_whose_jvp_rule_writes, a_checkpoint_whose_rule_closes_over_a_value),
    )
}
WITHOUT_FORWARD_MODE = {name for name in PROGRAMS if "vjp" in name or "rules_in_a_loop" in name}
WITHOUT_FORWARD_MODE |= {
    "with_residuals_in_a_tree",
    "whose_backward_rule_counts",
    "a_checkpoint_whose_rule_closes_over_a_value",
}


def compiled(program):
    return refs.jit(program)


def gradient(program):
    return refs.jit(refs.grad(program, 1))


def gradient_op_by_op(program):
    return refs.grad(program, 1)


def tangent(program):
    return lambda r, x: refs.jvp(lambda x: program(r, x), (x,), (1.0,))


def in_lanes(program):
    def run(r, x):
        rows = refs.new_ref(jnp.stack([r[...], 2 * r[...]]))
        out = refs.vmap(program)(rows, jnp.stack([x, x + 1]))
        r[...] = rows[...].sum(0)
        return out

    return refs.jit(run)


def in_the_gradient_of_lanes(program):
    def run(r, x):
        rows = refs.new_ref(jnp.stack([r[...], 2 * r[...]]))
        return refs.vmap(program)(rows, jnp.stack([x, x + 1])).sum()

    return refs.jit(refs.grad(run, 1))


WAYS = [compiled, gradient, gradient_op_by_op, tangent, in_lanes, in_the_gradient_of_lanes]


LIMITS = {
    # The ref is gone when the backward pass runs.
    ("whose_backward_rule_counts", in_the_gradient_of_lanes),
    # Lanes share no ref that only a rule touches, and JAX's rules close over no value of a lane.
    ("a_checkpoint_whose_jvp_rule_writes", in_the_gradient_of_lanes),
    ("a_checkpoint_whose_rule_closes_over_a_value", in_the_gradient_of_lanes),
}


def outcome(program, way, switches):
    with contextlib.ExitStack() as stack:
        for name in switches:
            stack.enter_context(switched_on(name))
        r = refs.new_ref(jnp.asarray(X))
        out = way(program)(r, jnp.float32(0.7))
        return jax.tree.map(np.asarray, (out, r[...]))


@pytest.mark.parametrize(
    "way, switches",
    [*((way, SWITCHES) for way in WAYS), *((gradient, [name]) for name in SWITCHES)],
    ids=lambda x: getattr(x, "__name__", None) or " ".join(name[4:] for name in x),
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_the_old_form(name, way, switches):
    if way is tangent and name in WITHOUT_FORWARD_MODE:
        pytest.skip("JAX has no forward mode for custom_vjp")
    if (name, way) in LIMITS:
        pytest.skip("not in the old form either")
    program = PROGRAMS[name]
    wanted = outcome(program, way, [])
    got = outcome(program, way, switches)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, wanted)


def test_a_scan_that_jax_has_differentiated():
    """The tangents of what its body closes over come after its rows."""

    def program(r, x):
        def scanned(x):
            c, ys = lax.scan(lambda c, w: (c * 0.5 + x * w[0], c * w[1] * x), x * 2, W * x)
            return c + ys.sum()

        r[...] += 1
        return jax.jvp(scanned, (x,), (1.0,))

    got, wanted = (outcome(program, compiled, switches) for switches in (["jax_scan3"], []))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, wanted)
