"""`refs.jvp` and `refs.linearize`: forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs._derivatives.at_top_level import op_by_op
from refs._derivatives.derivative import differentiable
from refs._derivatives.inputs import Inputs, part_of
from refs._handles.access import describe, set
from refs._handles.predicates import is_ref
from refs._tracing.trace import unique
from refs._transactions.signature import mirrored
from refs._types import PyTree, RefLike, Value
from refs.errors import RefTypeError, RefValueError


def jvp(fun: Callable[..., Any], primals: PyTree, tangents: PyTree, has_aux: bool = False) -> Any:
    """Evaluates `fun(*primals)` and its derivative in the direction `tangents`.

    Works like `jax.jvp`.

    Args:
      fun: a function over refs.
      primals: a sequence of arrays, refs, views and pytrees of them.
      tangents: one for each of the primals, of the same structure. In the place of a ref or view
        it has an array of the same shape, or another ref, which holds the tangent of the contents
        at entry and, if `fun` writes the primal ref, receives the tangent of the final contents.
      has_aux: whether `fun` returns a pair, of which the second is auxiliary data.

    Returns:
      `(output, tangent)`, or `(output, tangent, aux)`.

    Raises:
      RefTypeError: if the primals or the tangents are not a tuple or list.
      RefValueError: if their structures differ, or a ref is a variable twice, or a tangent twice.
      RefEscapeError: if `fun` returns a ref, other than as auxiliary data.

    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> refs.jvp(lambda w, x: w[...] * x, (w, 3.0), (jnp.ones(2), 0.0))
    (Array([3., 6.], dtype=float32), Array([3., 3.], dtype=float32))
    """
    if not isinstance(primals, tuple | list) or not isinstance(tangents, tuple | list):
        raise RefTypeError(
            f"jvp takes a tuple or list of primals and one of tangents, not a "
            f"{type(primals).__name__} and a {type(tangents).__name__}"
        )
    inputs = Inputs.of("jvp", tuple(range(len(primals))), tuple(primals), {}, "primals")
    directions = _directions("jvp", inputs, tuple(tangents))

    def inside() -> tuple[PyTree, ...]:
        f = differentiable("jvp", fun, inputs, has_aux)

        def pushed(values: list[Value]) -> tuple[Any, ...]:
            tangents = inputs.gather("jvp", directions, values)
            return jax.jvp(f.with_contents, (values,), (tangents,), has_aux=True)

        (out, _), (tangents_out, final), aux = f.run(pushed)
        _follow(inputs, directions, final)
        both = f.outputs(out), f.outputs(tangents_out)
        return (*both, aux) if has_aux else both

    return op_by_op(inside)


def linearize(
    fun: Callable[..., Any], *primals: PyTree, has_aux: bool = False, in_nzs: PyTree = None
) -> Any:
    """Evaluates `fun(*primals)` and its derivative there as a linear function.

    Works like `jax.linearize`.

    Args:
      fun: a function over refs.
      *primals: arrays, refs, views and pytrees of them: all are variables. The derivative with
        respect to a ref is taken at the value that it holds when the call begins.
      has_aux: whether `fun` returns a pair, of which the second is auxiliary data.
      in_nzs: which primals may have nonzero tangents: a bool for each, or a prefix.

    Returns:
      `(output, f_jvp)`, or `(output, f_jvp, aux)`. `f_jvp(*tangents)` returns the output's tangent.
      It is a pytree, takes tangents as `refs.jvp` does, and updates refs among them likewise.

    Raises:
      RefValueError: if a ref is a variable twice; from `f_jvp`, if the tangents' structure is not
        the primals', or a ref is a tangent twice.
      RefEscapeError: if `fun` returns a ref, other than as auxiliary data.

    >>> n = refs.new_ref(jnp.int32(0))
    >>> def f(x):
    ...     n[...] += 1
    ...     return x**2
    >>> _, f_jvp = refs.linearize(f, 3.0)
    >>> f_jvp(1.0), f_jvp(2.0), n[...]
    (Array(6., dtype=float32, weak_type=True), Array(12., dtype=float32, weak_type=True),
     Array(1, dtype=int32))
    """
    inputs = Inputs.of("linearize", tuple(range(len(primals))), primals, {}, "primals")
    f = differentiable("linearize", fun, inputs, has_aux)
    pure = f.holding(in_nzs)(f.with_contents)
    (out, _), native, values, aux = f.run(
        lambda values: (
            *(found := jax.linearize(pure, values, has_aux=True))[:2],
            values,
            found[2],
        )
    )

    def push(native: Callable[..., Any], values: list[Value], *tangents: PyTree) -> PyTree:
        directions = _directions("linearize", inputs, tangents)
        tangents_out, final = native(inputs.gather("linearize", directions, values))
        _follow(inputs, directions, final)
        return f.outputs(tangents_out)

    f_jvp: Any = jax.tree_util.Partial(push, native, values)
    if hasattr(native, "out_nzs"):  # pragma: no branch, JAX before 0.12 has none
        # Those of the outputs come first. JAX 0.11 has them in one flat tuple.
        f_jvp.out_nzs = mirrored(f.out_tree, jax.tree.leaves(native.out_nzs))
    return (f.outputs(out), f_jvp, aux) if has_aux else (f.outputs(out), f_jvp)


def _directions(doing: str, inputs: Inputs, tangents: tuple[PyTree, ...]) -> list[Value | RefLike]:
    """The tangent for each variable: an array, or a ref that holds one. No ref occurs twice."""
    directions = inputs.flatten(doing, tangents)
    ends = [x for x in directions if is_ref(x)]
    if len(unique(ends).items) < len(ends):
        [twice, *_] = [x for k, x in enumerate(ends) if any(x is y for y in ends[:k])]
        raise RefValueError(
            f"{doing}: {describe(twice)} stands for the tangents of two primals, and can get only "
            "one of them in the end: give each a ref of its own"
        )
    return directions


def _follow(inputs: Inputs, directions: Sequence[Value | RefLike], final: dict[int, Value]) -> None:
    """Writes the tangents of final contents to the refs among `directions`.

    `final` has them for the refs that `fun` writes, by the number of the ref.
    """
    for variable, direction in zip(inputs.variables, directions, strict=True):
        number = variable.position - len(inputs.arrays)
        if is_ref(direction) and number in final:
            tangent = final[number]
            view = variable.view
            set(direction, ..., tangent if view is None else part_of(tangent, view))
