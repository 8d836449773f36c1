"""Names: a function may be given a ref that it also closes over, and so know it as two objects.

To JAX these are two refs. This library's wrappers look a ref up, and take both for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from refs import _jax
from refs._types import RefLike


class Names:
    """Other names of refs, while a function is traced that has refs under two names.

    Attributes:
      other: the id of a ref -> the ref that it is, too.
      used: the ids of those that `one_name` has found.
    """

    def __init__(self) -> None:
        self.other: dict[int, RefLike] = {}
        self.used: set[int] = set()
        self._outer: Names | None = None

    @contextmanager
    def known(self) -> Iterator[None]:
        """A context in which `one_name` knows these names."""
        self._outer = _names.get()
        token = _names.set(self)
        try:
            yield
        finally:
            _names.reset(token)
            self._outer = None

    def find(self, ref: RefLike) -> RefLike:
        if self._outer is not None:
            ref = self._outer.find(ref)
        if id(ref) in self.other:
            self.used.add(id(ref))
            ref = self.other[id(ref)]
        return ref


def one_name(ref: RefLike) -> RefLike:
    """The one of a ref's names that all wrappers know it by."""
    ref, names = _jax.passed_on(ref), _names.get()
    return ref if names is None else names.find(ref)


_names: ContextVar[Names | None] = ContextVar("_names", default=None)
