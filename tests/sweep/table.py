"""The public functions of JAX, each with a call that shows what it does.

A line of the `.txt` files is a Python expression over the operands below. Its function is the one
whose name it begins with, or `name: expression`.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

random = np.random.default_rng(0)


def positive(*shape: int) -> Any:
    return jnp.asarray(random.uniform(0.1, 0.9, shape), jnp.float32)


X, Y, N = positive(3, 4), positive(3, 4), positive(3, 3) + 2 * jnp.eye(3)
OPERANDS: dict[str, Any] = {
    "x": X,
    "y": Y,
    "v": positive(4),
    "w": positive(4),
    "s": positive(),
    "i": jnp.asarray(random.integers(0, 3, (3, 4)), jnp.int32),
    "j": jnp.asarray(random.integers(1, 4, (3, 4)), jnp.int32),
    "b": jnp.asarray(random.integers(0, 2, (3, 4)), bool),
    "z": lax.complex(X, Y),
    "m": N @ N.T,  # positive definite
    "n": N,
    "k": jax.random.key(0),
}
NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "jsp": jsp, "np": np}


class Example(NamedTuple):
    """A function of JAX, and a program that calls it."""

    name: str
    source: str

    @property
    def names(self) -> list[str]:
        """The operands that it has."""
        tree = ast.parse(self.source, mode="eval")
        bound = {
            a.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for a in node.args
        }
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return [name for name in OPERANDS if name in used - bound]

    @property
    def program(self) -> Callable[..., Any]:
        return eval(f"lambda {', '.join(self.names)}: {self.source}", dict(NAMES))

    @property
    def operands(self) -> list[Any]:
        return [OPERANDS[name] for name in self.names]

    @property
    def exists(self) -> bool:
        """Whether the JAX at hand has it."""
        try:
            eval(self.name, dict(NAMES))
        except AttributeError:
            return False
        return True


def read() -> list[Example]:
    lines = [
        line
        for path in sorted(Path(__file__).parent.glob("*.txt"))
        for line in path.read_text().splitlines()
    ]
    found = []
    for line in lines:
        match = re.match(r"(?P<name>[\w.]+)(: (?P<source>.+))?", line)
        assert match
        found.append(Example(match["name"], match["source"] or line))
    return found


TABLE = read()
