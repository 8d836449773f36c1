"""Recognises errors of JAX and XLA that only their text tells from others.

`tests/jax/test_jax_words.py` makes JAX raise each of them, on each version.
"""

from __future__ import annotations

import os

import jax
from jax._src.traceback_util import api_boundary

__all__ = ["is_about_deleted", "what_is_said", "within_whole_tracebacks"]

# Makes a function one of those at which JAX removes its frames from the traceback of an error: only
# the outermost of them does, so within it the frames are still there.
within_whole_tracebacks = api_boundary

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
    "Ref has no attribute 'nospec'": "a ref in a shard_map that is differentiated",
    "differentiated value on a non-differentiated": "a differentiated value",
    "vmapped value on an unbatched": "a mapped value",
    "incompatible devices": "incompatible devices",
    "shard": "sharding",
    "Shard": "sharding",
}

_JAX_OR_OURS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (jax.__file__, os.path.dirname(__file__))
)


def what_is_said(error: BaseException) -> str | None:
    """The name in `_WORDS` of an error that JAX has raised, or None.

    An error of the user's may have the same words in it. JAX's begins in a file of JAX's; or in one
    of ours, where JAX is called, and has removed its own frames from the traceback. So where a
    function of the user's is called, this is to be asked `within_whole_tracebacks`.
    """
    if isinstance(error, FloatingPointError):  # It names the operation, which may be a reshard.
        return None
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or not tb.tb_frame.f_code.co_filename.startswith(_JAX_OR_OURS):
        return None
    said = str(error)
    return next((name for words, name in _WORDS.items() if words in said), None)


def is_about_deleted(error: BaseException) -> bool:
    """Whether a program wasn't run because an array given to it was donated before."""
    said = str(error)
    return isinstance(error, RuntimeError | ValueError) and (
        "been deleted" in said or "deleted or donated" in said
    )
