"""The errors of `refs`, in one hierarchy and one style.

A message says which operation was refused, on which ref, where that ref was created, why, and what
to write instead. Each class also derives from the built-in error that NumPy or JAX would raise in
the same place, so that existing `except` clauses go on working.
"""

from __future__ import annotations


class RefError(Exception):
    """Base class of every error raised by `refs`."""


class RefTypeError(RefError, TypeError):
    """A value of the wrong kind: a ref of a ref, a static ref, a dtype that can't be held."""


class RefValueError(RefError, ValueError):
    """A value of the right kind that doesn't fit, most often because of its shape."""


class RefIndexError(RefError, IndexError):
    """An index that the ref does not have."""


class RefStateError(RefError, RuntimeError):
    """A handle that can't be used any more: frozen, freed, or lost in a failed call."""


class RefEscapeError(RefError, ValueError):
    """A traced ref used, or returned, outside the trace that it belongs to."""


class MissingRuleError(RefError, NotImplementedError):
    """A ref reached a primitive for which no discharge rule is registered."""


class CallbackError(RefError, RuntimeError):
    """A callback raised an exception, which is this one's cause."""


class NotReversibleError(RefError, TypeError):
    """A function under `refs.reversible` whose gradient needs what it can't restore."""
