"""The function that users call: it finds the program for the arguments, and calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from refs import _jax
from refs._jit.program import MISS, TypesDiffer
from refs._transactions.signature import Choice, Static
from refs._types import PyTreeDef


class Bucket:
    """The programs for arguments of one structure, and equal static ones.

    Attributes:
      programs: all of them.
      ready: those that have run: quick calls try them, the last one first.
    """

    def __init__(self, tree: PyTreeDef):
        self.programs: list[Any] = []
        self.ready: list[Any] = []
        self.flatten = tree.flatten_up_to


class Table:
    """The programs of a function.

    Attributes:
      static: which arguments are static.
      instances: of a method: its compiled functions for instances that are no pytrees, by `id`.
      buckets: by static arguments and structures.
      changed: is called when something has changed.
    """

    def __init__(self, static: Choice):
        self.static = static
        self.instances: dict[int, Callable[..., Any]] = {}
        self.buckets: dict[tuple[Static | None, PyTreeDef], Bucket] = {}
        self.changed: Callable[[], None] = lambda: None

    def clear(self) -> None:
        """Forgets all programs."""
        self.buckets.clear()
        self.instances.clear()
        self.changed()

    def bucket(self, static: Static | None, tree: PyTreeDef) -> Bucket:
        """The bucket for such arguments, a new one if there is none."""
        return self.buckets.setdefault((static, tree), Bucket(tree))

    def set_ready(self, bucket: Bucket, program: Any) -> None:
        """Lets quick calls try a program, before others."""
        if not bucket.ready or bucket.ready[0] is not program:
            bucket.ready = [program, *(p for p in bucket.ready if p is not program)]
            self.changed()

    def programs(self) -> Iterator[Any]:
        """All programs."""
        for bucket in [*self.buckets.values()]:
            yield from bucket.programs


class _Programs(Protocol):
    """What the dispatcher knows of `Programs`."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


def dispatcher(table: Table, programs: _Programs) -> Callable[..., Any]:
    """The function that users call: it runs the program that fits the arguments."""
    trace_state, eval_trace = _jax.trace_state, _jax.eval_trace
    nans, infs = jax.debug_nans, jax.debug_infs
    has_static = bool(table.static.nums or table.static.names)
    split, instances, buckets = table.static.splitter(), table.instances, table.buckets
    flatten_any = jax.tree.flatten
    # Of the only program, if it touches no refs: itself, as `jax.jit` made it.
    plain: Any = None
    # While arguments have one structure: `flatten(arguments)` gives their leaves, or raises
    # ValueError. (It takes half the time of what doesn't know the structure, but its error prints
    # the arguments.) And if no arguments are static: the program that has run last, and its call.
    flatten = program = quick = None
    of_one_tree: dict[Static | None, Bucket] = {}

    def changed() -> None:
        nonlocal plain, flatten, program, quick, of_one_tree
        # It doesn't close over the table, which holds it: the cycle would keep the refs alive.
        known = [*buckets.items()]
        all_programs = [program for _, bucket in known for program in bucket.programs]
        ready = known[0][1].ready if len(known) == 1 and not has_static else []
        is_plain = len(all_programs) == 1 and all_programs[0].is_plain
        plain = all_programs[0].compiled if is_plain else None
        flatten = known[0][1].flatten if len({tree for (_, tree), _ in known}) == 1 else None
        of_one_tree = {static: bucket for (static, _), bucket in known}
        is_quick = ready and not is_plain
        program, quick = (ready[0], ready[0].call) if is_quick else (None, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        if trace_state.value is not eval_trace or nans.value or infs.value:
            return programs.call(args, kwargs)
        if quick is not None:
            try:
                flat = flatten((args, kwargs))  # pyright: ignore[reportOptionalCall]
            except ValueError:
                return programs.call(args, kwargs)
            result = quick(program, flat, args, kwargs)
            return result if result is not MISS else call_another(flat, args, kwargs)
        if plain is not None:
            try:
                return plain(*args, **kwargs)
            except TypesDiffer:
                pass
            return programs.call(args, kwargs)
        if instances and args and id(args[0]) in instances:
            return instances[id(args[0])](*args[1:], **kwargs)
        static, rest, named = None, args, kwargs
        try:
            if has_static:
                static, rest, named = split(args, kwargs)
            if flatten is not None:
                flat = flatten((rest, named))
                bucket = of_one_tree.get(static)
            else:
                flat, tree = flatten_any((rest, named))
                bucket = buckets.get((static, tree))
        except Exception:
            bucket = None  # `programs.call` raises it, if it is the user's.
        if bucket is not None:
            for candidate in bucket.ready:
                result = candidate.call(candidate, flat, args, kwargs)
                if result is not MISS:
                    if candidate is not bucket.ready[0]:
                        table.set_ready(bucket, candidate)
                    return result
        return programs.call(args, kwargs)

    def call_another(flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that the program which has run last isn't for."""
        for bucket in [*buckets.values()]:
            for candidate in bucket.ready[1:]:
                result = candidate.call(candidate, flat, args, kwargs)
                if result is not MISS:
                    table.set_ready(bucket, candidate)
                    return result
        return programs.call(args, kwargs)

    table.changed = changed
    return call


class Methods(dict[str, Any]):
    """The attributes of a compiled function, hidden from `functools.wraps`, which copies them.

    `jax.jit(f)` calls it: our `f.trace` would stand in the place of JAX's.
    """

    def keys(self) -> Any:
        return {}.keys()

    def __iter__(self) -> Any:
        return iter(())
