"""The training step of `scale.py`, over refs and by hand, and what its compiled program moves."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import NamedSharding, P, lax
from jax.sharding import AxisType

import refs
from refs._explain.hlo import Module

BY_HAND, OURS = "by hand", "refs.jit"
State = dict[str, Any]

# --- The model ------------------------------------------------------------------------------------

WIDTH, HEADS, WORDS, LENGTH, STEPS = 1024, 16, 8192, 32, 100
# For each parameter its shape, and for each axis the axis of the mesh that may divide it.
OF_A_LAYER = {
    "norm_1": ((WIDTH,), ("data",)),
    "qkv": ((WIDTH, 3, WIDTH), ("data", None, "model")),
    "out": ((WIDTH, WIDTH), ("model", "data")),
    "norm_2": ((WIDTH,), ("data",)),
    "up": ((WIDTH, 4 * WIDTH), ("data", "model")),
    "down": ((4 * WIDTH, WIDTH), ("model", "data")),
}
OF_ALL = {"words": ((WORDS, WIDTH), ("model", "data")), "norm": ((WIDTH,), ("data",))}
# The axes of the mesh that divide the state, how many devices divide a layer, and the axes' type.
LAYOUTS = {
    "data-parallel": ((), 1, AxisType.Auto),
    "FSDP": (("data",), 1, AxisType.Auto),
    "FSDP, explicit axes": (("data",), 1, AxisType.Explicit),
    "FSDP and tensor-parallel": (("data", "model"), 4, AxisType.Auto),
}


class Model:
    """A transformer that is laid out in one of the ways, on all devices of the process."""

    def __init__(self, layout: str, layers: int):
        self.divide, n_model, kind = LAYOUTS[layout]
        shape = jax.device_count() // n_model, n_model
        self.mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)
        self.is_explicit = kind is AxisType.Explicit
        self.place = jax.sharding.reshard if self.is_explicit else lax.with_sharding_constraint
        of_layers = {f"{k}.{name}": p for k in range(layers) for name, p in OF_A_LAYER.items()}
        self.parameters = OF_ALL | of_layers
        self.layers, self.batch = layers, shape[0]

    def at(self, *spec: Any, only: Sequence[str] = ("data", "model")) -> NamedSharding:
        """The sharding of an array whose axes are divided so, as far as by the axes `only`."""
        return NamedSharding(self.mesh, P(*(a if a in only else None for a in spec)))

    def state(self, **keywords: Any) -> State:
        """The types of all that a step changes, in the order of a step's arguments."""

        def of_type(shape: Any, dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
            sharding = self.at(*spec, only=self.divide)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, **keywords)

        def like_parameters() -> State:
            found = self.parameters.items()
            return {name: of_type(shape, jnp.float32, *spec) for name, (shape, spec) in found}

        return {
            **{name: like_parameters() for name in ("parameters", "first", "second")},
            "count": of_type((), jnp.int32),
            "losses": of_type((STEPS,), jnp.float32),
        }

    def tokens(self) -> jax.ShapeDtypeStruct:
        shape = self.batch, LENGTH + 1
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.at("data"))

    def loss(self, parameters: State, tokens: Any) -> Any:
        # FSDP: what the axis "data" divides is gathered for use; "model" goes on dividing it.
        kept = self.divide[1:]
        p = {
            name: self.place(x, self.at(*self.parameters[name][1], only=kept))
            for name, x in parameters.items()
        }
        x = (
            p["words"]
            .at[tokens[:, :-1]]
            .get(out_sharding=self.at("data") if self.is_explicit else None)
        )
        for k in range(self.layers):
            x = self.place(x, self.at("data"))
            x = x + attention(norm(x, p[f"{k}.norm_1"]), p[f"{k}.qkv"]) @ p[f"{k}.out"]
            x = x + jax.nn.gelu(norm(x, p[f"{k}.norm_2"]) @ p[f"{k}.up"]) @ p[f"{k}.down"]
        logits = jax.nn.log_softmax(norm(x, p["norm"]) @ p["words"].T)
        is_next = tokens[:, 1:, None] == jnp.arange(WORDS)
        return -jnp.where(is_next, logits, 0).sum() / (self.batch * LENGTH)

    def over_refs(self) -> jax.stages.Traced:
        def step(state: State, tokens: Any) -> Any:
            def loss(parameters: State, tokens: Any) -> Any:
                return self.loss(jax.tree.map(refs.get, parameters), tokens)

            value, gradients = refs.value_and_grad(loss)(state["parameters"], tokens)
            state["losses"][state["count"][...]] = value
            state["count"][...] += 1
            for name, p in state["parameters"].items():
                m, v = state["first"][name], state["second"][name]
                of_p = p[...], m[...], v[...], gradients[name], state["count"][...]
                p[...], m[...], v[...] = adam(*of_p)
            return value

        jitted: Any = refs.jit(step, out_shardings=self.at())
        return jitted.trace(self.state(is_ref=True), self.tokens())

    def by_hand(self) -> jax.stages.Traced:
        def step(state: State, tokens: Any) -> Any:
            value, gradients = jax.value_and_grad(self.loss)(state["parameters"], tokens)
            losses = state["losses"].at[state["count"]].set(value)
            new: State = {"parameters": {}, "first": {}, "second": {}}
            new |= {"count": state["count"] + 1, "losses": losses}
            for name, p in state["parameters"].items():
                m, v = state["first"][name], state["second"][name]
                found = adam(p, m, v, gradients[name], new["count"])
                for kind, x in zip(("parameters", "first", "second"), found, strict=True):
                    new[kind][name] = x
            return new, value

        state = self.state()
        places = jax.tree.map(lambda x: x.sharding, state), self.at()
        jitted = jax.jit(step, donate_argnums=0, out_shardings=places)
        return jitted.trace(state, self.tokens())


def norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def attention(x: Any, qkv: Any) -> Any:
    q, k, v = jnp.moveaxis(jnp.einsum("blw,wch->blch", x, qkv), 2, 0)
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)


def adam(p: Any, m: Any, v: Any, gradient: Any, count: Any) -> tuple[Any, Any, Any]:
    m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
    corrected = m / (1 - 0.9**count), v / (1 - 0.999**count)
    return p - 1e-3 * corrected[0] / (jnp.sqrt(corrected[1]) + 1e-8), m, v


# --- Facts of a program ---------------------------------------------------------------------------

# What the program is lowered for. XLA then divides it among devices, and optimises it, for CPUs.
PLATFORMS = {"GPUs": "cuda", "CPUs": "cpu"}
COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")


def facts(lowered: Any, written: Sequence[str]) -> dict[str, Any]:
    """What the compiled program moves; `written`: the names of its first parameters, the state.

    A collective is "of moments" if it takes, directly or through other operations, a moment of
    Adam: the new parameters depend on the moments, but nobody needs them elsewhere.
    """
    compiled = lowered.compile()
    module, memory = Module.parse(compiled.as_text()), compiled.memory_analysis()
    moments = {k for k, name in enumerate(written) if name.startswith(("first", "second"))}
    found: list[tuple[str, list[Any], int]] = []
    of_moments: list[str] = []

    def walk(instructions: Sequence[Any], takes_moments: bool, is_entry: bool) -> None:
        from_moments: set[str] = set()
        for i in instructions:
            if i.op == "parameter":
                is_one = is_entry and int(i.rest.partition(")")[0]) in moments
            else:
                is_one = not from_moments.isdisjoint(re.findall(r"%([\w.\-]+)", i.rest))
            if is_one or takes_moments:
                from_moments.add(i.name)
            if COLLECTIVE.match(i.op):
                found.append((i.op, i.arrays, devices_of(i.rest)))
                of_moments.extend([i.name] * (i.name in from_moments))
            for name in i.called():
                walk(module.computations[name], i.name in from_moments, False)

    *_, entry = module.computations.values()
    walk(entry, False, True)
    return {
        "collectives": len(found),
        "moved": [(op, n, *array) for op, arrays, n in found for array in arrays],
        "arrays": sum(len(arrays) for _, arrays, _ in found),
        "MB": sum(m.bytes for m in module.moves() if m.is_collective) / 1e6,
        "of moments": len(of_moments),
        "written": len(written),
        "aliased": len(module.aliases() & {*range(len(written))}),
        "state, MB": memory.alias_size_in_bytes / 1e6,
        "temporary, MB": memory.temp_size_in_bytes / 1e6,
    }


def devices_of(collective: str) -> int:
    """How many devices take part, in each of XLA's three notations of their groups."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", collective):
        sizes = dict(re.findall(r"('\w+')=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'\w+'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", collective):
        return int(iota[1])
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", collective)
    return listed[1].count(",") + 1 if listed else jax.device_count()


def programs(layout: str, layers: int) -> dict[str, Callable[[str], tuple[Any, list[str]]]]:
    """For each way: a function that traces and lowers it for a platform, and names its state."""
    model = Model(layout, layers)
    leaves = jax.tree.leaves_with_path(model.state())
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]

    def by_hand(platform: str) -> tuple[Any, list[str]]:
        return model.by_hand().lower(lowering_platforms=(platform,)), names

    def over_refs(platform: str) -> tuple[Any, list[str]]:
        lowered: Any = model.over_refs().lower(lowering_platforms=(platform,))
        return lowered, lowered.described(names)

    return {BY_HAND: by_hand, OURS: over_refs}


def compiled(layout: str, layers: int) -> dict[str, dict[str, dict[str, float]]]:
    """Platform -> way -> facts, on the devices that this process has."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, platform in PLATFORMS.items():
        both = [facts(*lower(platform)) for lower in programs(layout, layers).values()]
        moved = [Counter(of_way.pop("moved")) for of_way in both]
        for of_way, mine, others in zip(both, moved, moved[::-1], strict=True):
            of_way["not by the other"] = (mine - others).total()
        found[title] = dict(zip((BY_HAND, OURS), both, strict=True))
    return found
