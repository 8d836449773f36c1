"""`refs.explain`: what a compiled function does to its refs, and to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refs._explain.report import Explanation
from refs._jit.jit import compiling


def explain(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Says what `fun(*args, **kwargs)` does to refs and to memory, once it is compiled.

    `fun` is traced and compiled, but not run. The report has each ref with its name, birthplace and
    type, what is done to it and on which lines, and whether it is updated in place; the copies and
    collectives of a ref's size that XLA has left, with the reason and what to write instead; the
    memory that the program needs; its callbacks; and the jaxprs before and after refs are
    discharged. It prints as a table, `rich.print` draws it, notebooks show it, `to_dict()` gives it
    as data and `to_html()` as one page, with a picture of the life of each ref.

    Args:
      fun: a function over refs, or one that `refs.jit` has made; bound methods too.
      *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`s, and refs those with `is_ref`.
      **kwargs: the same.

    Returns:
      The report.

    Raises:
      RefStateError: under `jax.disable_jit`.
      Exception: whatever `fun` raises while it is traced.

    `python -m refs explain module:function ARGUMENT...` prints it; each argument is an expression
    in the module.

    >>> r = refs.new_ref(jnp.zeros(10_000), name="r")
    >>> def keeping(x):
    ...     old = r[...]
    ...     r[0] = x
    ...     return old
    >>> report = refs.explain(keeping, 1.0)
    >>> report.refs[0].does, report.refs[0].keeps_memory
    ('read, written', True)
    >>> [(move.what, move.bytes, move.refs[0].split(" (")[0]) for move in report.moves]
    [('copy', 40000, 'ref `r`')]
    """
    compiled, args = compiling("explain", fun, args)
    return compiled.explain(*args, **kwargs)
