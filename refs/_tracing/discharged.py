"""What a function is traced for: to be discharged here, as one lane of many, to be explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar


def _flag(name: str) -> tuple[Callable[[], AbstractContextManager[None]], Callable[[], bool]]:
    """A context in which a flag is set, and whether it is set."""
    flag = ContextVar(name, default=False)

    @contextmanager
    def setting() -> Iterator[None]:
        token = flag.set(True)
        try:
            yield
        finally:
            flag.reset(token)

    return setting, flag.get


# Whether the trace under way, or one around it, is this library's: what is left to JAX isn't.
to_be_discharged, is_to_be_discharged = _flag("_is_discharged")

# Whether a function that `refs.vmap` maps is being traced.
in_lane, is_lane = _flag("_is_lane")

# Whether accesses that a derivative makes are given the lines of its function, where the user's
# code makes them.
with_lines, has_lines = _flag("_has_lines")

# Whether accesses to refs are discharged to the operations of `_reversible.parts`.
parts_kept, are_parts_kept = _flag("_are_parts_kept")
