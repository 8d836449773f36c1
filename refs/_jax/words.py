"""Recognises errors of JAX and XLA that only their text tells from others.

`tests/jax/test_jax_words.py` makes JAX raise each of them, on each version.
"""

from __future__ import annotations

__all__ = ["is_about_deleted", "what_is_said"]

# A part of the text -> the error's name here. If a text has several of them, the first counts.
_WORDS = {
    "cannot be returned": "a returned ref",
    "mutable array": "a ref taken twice",
    "not supported in vmap-of-cond": "a mapped branch",
    "does not have a corresponding jaxpr input": "arrays only",
    "'Fake' object": "arrays only",  # in the newest JAX
    "a position indicated by nondiff_argnums": "a tracer that isn't differentiated",
    "Ref-typed argument": "a differentiated ref",
    "'ValAccum' object": "a differentiated ref",  # in the oldest JAX
    "differentiated value on a non-differentiated": "a differentiated value",
    "vmapped value on an unbatched": "a mapped value",
    "incompatible devices": "incompatible devices",
    "shard": "sharding",
    "Shard": "sharding",
}


def what_is_said(error: BaseException) -> str | None:
    """The name of an error in `_WORDS`, or None."""
    if isinstance(error, FloatingPointError):  # It names the operation, which may be a reshard.
        return None
    said = str(error)
    return next((name for words, name in _WORDS.items() if words in said), None)


def is_about_deleted(error: BaseException) -> bool:
    """Whether a program wasn't run because an array given to it was donated before."""
    said = str(error)
    return isinstance(error, RuntimeError | ValueError) and (
        "been deleted" in said or "deleted or donated" in said
    )
