"""Functions that inspect, build and evaluate jaxprs and equations."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax._src import hijax

# A compiled program has given a NaN or an infinity, and JAX looks for them. Only the functions that
# `jax.jit` returns catch it.
from jax._src.api_util import InternalFloatingPointError as NaNFound
from jax._src.core import NamedAxisEffect
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr
from jax._src.lax.lax import _convert_element_type

# The cotangent 1 of a differentiated scalar, sharded as the scalar's cotangents are.
from jax._src.lax.lax import _one_vjp as one_vjp
from jax._src.lib import _jax as _jaxlib
from jax._src.source_info_util import _source_info_context, user_frame
from jax.core import eval_jaxpr as _eval_jaxpr
from jax.extend import source_info_util
from jax.extend.core import Literal, Var

from refs._jax.primitives import shard_map_p
from refs._types import Atom, Aval, ClosedJaxpr, Eqn, Jaxpr, Primitive, Value

__all__ = [
    "NaNFound", "all_equations", "any_equation", "anywhere", "as_array", "as_closed",
    "at_its_own_lines", "before_python", "bind", "bind_eqn", "called_by", "captured",
    "eval_jaxpr", "forget_fast_path", "function_name", "has_side_effects", "is_called_callback",
    "is_fori_loop", "is_zero_literal", "jaxprs_in", "map_closed", "map_jaxprs", "new_var",
    "once_per_jaxpr", "one_vjp", "output", "places_in", "raise_about_nan", "replace_jaxpr",
    "source_of", "split_params", "strong", "typed_like", "user_line", "with_equations",
]  # fmt: skip

T = TypeVar("T")

_HiPrimitive: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", ())


def as_closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr. Constant variables of an open one become inputs, as on the newest JAX."""
    if not isinstance(jaxpr, ClosedJaxpr):  # pragma: no cover, JAX before 0.12 has open ones
        if jaxpr.constvars:
            jaxpr = convert_constvars_jaxpr(jaxpr)
        closed: Any = ClosedJaxpr  # Its signature differs between versions.
        return closed(jaxpr, ())
    return jaxpr


class _MayHold(dict[type, bool]):
    """Whether a value of a type may be, or contain, a jaxpr. Most parameters are of other types."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, (tuple, list, *_HOLDERS))
        return self[kind]


_JAXPRS = (Jaxpr, ClosedJaxpr)
_HOLDERS = (*_JAXPRS, jax.stages.Traced, _HiPrimitive) if _HiPrimitive else _JAXPRS
_may_hold = _MayHold()


def jaxprs_in(params: dict[str, Any]) -> list[ClosedJaxpr]:
    """The closed jaxprs among an equation's parameters, and among those of a "hi" primitive."""
    found: list[ClosedJaxpr] = []
    for value in params.values():
        if not _may_hold[type(value)]:
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if not _may_hold[type(item)]:
                continue
            if isinstance(item, _JAXPRS):
                found.append(as_closed(item))
            elif isinstance(item, jax.stages.Traced):
                found.append(as_closed(item.jaxpr))
            elif isinstance(item, _HiPrimitive):
                found += jaxprs_in(item.params)
    return found


def split_params(
    params: dict[str, Any],
) -> tuple[list[Jaxpr | ClosedJaxpr], tuple[tuple[str, Any], ...]]:
    """The jaxprs among an operation's parameters, the same objects, and the rest, for a key."""
    jaxprs: list[Jaxpr | ClosedJaxpr] = []
    rest: list[tuple[str, Any]] = []
    for name, value in params.items():
        if isinstance(value, _HiPrimitive):
            found, within = split_params(value.params)
            rest += (name, type(value)), *within
        elif isinstance(value, jax.stages.Traced):
            found = [value.jaxpr]
        else:
            items = value if isinstance(value, tuple | list) else (value,)
            found = [x for x in items if isinstance(x, Jaxpr | ClosedJaxpr)]
            value = tuple(value) if isinstance(value, list) else value
            rest.append((name, len(found) or value))
        jaxprs += found
    return jaxprs, tuple(rest)


def replace_jaxpr(params: dict[str, Any], new: ClosedJaxpr, more_outputs: int) -> dict[str, Any]:
    """The parameters of a call with one jaxpr, replaced by `new`, which has more outputs."""
    [key] = [k for k, v in params.items() if isinstance(v, Jaxpr | ClosedJaxpr)]
    params = {**params, key: new}
    if "out_memory_spaces" in params:
        params["out_memory_spaces"] += (jax.memory.Space.Device,) * more_outputs
    return params


