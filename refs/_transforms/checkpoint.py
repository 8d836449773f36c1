"""`refs.checkpoint`: recompute in the backward pass instead of storing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from refs._tracing.trace import Call
from refs._transactions.calls import in_transaction
from refs._transactions.nested import call_over_arrays
from refs._transactions.signature import Choice, check_call, check_callable, flags
from refs._types import RefLike, Value

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(
    fun: Callable[P, R],
    *,
    prevent_cse: bool | Sequence[bool] = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Callable[P, R]:
    """Makes `fun` recompute its intermediate values when it is differentiated.

    Works like `jax.checkpoint`. The effects of `fun` on refs happen once, however often it is
    recomputed.

    Args:
      fun: a function over refs, which may be anywhere in its arguments, or closed over.
      prevent_cse: whether XLA is kept from undoing the recomputation: a bool, or one for each
        positional argument or part of one, in tuples or in a tree prefix.
      policy: which values are stored nevertheless, one of `jax.checkpoint_policies` for instance.
      static_argnums: positions of arguments that `fun` gets as Python values; never refs.
      static_argnames: names of such arguments.

    Raises:
      RefTypeError: when called with a ref in a static argument, or beside refs with a leaf that is
        no array.
      RefValueError: when called with a static argument that can't be hashed, or if `prevent_cse`
        doesn't fit the arguments.

    >>> n = refs.new_ref(jnp.int32(0))
    >>> @refs.checkpoint
    ... def layer(x):
    ...     n[...] += 1
    ...     return jnp.sin(jnp.sin(x))
    >>> refs.grad(layer)(0.0), n[...]
    (Array(1., dtype=float32, weak_type=True), Array(1, dtype=int32))
    """
    check_callable("checkpoint", fun)
    choice = Choice.of(fun, static_argnums, static_argnames)

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        static, rest, named = choice.split(args, kwargs)
        static.checked()
        call = Call.of(rest, named)
        if call.refs:  # Otherwise JAX's own error is told.
            check_call("checkpoint", static, call)
        cse: Any = prevent_cse
        if not isinstance(cse, bool):
            kept = [f for k, f in enumerate(cse) if k not in choice.positions(args)]
            each = flags("checkpoint", "prevent_cse", (tuple(kept), True), call.tree)
            cse = ([f for f, k in zip(each, call.ref_places, strict=True) if k is None],)

        def inside(refs: list[RefLike], leaves: list[Value]) -> Any:
            return call_over_arrays(
                lambda inner: jax.checkpoint(inner, prevent_cse=cse, policy=policy),
                fun,
                static,
                call._replace(refs=refs, leaves=leaves),
            )

        settings = (static, call.tree, call.ref_places, policy, str(cse))
        return in_transaction(inside, call.refs, call.leaves, [fun], settings)

    return checkpointed


remat = checkpoint
