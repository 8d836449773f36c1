"""`refs.reversible`: gradients through any number of steps in constant memory."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from refs import _jax
from refs._discharge.interpreter import Context
from refs._discharge.op_by_op import OpByOp, is_staged
from refs._discharge.rules.reversible import call_reversible
from refs._handles.predicates import is_ref
from refs._reversible.fixed import Fixed, fixed_of
from refs._reversible.primitive import Settings, reversible_p
from refs._tracing import touch_analysis
from refs._tracing.discharged import is_to_be_discharged
from refs._tracing.trace import Call, advised
from refs._transactions.calls import in_transaction
from refs._transactions.nested import call_over_arrays
from refs._transactions.signature import Choice, check_call, check_callable
from refs._types import RefLike, Value
from refs.errors import RefValueError

P = ParamSpec("P")
R = TypeVar("R")


@overload
def reversible(
    fun: Callable[P, R],
    *,
    mode: str | Fixed = ...,
    tolerance: float | None = ...,
    anchors: int | None = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
) -> Callable[P, R]: ...


@overload
def reversible(
    fun: None = ...,
    *,
    mode: str | Fixed = ...,
    tolerance: float | None = ...,
    anchors: int | None = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def reversible(
    fun: Any = None,
    *,
    mode: str | Fixed = "float",
    tolerance: float | None = 1e-3,
    anchors: int | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Any:
    """Makes the gradient of `fun` undo its steps, instead of storing them.

    The backward pass starts from what the refs, and the carries of loops, have held at last, and
    runs the updates in reverse: `a[...] += f(b[...])` by `a[...] -= f(b[...])`, and `a = a + f(b)`
    by `a = a - f(b)`. So the memory that a gradient takes doesn't grow with the number of steps.
    Wrap the loop, not the layer.

    In forward mode, and where nothing is differentiated, it is the plain function.

    Args:
      fun: a function of arrays and refs, which may be anywhere in its arguments, or closed over.
        What it does to refs must be possible to undo, as far as the gradient needs what they held:
        sums with what is known, differences, exchanges, and other operations that can be inverted.
        A loop over arrays alone for which this isn't possible is left to JAX. Without `fun`, a
        decorator is returned.
      mode: how float refs are kept. "float": as they are; sums are undone up to rounding.
        `refs.Fixed(bits)`: as integers, exactly; what is written is rounded.
      tolerance: the state that was restored is compared with the initial one. If a float is off by
        more than this part of the largest number in its ref, every gradient is NaN. None: don't
        compare, nor keep the initial state.
      anchors: keep the state every so many steps of an outermost loop, compare and restart there.
      static_argnums: positions of arguments that `fun` gets as Python values; never refs.
      static_argnames: names of such arguments.

    Raises:
      RefTypeError: when called with a ref in a static argument, or a leaf that is no array.
      RefValueError: if `mode`, `tolerance` or `anchors` isn't one; when called with a static
        argument that can't be hashed.
      NotReversibleError: when the gradient is traced, if it needs what a ref held before a write
        that can't be undone.

    The idea is that of Gomez et al., "The reversible residual network" (2017).

    >>> a, b = refs.new_ref(1.0), refs.new_ref(0.0)
    >>> @refs.reversible
    ... def orbit(k):
    ...     def step(_, __):
    ...         b[...] -= 0.01 * k * a[...]
    ...         a[...] += 0.01 * b[...]
    ...     refs.fori_loop(0, 1000, step, None)
    ...     return a[...]
    >>> round(float(refs.grad(orbit)(1.0)), 3)
    2.743
    """
    if fun is None:
        options = {"static_argnums": static_argnums, "static_argnames": static_argnames}
        return lambda fun: reversible(
            fun, mode=mode, tolerance=tolerance, anchors=anchors, **options
        )
    check_callable("reversible", fun)
    settings = Settings(fixed_of(mode), _checked(tolerance), _counted(anchors))
    choice = Choice.of(fun, static_argnums, static_argnames)

    def bound(inner: Callable[..., Any]) -> Callable[..., Any]:
        def called(leaves: list[Value]) -> Any:
            with jax.disable_jit(False):
                closed, shape = advised(jax.make_jaxpr(inner, return_shape=True))(leaves)
            tree = jax.tree.structure(shape)
            jaxpr, trace = _jax.without_constants(closed), _jax.current_trace()
            operands = [*closed.consts, *leaves]
            if not touch_analysis.closed_over(closed) and not any(map(is_ref, operands)):
                # All refs are made inside: this is a pure function, wherever it is called.
                out = call_reversible(Context(differentiated=True), jaxpr, settings, operands)
            elif isinstance(trace, OpByOp) or (is_staged(trace) and is_to_be_discharged()):
                out = reversible_p.bind(*operands, jaxpr=jaxpr, settings=settings)
            else:  # JAX transforms this function over refs itself: it is the plain one.
                return inner(leaves)
            return jax.tree.unflatten(tree, out)

        return called

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        static, rest, named = choice.split(args, kwargs)
        static.checked()
        call = Call.of(rest, named)
        check_call("reversible", static, call)

        def inside(refs: list[RefLike], leaves: list[Value]) -> Any:
            given = call._replace(refs=refs, leaves=leaves)
            return call_over_arrays(bound, fun, static, given)

        key = (static, call.tree, call.ref_places, settings)
        return in_transaction(inside, call.refs, call.leaves, [fun], key)

    # For `refs.testing.check_reversible`.
    vars(wrapped)["reversible_options"] = {
        "mode": mode,
        "tolerance": tolerance,
        "anchors": anchors,
    }
    return wrapped


def _checked(tolerance: float | None) -> float | None:
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and tolerance >= 0):
        raise RefValueError(
            f"reversible: tolerance {tolerance!r}: it is a number, not negative, or None"
        )
    return tolerance


def _counted(anchors: int | None) -> int | None:
    is_number = isinstance(anchors, numbers.Integral) and not isinstance(anchors, bool)
    if anchors is not None and not (is_number and anchors > 0):
        raise RefValueError(
            f"reversible: anchors {anchors!r}: it is a positive number of steps, or None"
        )
    return None if anchors is None else int(anchors)
