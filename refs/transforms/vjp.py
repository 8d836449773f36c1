"""`refs.vjp`: the output, and a function that pulls cotangents back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from refs import _jax
from refs._access import addupdate, describe
from refs._tracing import is_ref
from refs._view import RefView
from refs.errors import RefTypeError, RefValueError
from refs.transforms._differentiable import Differentiable, Inputs, Variable, part_of
from refs.transforms._transaction import in_transaction, run


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Evaluates `fun(*primals)` and the pullback there. As `jax.vjp`.

    Args:
      fun: a function over refs.
      *primals: arrays, refs, views and pytrees of them: all are variables. A ref's value when the
        call begins is what it is differentiated at.
      has_aux: whether `fun` returns a pair, of which the second is auxiliary data.

    Returns:
      `(output, pullback)`, or `(output, pullback, aux)`. The `Pullback` takes a cotangent of the
      output and returns a tuple with one of each primal, that of a ref being an array. Its method
      `with_refs` says which are to be accumulated into refs instead.

    Raises:
      RefValueError: if a ref is a variable twice.
      RefEscapeError: if `fun` returns a ref, other than as auxiliary data.

    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> out, pullback = refs.vjp(lambda w, x: w[...] * x, w, 3.0)
    >>> pullback(jnp.ones(2))
    (Array([3., 3.], dtype=float32), Array(3., dtype=float32, weak_type=True))
    """
    inputs = Inputs.of("vjp", tuple(range(len(primals))), primals, {})
    f = Differentiable("vjp", fun, inputs, has_aux)
    out, native, aux = f.run(lambda values: jax.vjp(f, values, has_aux=True))
    pullback = Pullback(native, inputs, f.out_tree, f.has_backward_effects)
    return (f.outputs(out), pullback, aux) if has_aux else (f.outputs(out), pullback)


