"""The form of a function for calls that touch no refs: JAX's own jit of it, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import jax

from refs import _jax
from refs._effects import uses_refs
from refs._tracing import Trace, advised, is_ref, strip_refs
from refs.callbacks._held import calls_host
from refs.transforms._entry import OtherTypes


class Plain:
    """A form of a function for arguments that are no refs.

    Its trace says whether there are others: closed over, made inside, returned. If there are none,
    the function is JAX's own affair in all respects. If there are, the trace is what an `Entry` is
    made of.

    Attributes:
      static, is_alone, flatten: as those of an `Entry`.
      closes_over_tracers: whether it closes over values of an enclosing trace.
      compiled: the function under `jax.jit`, with all of the user's keywords. Where it would have
        to be traced anew it raises `OtherTypes`: with other types of arguments it may touch refs.
    """

    is_plain = is_special = True

    def __init__(
        self,
        fun: Callable[..., Any],
        static: Any,
        flatten: Callable[..., Any],
        choose_static: Mapping[str, Any],
        keywords: Mapping[str, Any],
    ):
        self.static, self.is_alone, self.flatten = static, True, flatten
        self.closes_over_tracers = False
        self._asks = asks = object()
        self._returned: list[Any] = []
        returned = self._returned

        @functools.wraps(fun)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if _asking.get() is not asks:
                raise OtherTypes
            result = fun(*args, **kwargs)
            leaves, tree = jax.tree.flatten(result)
            if not any(map(is_ref, leaves)):
                return result
            arrays, markers, new = strip_refs(leaves, ())
            returned[:] = tree, tuple(markers)
            return arrays, new

        traced.__name__ = _jax.fun_name(fun)
        # Shardings are those of the result as it stands, refs included, which `traced` doesn't
        # always return. It is traced once for both: JAX finds the trace by the function.
        self._bare = jax.jit(traced, **choose_static)
        self.compiled = jax.jit(traced, **choose_static, **keywords)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call, whether or not the function has been traced for it."""
        return self._ask(self.compiled, args, kwargs)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The trace as JAX gives it, with all of the user's keywords."""
        return self._ask(self.compiled.trace, args, kwargs)

    def find_refs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace | None:
        """The trace of a function that touches refs or returns them, None of any other."""
        with advised():
            traced = self._ask(self._bare.trace, args, kwargs)
        # JAX makes operands of them.
        self.closes_over_tracers = len(traced.jaxpr.in_avals) > traced.in_tree.num_leaves
        if not self.returns_refs and not (uses_refs(traced.jaxpr) or calls_host(traced.jaxpr)):
            return None
        tree = traced.out_tree
        return Trace(traced.jaxpr, *(self._returned or (tree, (None,) * tree.num_leaves)))

    @property
    def returns_refs(self) -> bool:
        """Whether the function, as far as it was traced, returns refs."""
        return bool(self._returned)

    def fits(self, call: Any) -> bool:
        """Whether it is for the refs of a call: it is for those that have none."""
        return not call.refs

    def _ask(self, what: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _asking.set(self._asks)
        try:
            return what(*args, **kwargs)
        finally:
            _asking.reset(token)


_asking: ContextVar[object] = ContextVar("_asking", default=None)
