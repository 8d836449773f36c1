"""One traced and compiled form of a function, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._access import check_ref
from refs._eager import buffer_of, store
from refs._tracing import Call, adopt, result_of
from refs.transforms._signature import Static, broadcast_prefix
from refs.transforms._transaction import Transaction, links_of
from refs.transforms.in_place import call_in_place


class Options(NamedTuple):
    """The keywords of `refs.jit` that a compilation depends on."""

    in_shardings: Any
    out_shardings: Any
    compiler_options: dict[str, Any] | None
    inline: bool


class Entry:
    """One traced and compiled form of a function."""

    def __init__(
        self,
        fun: Callable[..., Any],
        static: Static,
        donated: Sequence[bool],
        options: Options,
        call: Call,
    ):
        def rebuild(refs: Sequence[Any], leaves: Sequence[Any]) -> Any:
            return static.restore(*call.rebuild(refs, leaves))

        self.transaction = Transaction.of(fun, call.refs, call.leaves, rebuild)
        for ref in self.transaction.program.refs:
            check_ref(ref, "call")
        self._donated = [d for d, k in zip(donated, call.ref_places, strict=True) if k is None]
        self._can_fail = _jax.can_fail(self.transaction.traced.jaxpr)
        self.compiled = self._compile(fun, options, call)

    def _compile(self, fun: Callable[..., Any], options: Options, call: Call) -> Any:
        def pure(state: Any, constants: Any, donated: list[Any], kept: list[Any]) -> Any:
            leaves = self._join(donated, kept)
            return call_in_place(self.transaction.run, state, constants, leaves)

        pure.__name__ = pure.__qualname__ = getattr(fun, "__name__", "function")
        keywords: dict[str, Any] = {}
        if options.compiler_options:
            keywords["compiler_options"] = options.compiler_options
        if options.in_shardings is not None:
            flat = broadcast_prefix(options.in_shardings, call.tree)
            arrays = [s for s, k in zip(flat, call.ref_places, strict=True) if k is None]
            keywords["in_shardings"] = (None, None, *self._split(arrays))
        state = self._shardings(self.transaction.refs(self.transaction.written, call.refs))
        if options.out_shardings is not None:
            traced = self.transaction.traced
            markers = traced.out_leaves
            flat = broadcast_prefix(options.out_shardings, traced.out_tree)
            arrays = [s for s, m in zip(flat, markers, strict=True) if m is None]
            keywords["out_shardings"] = (state, (arrays, None))
        elif state is not None:
            keywords["out_shardings"] = (state, None)
        return jax.jit(pure, donate_argnums=(0, 2), keep_unused=True, **keywords)

    @staticmethod
    def _shardings(refs: Sequence[Any]) -> Any:
        """A ref keeps its sharding; on a single device there is nothing to say."""
        shardings = [buffer_of(r).sharding for r in refs]
        return shardings if any(len(s.device_set) > 1 for s in shardings) else None

    def fits(self, refs: Sequence[Any]) -> bool:
        return self.transaction.links == links_of(refs, self.transaction.program.refs)

    def operands(self, call: Call) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """What the compiled function takes."""
        t = self.transaction
        return (
            [buffer_of(r) for r in t.refs(t.written, call.refs)],
            [buffer_of(r) for r in t.refs(t.read, call.refs)],
            *self._split(call.leaves),
        )

    def run(self, compiled: Callable[..., Any], call: Call) -> Any:
        """Runs the compiled function and gives the written refs their new buffers."""
        t = self.transaction
        written = t.refs(t.written, call.refs)
        operands = self.operands(call)
        if self._can_fail:
            state, (arrays, new) = _run_or_restore(compiled, written, operands)
        else:
            state, (arrays, new) = compiled(*operands)
        for ref, buffer in zip(written, state, strict=True):
            store(ref, buffer)
        made = [adopt(v, origin) for v, origin in zip(new, t.new_origins, strict=True)]
        return result_of(t.traced.out_tree, t.traced.out_leaves, arrays, call.refs, made)

    @property
    def out_info(self) -> Any:
        """The result's shapes and dtypes."""
        t = self.transaction
        avals = t.traced.jaxpr.out_avals
        n_arrays = len(avals) - len(t.new_origins)
        inputs = t.traced.jaxpr.in_avals

        def shape(aval: Any, is_ref: bool = False) -> Any:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, is_ref=is_ref)

        return result_of(
            t.traced.out_tree,
            t.traced.out_leaves,
            [shape(a) for a in avals[:n_arrays]],
            [shape(a, is_ref=True) for a in inputs],
            [shape(a, is_ref=True) for a in avals[n_arrays:]],
        )

    def _split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        donated = [x for x, d in zip(leaves, self._donated, strict=True) if d]
        return donated, [x for x, d in zip(leaves, self._donated, strict=True) if not d]

    def _join(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        first, second = iter(donated), iter(kept)
        return [next(first) if d else next(second) for d in self._donated]


def _run_or_restore(compiled: Callable[..., Any], written: Sequence[Any], operands: Any) -> Any:
    """A program that can fail consumes its inputs all the same: it gets them, we keep copies."""
    copies = [buffer.copy() for buffer in operands[0]]
    try:
        return jax.block_until_ready(compiled(*operands))
    except BaseException:
        for ref, copy in zip(written, copies, strict=True):
            store(ref, copy)
        raise