@jax.tree_util.register_pytree_node_class
class Pullback:
    """The second result of `refs.vjp`: a function from cotangents to cotangents.

    It is a pytree of what the backward pass needs, so it can be passed to a jitted function.
    """

    def __init__(self, native: Any, inputs: Inputs, out_tree: Any, has_effects: bool):
        self._native = native
        self._tree, self._variables = inputs.tree, inputs.variables
        self._types = tuple(inputs.type_of(v) for v in inputs.variables)
        self._out_tree, self._has_effects = out_tree, has_effects

    def __call__(self, cotangent: Any) -> Any:
        """The cotangent of each primal, given that of the output."""
        return self._apply([jax.ad.GradValue()] * len(self._variables), cotangent)

    def with_refs(self, *wanted: Any) -> Callable[[Any], Any]:
        """Says what is to become of each cotangent, as `jax.vjp`'s function does.

        Args:
          *wanted: one for each primal, of the same structure. A leaf is a ref, into which the
            cotangent will be accumulated; `jax.ad.GradValue()`, to have it returned; or
            `jax.ad.DontWant()`, to have it not computed at all.

        Returns:
          A function of the output's cotangent. Its result has `jax.ad.GradRef()` and
          `jax.ad.DidntWant()` in the places of the others.

        Raises:
          RefValueError: if the structure is another.
          RefTypeError: if a leaf is none of these, or a ref of another shape or dtype.

        >>> total = refs.new_ref(jnp.ones(2))
        >>> _, pullback = refs.vjp(lambda x: x**2, jnp.array([3.0, 4.0]))
        >>> pullback.with_refs(total)(jnp.ones(2))
        (GradRef(),)
        >>> total
        Ref([7., 9.], dtype=float32)
        """
        leaves, tree = jax.tree.flatten(wanted)
        if tree != self._tree:
            raise RefValueError(
                f"with_refs: the primals have the structure {self._tree}, and the arguments {tree}"
            )
        for x, (shape, dtype) in zip(leaves, self._types, strict=True):
            if is_ref(x) and (x.shape, x.dtype.name) != (shape, dtype):
                raise RefTypeError(
                    f"with_refs: a cotangent of type {dtype}{list(shape)} can't be accumulated "
                    f"into {describe(x)} of type {x.dtype}{list(x.shape)}"
                )
            if not is_ref(x) and not isinstance(x, jax.ad.GradValue | jax.ad.DontWant):
                raise RefTypeError(
                    f"with_refs takes a Ref, `jax.ad.GradValue()` or `jax.ad.DontWant()` for each "
                    f"primal, not a {type(x).__name__}"
                )
        return lambda cotangent: self._apply(leaves, cotangent)

    def _apply(self, wanted: list[Any], cotangent: Any) -> Any:
        cts, tree = jax.tree.flatten(cotangent)
        if tree != self._out_tree:
            raise RefValueError(
                f"the output of the differentiated function has the structure {self._out_tree}, "
                f"and the cotangent {tree}"
            )
        into = [x for x in wanted if is_ref(x)]

        def backward(into: list[Any], cts: list[Any]) -> list[Any]:
            rest = iter(into)
            items = [next(rest) if is_ref(x) else x for x in wanted]
            return [x for x in self._backward(items, cts) if not _is_word(x)]

        # JAX transposes loops and branches into ones that hide the refs of users' backward rules.
        run_it = run if self._has_effects else in_transaction
        arrays = iter(run_it(backward, into, cts))
        return jax.tree.unflatten(
            self._tree,
            [
                jax.ad.GradRef()
                if is_ref(x)
                else (jax.ad.DidntWant() if isinstance(x, jax.ad.DontWant) else next(arrays))
                for x in wanted
            ],
        )

    def _backward(self, wanted: list[Any], cts: list[Any]) -> list[Any]:
        """What becomes of each variable's cotangent."""
        n_values = 1 + max((v.position for v in self._variables), default=-1)
        asked: list[Any] = [jax.ad.DontWant()] * n_values
        for variable, x in zip(self._variables, wanted, strict=True):
            if is_ref(x) and not _goes_straight_in(variable):
                x = jax.ad.GradValue()
            if not isinstance(x, jax.ad.DontWant):
                asked[variable.position] = x
        [values] = self._native.with_refs(asked)(cts)
        return [self._finish(v, x, values) for v, x in zip(self._variables, wanted, strict=True)]

    def _finish(self, variable: Variable, wanted: Any, values: list[Any]) -> Any:
        value = values[variable.position]
        if isinstance(wanted, jax.ad.DontWant):
            return jax.ad.DidntWant()
        if variable.view is not None:
            value = part_of(value, variable.view)
        if is_ref(wanted) and not _is_word(value):
            addupdate(wanted, ..., value)
            return jax.ad.GradRef()
        return value

    def tree_flatten(self) -> tuple[Any, ...]:
        # The indices of a view may be arrays. Its ref isn't needed any more.
        flat = [v.view.tree_flatten() if v.view is not None else None for v in self._variables]
        arrays = [None if x is None else x[0][1:] for x in flat]
        paths = tuple(None if x is None else x[1] for x in flat)
        positions = tuple(v.position for v in self._variables)
        fixed = (self._tree, self._types, self._out_tree, self._has_effects)
        return (self._native, arrays), (positions, paths, *fixed)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> Pullback:
        pullback = object.__new__(cls)
        pullback._native, arrays = children
        positions, paths, *fixed = aux
        pullback._tree, pullback._types, pullback._out_tree, pullback._has_effects = fixed
        pullback._variables = tuple(
            Variable(k, None if p is None else RefView.tree_unflatten(p, (None, *indices)))
            for k, p, indices in zip(positions, paths, arrays, strict=True)
        )
        return pullback


def _goes_straight_in(variable: Variable) -> bool:
    """A part's cotangent is taken out of the whole's first."""
    return _jax.can_accumulate_gradients and variable.view is None


def _is_word(x: Any) -> bool:
    return isinstance(x, jax.ad.GradRef | jax.ad.DidntWant)
