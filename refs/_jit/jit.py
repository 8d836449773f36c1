"""`refs.jit`: compiled functions that update the refs they touch in place."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack, overload

import jax

from refs._jit.program import Options
from refs._jit.programs import compiled
from refs._jit.types import Jitted, Keywords, P, R_co
from refs._transactions.signature import Choice, check_callable


@overload
def jit(fun: Callable[P, R_co], /, **keywords: Unpack[Keywords]) -> Jitted[P, R_co]: ...


@overload
def jit(
    fun: None = None, /, **keywords: Unpack[Keywords]
) -> Callable[[Callable[P, R_co]], Jitted[P, R_co]]: ...


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: Any = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a function over refs; the refs that it writes are updated in place.

    `jit` works as `jax.jit`, with its keywords; for a function that touches no refs it is just
    that. Refs may be anywhere in the arguments, the same one several times, closed over at any
    depth, and returned: a ref argument comes back as the same object, a ref made inside as a new
    `Ref`. The buffers of refs that are written are donated and aliased automatically; those of refs
    that are only read are neither. Refs that the function closes over are those of its first call:
    like every Python value that it closes over, they are part of the program.

    Args:
      fun: the function. Without it, a decorator is returned.
      in_shardings: shardings of the arrays among the arguments, as a pytree prefix. A ref keeps
        its own sharding, whatever is given for it.
      out_shardings: shardings of the arrays in the result, and of the refs that are made inside, as
        a pytree prefix.
      static_argnums: positions of arguments that are part of the program; never refs.
      static_argnames: names of such arguments.
      donate_argnums: positions of arguments whose arrays may be overwritten. Refs need none.
      donate_argnames: names of such arguments.
      keep_unused: whether a function that touches no refs keeps the arguments that it doesn't use.
        Any other function keeps all arguments.
      device: deprecated, as in `jax.jit`.
      backend: deprecated, as in `jax.jit`.
      inline: for calls inside another traced function: whether this one is inlined into its jaxpr.
      compiler_options: passed to XLA.

    Returns:
      A function of the same arguments. It has, as `jax.jit`'s has, `lower(*args)`, `trace(*args)`,
      `eval_shape(*args)` and `clear_cache()`. In the first three, arrays may be
      `jax.ShapeDtypeStruct`s, and refs `jax.ShapeDtypeStruct(..., is_ref=True)`. `explain(*args)`
      is `refs.explain` of it.

    Raises:
      RefTypeError: when called with a ref in a static argument.
      RefStateError: when called with a ref that was frozen, freed or lost.
      RefEscapeError: when called, if a loop or a branch returns a ref.
      MissingRuleError: when called, if a ref reaches a primitive that `refs` has no rule for.

    A call also raises any error that `fun` raises. After an error every ref has its old value,
    except where memory runs out while the program runs: then the refs that it writes are lost, and
    using one raises a RefStateError that says so.

    >>> w = refs.new_ref(jnp.ones(3))
    >>> @refs.jit
    ... def step(lr, grad):
    ...     w[...] -= lr * grad
    >>> step(0.5, jnp.ones(3))
    >>> w
    Ref([0.5, 0.5, 0.5], dtype=float32)
    """
    options = Options(
        in_shardings, out_shardings, keep_unused, device, backend, inline, compiler_options
    )

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        check_callable("jit", f)
        jax.jit(  # It raises JAX's own errors about the function and the keywords.
            f,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            **options._asdict(),
        )
        static = Choice.of(f, static_argnums, static_argnames)
        return compiled(f, static, Choice.of(f, donate_argnums, donate_argnames), options)

    return wrap if fun is None else wrap(fun)


def compiling(
    stage: str, fun: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """`fun`, compiled if it doesn't have this stage, `"lower"` for instance, and its arguments.

    A bound method passes attributes of its function on as they are: those know of no instance. So
    it is its function, and the instance the first argument.
    """
    if not hasattr(fun, stage):
        return jit(fun), args
    if isinstance(fun, types.MethodType):
        return fun.__func__, (fun.__self__, *args)
    return fun, args