def raise_about_nan(error: Any, jaxprs: Sequence[ClosedJaxpr], args: Sequence[Value]) -> NoReturn:
    """Raises JAX's public error for a NaN in what a call of one of these jaxprs gives.

    It names the operation: the jaxprs are evaluated once more, each equation by itself.
    """
    for closed in jaxprs:
        jaxpr = closed.jaxpr
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            given = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
            with source_of(eqn), eqn.ctx.manager:
                values.update(zip(eqn.outvars, bind_eqn(eqn, given), strict=True))
    raise FloatingPointError(f"invalid value ({error.ty}) encountered in {error.name}") from None


def bind_eqn(eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    """Evaluates an equation as it is."""
    return bind(eqn.primitive, args, eqn.params)


def bind(primitive: Primitive, args: Sequence[Value], params: dict[str, Any]) -> list[Value]:
    """Evaluates a primitive, given its parameters as they stand in an equation."""
    try:
        out = primitive.bind(*args, **primitive.get_bind_params(params))
    except NaNFound as error:
        raise_about_nan(error, jaxprs_in(params), args)
    return list(out) if primitive.multiple_results else [out]


def eval_jaxpr(closed: ClosedJaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
    """Evaluates a jaxpr as it is, with `consts` in place of its own constants."""
    try:
        return _eval_jaxpr(closed.jaxpr, consts, *args)
    except NaNFound as error:
        raise_about_nan(error, [closed.replace(consts=[*consts])], args)


def source_of(eqn: Eqn) -> AbstractContextManager[None]:
    """Restores the user's line and name scope of an equation; `eqn.ctx.manager` does the rest."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


@contextmanager
def at_its_own_lines() -> Iterator[None]:
    """A context, or decorator, for a user's rule: its equations get their own lines.

    Otherwise they get that of the equation that JAX differentiates or transposes by the rule.
    """
    current = _source_info_context
    before = current.context
    current.context = source_info_util.SourceInfo(None, before.name_stack)
    try:
        yield
    finally:
        current.context = before


def user_line(eqn: Eqn, otherwise: str = "an unknown line") -> str:
    """`file.py:12` of the user's code that made the equation."""
    frame = user_frame(eqn.source_info.traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else otherwise


def is_fori_loop(loop: Eqn) -> bool:
    """Whether a scan or while loop is what JAX makes of a `fori_loop`."""
    traced_for = (closed.jaxpr.debug_info.traced_for for closed in jaxprs_in(loop.params))
    return "fori_loop" in traced_for


def function_name(closed: ClosedJaxpr) -> str:
    """The name of the function that was traced to a jaxpr."""
    return closed.jaxpr.debug_info.func_name


def captured(traced: Any) -> Sequence[Value]:
    """The values of an enclosing trace that are the first operands of a `jax.stages.Traced`."""
    return traced._consts


def has_side_effects(eqn: Eqn) -> bool:
    """Whether evaluating an equation once more would be noticed. The use of an axis isn't."""
    return any(not isinstance(e, NamedAxisEffect) for e in eqn.effects)


def once_per_jaxpr(fun: Callable[[Jaxpr], T]) -> Callable[[Jaxpr], T]:
    """`fun`, which is called once for each jaxpr: calls and loops often share one."""
    known: WeakKeyDictionary[Jaxpr, T] = WeakKeyDictionary()

    @functools.wraps(fun)
    def remembered(jaxpr: Jaxpr) -> T:
        try:
            return known[jaxpr]
        except KeyError:
            known[jaxpr] = value = fun(jaxpr)
            return value

    return remembered


def anywhere(test: Callable[[Eqn], bool]) -> Callable[[Jaxpr], bool]:
    """Whether an equation of a jaxpr, at any depth, passes the test: asked once per jaxpr."""

    @once_per_jaxpr
    def found(jaxpr: Jaxpr) -> bool:
        return any(
            test(eqn) or any(found(inner.jaxpr) for inner in jaxprs_in(eqn.params))
            for eqn in jaxpr.eqns
        )

    return found


def all_equations(eqns: Iterable[Any], seen: set[Jaxpr] | None = None) -> Iterator[Eqn]:
    """Equations, each followed by those of the jaxprs in it that haven't been `seen` before."""
    seen = set() if seen is None else seen
    for eqn in eqns:
        yield eqn
        for inner in jaxprs_in(eqn.params):
            if inner.jaxpr not in seen:
                seen.add(inner.jaxpr)
                yield from all_equations(inner.jaxpr.eqns, seen)


def any_equation(closed: ClosedJaxpr, test: Callable[[Eqn], bool]) -> bool:
    """Whether an equation of a jaxpr, or of one in it, passes the test."""
    return any(map(test, all_equations(closed.jaxpr.eqns)))


def places_in(closed: ClosedJaxpr) -> list[jax.sharding.Sharding]:
    """Where the `shard_map`s in a jaxpr run: on all devices of their meshes."""
    eqns = all_equations(closed.jaxpr.eqns)
    meshes = (e.params["mesh"] for e in eqns if e.primitive is shard_map_p)
    # One without devices stands for the mesh in force.
    found = (m if isinstance(m, jax.sharding.Mesh) else jax.sharding.get_mesh() for m in meshes)
    return [jax.NamedSharding(m, jax.P()) for m in {m for m in found if not m.empty}]


def is_called_callback(primitive: Primitive) -> bool:
    """Whether a primitive calls Python, or other code outside XLA. Only its name tells."""
    return "callback" in primitive.name or primitive.name in ("debug_print", "ffi_call")


def as_array(x: Value) -> jax.Array:
    """`jnp.asarray(x)`, without the operation that this adds for a tracer, an array already."""
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)


def output(x: Value) -> Value:
    """What a program gives, as JAX gives it: a number as an array, a user's type as it is."""
    return as_array(x) if isinstance(x, jax.typing.ArrayLike | np.generic) else x


def strong(x: Value) -> jax.Array:
    """`x` as an array that is not weakly typed."""
    x = as_array(x)
    weak = getattr(x, "weak_type", False)  # PRNG keys don't have it.
    return jax.lax.convert_element_type(x, x.dtype) if weak else x


def typed_like(x: Value, example: Value) -> Value:
    """`x` in the dtype of `example`, weakly typed if `example` is."""
    kind: Any = jax.typeof(example)
    return _convert_element_type(x, kind.dtype, getattr(kind, "weak_type", False))


def before_python(compiled: Any, before: Callable[[], Any]) -> Any:
    """The same `jax.jit` function; it calls `before()` whenever JAX's Python code will run it.

    JAX's C++ code runs a program that it knows for such arguments. It calls Python at a first call,
    and again for each new type, placement and context; always, if the program has effects.
    """
    state = compiled.__getstate__()
    python = state["cache_miss"]

    def cache_miss(*args: Any, **kwargs: Any) -> Any:
        before()
        return python(*args, **kwargs)

    of_python = state["static_argnums"], state["static_argnames"]
    of_cpp = state["pytree_registry"], state["shard_arg_fallback"], state["cache"]
    key, name = state["global_cache_key"], state["function_name"]
    made = _jaxlib.pjit(name, state["fun"], cache_miss, *of_python, key, *of_cpp)
    functools.update_wrapper(made, compiled._fun)
    made._fun, made._jit_info = compiled._fun, compiled._jit_info
    return made


def forget_fast_path(compiled: Any) -> None:
    """Makes the next call of a `jax.jit` function look up its program, which stays compiled.

    `clear_cache` would throw away the traces of all functions.
    """
    compiled._clear_cache()


def new_var(aval: Aval) -> Atom:
    """A new variable, for a jaxpr that is built by hand."""
    return Var(aval)


def called_by(eqn: Eqn, call: Eqn, name: str) -> Eqn:
    """An equation of a call's jaxpr, to be inlined: the call's name scope is put around its own."""
    stack = call.source_info.name_stack.extend(name) + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def with_equations(jaxpr: Jaxpr | ClosedJaxpr, fun: Callable[[Jaxpr], Jaxpr]) -> Any:
    """`fun(jaxpr)`, where `fun` gets the open jaxpr. A closed jaxpr keeps its constants."""
    if isinstance(jaxpr, Jaxpr):  # All are on JAX 0.12, and keep their constants themselves.
        return fun(jaxpr)
    new = fun(jaxpr.jaxpr)  # pragma: no cover, JAX before 0.12
    return jaxpr if new is jaxpr.jaxpr else jaxpr.replace(jaxpr=new)  # pragma: no cover, the same


def map_jaxprs(eqn: Eqn, fun: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """The equation with `fun(jaxpr)` in place of each jaxpr among its parameters."""
    return map_closed(eqn, lambda jaxpr: with_equations(jaxpr, fun))


def map_closed(eqn: Eqn, fun: Callable[[Any], Any]) -> Eqn:
    """`map_jaxprs`, but `fun` gets closed jaxprs with their constants."""

    def mapped(value: Any) -> Any:
        return fun(value) if isinstance(value, Jaxpr | ClosedJaxpr) else value

    def all_mapped(value: Any) -> Any:
        if not isinstance(value, tuple | list):
            return mapped(value)
        make = getattr(type(value), "_make", type(value))  # of a named tuple
        return make(map(mapped, value))

    new = {key: all_mapped(value) for key, value in eqn.params.items() if jaxprs_in({key: value})}
    return eqn.replace(params={**eqn.params, **new})


def is_zero_literal(literal: Atom) -> bool:
    return not np.issubdtype(literal.aval.dtype, np.bool_) and bool(literal.val == 0)
