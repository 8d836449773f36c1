"""A program over refs, written once for JAX's own refs and for `refs`; and JAX's functions for it.

The programs are in the files `native_programs_*.py`. `native.py` prints the outcomes with both,
and `tests/test_native.py` compares `refs` with plain Python on the same statements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax

import refs


def no_discharge(_: Any) -> Any:
    raise NotImplementedError("JAX's discharge has no public name")


NATIVE = SimpleNamespace(
    new_ref=jax.new_ref,
    freeze=jax.freeze,
    jit=jax.jit,
    vmap=jax.vmap,
    grad=jax.grad,
    value_and_grad=jax.value_and_grad,
    hessian=jax.hessian,
    checkpoint=jax.checkpoint,
    while_loop=lax.while_loop,
    fori_loop=lax.fori_loop,
    scan=lax.scan,
    cond=lax.cond,
    discharge=no_discharge,
)


@dataclass(frozen=True)
class Program:
    """A row of the table.

    Attributes:
      run: the program; it takes `NATIVE` or the module `refs`, and returns a pytree of arrays.
      title: a description of the program.
      expected: a function that returns the right result; or an error of the right class, with a
        part of the right text.
    """

    run: Callable[[Any], Any]
    title: str
    expected: Callable[[], Any] | Exception

    @property
    def name(self) -> str:
        return self.run.__name__

    def native(self) -> Any:
        return self.run(NATIVE)

    def ours(self) -> Any:
        return self.run(refs)


def program(
    title: str, expected: Callable[[], Any] | Exception
) -> Callable[[Callable[[Any], Any]], Program]:
    """Decorates a function of a module as a row of the table."""
    return lambda run: Program(run, title, expected)
