"""`refs.jit`: compiled functions that update the refs they touch in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._eager import buffer_of
from refs._tracing import Call, ref_type
from refs.errors import RefTypeError
from refs.transforms._entry import Entry, Options
from refs.transforms._nested import call_over_arrays
from refs.transforms._signature import Choice, take_static
from refs.transforms._stages import Lowered, Traced


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
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a function over refs; the refs that it writes are updated in place.

    As `jax.jit`, with its keywords. Refs may be anywhere in the arguments, the same one several
    times, closed over at any depth, and returned: one of the arguments comes back as the same
    object, one made inside as a new `Ref`. What is written is donated and aliased automatically;
    what is only read is neither. Refs that the function closes over are those of its first call:
    like every Python value that it closes over, they are part of the program.

    Args:
      fun: the function. Without it, a decorator is returned.
      in_shardings: shardings of the arrays among the arguments, as a pytree prefix. A ref keeps
        its own sharding, whatever stands at its place.
      out_shardings: shardings of the arrays in the result, likewise.
      static_argnums: positions of arguments that are part of the program; never refs.
      static_argnames: names of such arguments.
      donate_argnums: positions of arguments whose arrays may be overwritten. Refs need none.
      donate_argnames: names of such arguments.
      inline: for calls inside another traced function: don't keep this one apart.
      compiler_options: passed to XLA.

    Returns:
      A function with methods `lower`, `trace` and `eval_shape`, as `jax.jit`'s has.

    Raises:
      RefTypeError: when called with a ref in a static argument.
      RefStateError: when called with a ref that was frozen, freed or lost.
      RefEscapeError: when called, if a loop or a branch returns a ref.
      MissingRuleError: when called, if a ref reaches a primitive that `refs` has no rule for.

    A call also raises what `fun` raises. Whatever it raises, every ref keeps its old value, except
    where memory runs out while the program runs: then the refs that it writes are lost, and say so
    when used.

    >>> w = refs.new_ref(jnp.ones(3))
    >>> @refs.jit
    ... def step(lr, grad):
    ...     w[...] -= lr * grad
    >>> step(0.5, jnp.ones(3))
    >>> w
    Ref([0.5, 0.5, 0.5], dtype=float32)
    """
    options = Options(in_shardings, out_shardings, compiler_options, inline)

    def wrap(f: Callable[..., Any]) -> Jitted:
        if not callable(f):
            raise RefTypeError(f"jit of a {type(f).__name__}: it compiles a function")
        static = Choice.of(f, static_argnums, static_argnames)
        return Jitted(f, static, Choice.of(f, donate_argnums, donate_argnames), options)

    return wrap if fun is None else wrap(fun)


class Jitted:
    """A compiled function over refs: what `refs.jit` returns."""

    def __init__(self, fun: Callable[..., Any], static: Choice, donate: Choice, options: Options):
        functools.update_wrapper(self, fun)
        self._fun, self._static, self._donate, self._options = fun, static, donate, options
        self._entries: dict[Any, list[Entry]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _jax.is_jit_disabled():
            return self._fun(*args, **kwargs)
        if not _jax.at_top_level():
            return self._call_nested(args, kwargs)
        entry, call = self._prepare(args, kwargs)
        return entry.run(entry.compiled, call)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the function for arguments like these; arrays may be `jax.ShapeDtypeStruct`s."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces and discharges the function for arguments like these."""
        return Traced(*self._prepare(args, kwargs), self._prepare)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes and dtypes, as `jax.ShapeDtypeStruct`s; nothing runs."""
        return self._prepare(args, kwargs)[0].out_info

    def clear_cache(self) -> None:
        """Forgets every compiled program of this function."""
        self._entries.clear()

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, Call]:
        """The entry for these arguments, made at the first call with their like."""
        static, rest, named = take_static(self._static, args, kwargs)
        call = Call.of(rest, named)
        key = (
            static,
            call.tree,
            call.ref_places,
            tuple(_ref_key(r) for r in call.refs),
            tuple(_jax.shaped_abstractify(x) for x in call.leaves),
            _jax.trace_context(),
        )
        entries = self._entries.setdefault(key, [])
        for entry in entries:
            # Which arguments are also closed over is known only after the trace.
            if entry.fits(call.refs):
                return entry, call
        entry = Entry(self._fun, static, self._donated(args, kwargs), self._options, call)
        entries.append(entry)
        return entry, call

    def _donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
        """For each leaf of the arguments that are not static: whether it is donated."""
        static, donated = self._static.positions(args), self._donate.positions(args)
        chosen = [(k in donated, a) for k, a in enumerate(args) if k not in static]
        chosen += [
            (name in self._donate.names, kwargs[name])
            for name in sorted(kwargs)
            if name not in self._static.names
        ]
        return [flag for flag, a in chosen for _ in jax.tree.leaves(a)]

    def _call_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a trace: JAX's own jit over the arrays, closing over the refs."""
        static, args, kwargs = take_static(self._static, args, kwargs)
        return call_over_arrays(
            functools.partial(jax.jit, inline=self._options.inline),
            self._fun,
            static,
            Call.of(args, kwargs),
        )


def _ref_key(ref: Any) -> Any:
    sharding = buffer_of(ref).sharding
    return ref_type(ref), sharding if len(sharding.device_set) > 1 else None
