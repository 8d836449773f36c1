"""The function that users call: it finds the program for the arguments, and calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from refs import _jax
from refs._buffers.exchange import Busy
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
            if len(self.buckets) == 1:
                self.changed()

    def programs(self) -> Iterator[Any]:
        """All programs."""
        for bucket in [*self.buckets.values()]:
            yield from bucket.programs


class _Choice(NamedTuple):
    """What a call tries first.

    Attributes:
      plain: the only program, if it touches no refs: itself, as `jax.jit` made it.
      flatten: gives the leaves of arguments of the structure of all programs, or raises ValueError;
        None if they have several. (It takes half the time of what doesn't know the structure, but
        its error prints the arguments.)
      program, quick: the program that has run last, and its call, if there is one structure, and
        no static arguments.
      of_one_tree: the buckets of this structure, by static arguments.
    """

    plain: Any
    flatten: Any
    program: Any
    quick: Any
    of_one_tree: dict[Static | None, Bucket]


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
    now = _Choice(None, None, None, None, {})  # read and set at once: threads share it

    def changed() -> None:
        nonlocal now
        # It doesn't close over the table, which holds it: the cycle would keep the refs alive.
        known = [*buckets.items()]
        all_programs = [program for _, bucket in known for program in bucket.programs]
        ready = known[0][1].ready if len(known) == 1 and not has_static else []
        is_plain = len(all_programs) == 1 and all_programs[0].is_plain
        is_one_tree = len({tree for (_, tree), _ in known}) == 1
        program = ready[0] if ready and not is_plain else None
        now = _Choice(
            plain=all_programs[0].compiled if is_plain else None,
            flatten=known[0][1].flatten if is_one_tree else None,
            program=program,
            quick=program and program.call,
            of_one_tree={static: bucket for (static, _), bucket in known} if is_one_tree else {},
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        if trace_state.value is not eval_trace or nans.value or infs.value:
            return programs.call(args, kwargs)
        plain, flatten, program, quick, of_one_tree = now
        if quick is not None:
            try:
                flat = flatten((args, kwargs))
            except ValueError:
                flatten = None
            else:
                try:
                    result = quick(program, flat, args, kwargs)
                    if result is not MISS:
                        return result
                except Busy:
                    pass  # `programs.call` waits.
        elif plain is not None:
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
        except Exception:  # If it is the user's, `programs.call` raises it.
            bucket = None
        ready: Sequence[Any] = () if bucket is None else bucket.ready
        for candidate in ready:
            if candidate is program:  # tried above
                continue
            try:
                result = candidate.call(candidate, flat, args, kwargs)
            except Busy:
                break  # `programs.call` waits.
            if result is not MISS:
                table.set_ready(bucket, candidate)  # pyright: ignore[reportArgumentType]
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
