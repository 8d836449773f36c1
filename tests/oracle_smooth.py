"""The oracle for derivatives: difference quotients of plain Python on NumPy arrays, in float64.

A derivative runs its function once, and writes what that writes. What it compares besides is
undone: each of these runs finds the state that the call found.
"""

from types import SimpleNamespace

import numpy as np

from tests import oracle

# Of a smooth function, the error is about its seventh derivative times step ** 6 / 140.
WEIGHTS = ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))


class World:
    """All refs there are."""

    def __init__(self, step):
        self.step, self.refs = step, []

    def new_ref(self, value):
        self.refs.append(oracle.Ref(value))
        return self.refs[-1]

    def undone(self, fun):
        """What `fun()` returns, as if it hadn't been called."""
        before = [(ref, ref.value) for ref in self.refs]
        result = fun()
        for ref, value in before:
            ref.value = value
        del self.refs[len(before) :]
        return result

    def derivative(self, f, x, t):
        """The derivative of `f` at `x`, an array or a ref, in the direction `t`."""

        def at(step):
            if not isinstance(x, oracle.Ref):
                return f(x + step * t)
            x.value = x.value + step * t
            return f(x)

        def between(k):
            h = k * self.step
            return self.undone(lambda: at(h)) - self.undone(lambda: at(-h))

        return sum(weight * between(k) for k, weight in WEIGHTS) / self.step

    def jacobian(self, f, x):
        """(value, derivatives along the last axis)."""
        columns = [self.derivative(f, x, t) for t in np.eye(2)]
        return f(x), np.stack(columns, -1)

    # --- The transformations, as far as stacks use them ---

    def value_and_grad(self, f):
        return lambda x: self.jacobian(f, x)

    def grad(self, f):
        return lambda x: self.jacobian(f, x)[1]

    def hessian(self, f):
        return self.grad(self.grad(f))

    def jvp(self, f, primals, tangents):
        [x], [t] = primals, tangents
        dy = self.derivative(f, x, t)
        return f(x), dy

    def linearize(self, f, x):
        y, jacobian = self.jacobian(f, x)
        return y, lambda t: jacobian @ t

    def vjp(self, f, x):
        y, jacobian = self.jacobian(f, x)
        return y, lambda ct: (np.tensordot(ct, jacobian, np.ndim(ct)),)


def vmap(fun, in_axes=0, out_axes=0):
    """`oracle.vmap` of a function of one argument and with one result."""
    mapped = oracle.vmap(lambda x: (fun(x),), in_axes, out_axes)

    def call(x):
        return mapped(x)[0]

    return call


def namespace(step):
    """What the text of a stack is executed in."""
    world, space = World(step), oracle.namespace()
    derivatives = "grad value_and_grad hessian jvp linearize vjp"
    space["refs"].__dict__.update(
        new_ref=world.new_ref,
        jacfwd=world.grad,
        jacrev=world.grad,
        vmap=vmap,
        **{name: getattr(world, name) for name in derivatives.split()},
        **{name: getattr(oracle, name) for name in ["scan", "while_loop", "fori_loop", "cond"]},
    )
    functions = {name: getattr(np, name) for name in ("sin", "cos", "stack")}
    return space | {"jnp": SimpleNamespace(**vars(space["jnp"]), **functions)}
