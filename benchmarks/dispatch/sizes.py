"""A jit over few and many refs, in a list and in a tree; and so in the libraries that have state.

Equinox passes state as arrays and returns it. Flax's `nnx.jit` takes variables, here donating their
arrays, in three ways: as it is; with `graph=False`, where no variable may be shared; and through
`nnx.cached_partial`, for a step that is always called with the same ones. (Flax 0.12 has them all.)
Each library has its columns if it is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from way import BY_HAND, Row, Way, Ways, arrays, compiled, threads

try:
    import equinox
except ImportError:  # an extra
    equinox = None
try:
    from flax import nnx
except ImportError:  # an extra
    nnx = None


def add_one(state: Any) -> None:
    for r in jax.tree.leaves(state):
        r[...] += 1


def add_one_by_hand(state: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, state)


def flat(n: int) -> list[Any]:
    return arrays(n)


def nested(n: int) -> dict[str, dict[str, Any]]:
    """`{"layer0": {"w": …, "b": …}, …}`, with n arrays in all."""
    cells = arrays(n)
    return {
        f"layer{k // 2}": dict(zip("wb", cells[k : k + 2], strict=False)) for k in range(0, n, 2)
    }


def ways(make: Callable[[], Any]) -> Ways:
    found = {
        BY_HAND: threads(jax.jit(add_one_by_hand, donate_argnums=0), make()),
        **compiled(add_one, make()),
    }
    if equinox is not None:
        step = equinox.filter_jit(add_one_by_hand, donate="all")
        found["equinox.\nfilter_jit"] = threads(step, make())
    if nnx is not None:
        found["nnx.jit"] = with_variables(make())
        found["nnx.jit,\ngraph=False"] = with_variables(make(), graph=False)
        found["nnx.jit,\ncached_partial"] = with_variables(make(), cached=True)
    return found


def with_variables(state: Any, *, graph: bool = True, cached: bool = False) -> Way:
    """State as Flax has it: a tree of nodes with variables, which the step updates."""
    nodes = as_nodes(state)
    variables = jax.tree.leaves(nodes, is_leaf=is_variable)

    @functools.partial(nnx.jit, donate_argnums=0, graph=graph)
    def step(nodes: Any) -> None:
        for variable in jax.tree.leaves(nodes, is_leaf=is_variable):
            variable[...] += 1

    call = nnx.cached_partial(step, nodes) if cached else lambda: step(nodes)
    return Way(call, lambda: variables)


def as_nodes(state: Any) -> Any:
    if isinstance(state, list):
        return nnx.List([as_nodes(x) for x in state])
    if isinstance(state, dict):
        return nnx.Dict({name: as_nodes(x) for name, x in state.items()})
    return nnx.Param(state)


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


SIZES = [
    Row(f"{n} ref{'s' * (n > 1)} in a {kind}", functools.partial(ways, functools.partial(make, n)))
    for kind, make in (("list", flat), ("nested dict", nested))
    for n in (1, 20, 200)
]
