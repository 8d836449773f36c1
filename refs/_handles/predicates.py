"""Predicates: a ref, a concrete ref, a view."""

from __future__ import annotations

from refs import _jax
from refs._handles.ref import Ref
from refs._handles.view import RefView
from refs._types import Value


def is_ref(x: Value) -> bool:
    """True for any ref: a handle, ours or JAX's, or a traced one."""
    # Leaves of calls and operands come here, and `isinstance` of JAX's class takes a microsecond.
    kind = type(x)
    if kind is Ref or kind is _jax.ArrayImpl:
        return kind is Ref
    if isinstance(x, _jax.Tracer):
        return _jax.is_ref_type(x.aval)
    return isinstance(x, _jax.NativeRef)


def is_concrete(x: Value) -> bool:
    """True for a handle, ours or JAX's, False for a traced ref and anything else."""
    return isinstance(x, _jax.NativeRef) and not isinstance(x, _jax.Tracer)


def is_view(x: Value) -> bool:
    """True for a view, `ref.at[idx]`."""
    return isinstance(x, RefView)
