"""What a call is differentiated with respect to, and the call as JAX differentiates it.

The variables are arrays, and the contents at entry of refs. A view among the arguments stands for
its part of a ref's contents.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._access import check_ref, describe, get
from refs._indexing import Index
from refs._tracing import NewRef, is_ref, one_name, unique, zeros_like
from refs._view import RefView, is_view
from refs.discharge._late import has_custom_vjp
from refs.errors import RefEscapeError, RefTypeError, RefValueError
from refs.transforms._signature import flags
from refs.transforms._transaction import Slot, Transaction, in_transaction, run


class Variable(NamedTuple):
    """A leaf of the differentiated arguments: one of the `values`, or the part that a view names.

    It is a pytree: the indices of the view may be traced.
    """

    position: int
    view: RefView | None = None


class Inputs(NamedTuple):
    """A call, taken apart.

    Attributes:
      rebuild: puts `(refs, arrays)` back into `(args, kwargs)`.
      refs: the distinct refs of the call, those that are variables first.
      arrays: the array variables.
      n_refs: how many of the refs are variables.
      tree: the structure of the variables, views being leaves.
      variables: for each leaf of it, which of the values it is: the arrays, then contents of refs.
    """

    rebuild: Callable[[Sequence[Any], Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    refs: list[Any]
    arrays: list[Any]
    n_refs: int
    tree: Any
    variables: tuple[Variable, ...]

    @staticmethod
    def of(
        doing: str, argnums: int | Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Inputs:
        args, kwargs = jax.tree.map(lambda x: one_name(x) if is_ref(x) else x, (args, kwargs))
        chosen = _positions(doing, argnums, args)
        flat, whole = jax.tree.flatten((args, kwargs), is_leaf=is_view)
        given = args[chosen[0]] if np.ndim(argnums) == 0 else tuple(args[k] for k in chosen)
        tree = jax.tree.structure(given, is_leaf=is_view)
        # Which leaves of the call are variables, in the order of `given`.
        sizes = [len(jax.tree.leaves(x, is_leaf=is_view)) for x in args]
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        places = [starts[k] + j for k in chosen for j in range(sizes[k])]
        _check_distinct(doing, [flat[i] for i in places])

        def ref_of(x: Any) -> Any:
            return x.ref if is_view(x) else x if is_ref(x) else None

        used = [ref_of(flat[i]) for i in places]
        n_refs = len(unique([r for r in used if r is not None]).items)
        inner = [y for x in flat for y in jax.tree.leaves(x) if is_ref(y)]
        refs = unique([*(r for r in used if r is not None), *inner]).items
        for ref in refs:
            check_ref(ref, doing)
        place = {id(r): k for k, r in enumerate(refs)}
        arrays = {i: k for k, i in enumerate(i for i in places if ref_of(flat[i]) is None)}

        def variable(i: int) -> Variable:
            ref = ref_of(flat[i])
            if ref is None:
                return Variable(arrays[i])
            return Variable(len(arrays) + place[id(ref)], flat[i] if is_view(flat[i]) else None)

        def rebuild(new_refs: Sequence[Any], new_arrays: Sequence[Any]) -> Any:
            def replaced(i: int, x: Any) -> Any:
                if i in arrays:
                    return new_arrays[arrays[i]]
                return jax.tree.map(lambda y: new_refs[place[id(y)]] if is_ref(y) else y, x)

            return jax.tree.unflatten(whole, [replaced(i, x) for i, x in enumerate(flat)])

        variables = tuple(variable(i) for i in places)
        return Inputs(rebuild, refs, [flat[i] for i in arrays], n_refs, tree, variables)

    def in_transaction(self, fun: Callable[[Inputs], Any]) -> Any:
        """`fun(self)`, as `refs.transforms._transaction.in_transaction` runs it."""
        return in_transaction(
            lambda refs, arrays: fun(self._replace(refs=refs, arrays=arrays)),
            self.refs,
            self.arrays,
        )

    def flatten(self, doing: str, given: Any) -> list[Any]:
        """The inverse of `unflatten`: a leaf for each variable, after a check of the structure."""
        leaves, tree = jax.tree.flatten(given)
        if tree != self.tree:
            raise RefValueError(
                f"{doing}: the primals have the structure {self.tree}, and the tangents {tree}"
            )
        return leaves

    def type_of(self, variable: Variable) -> tuple[tuple[int, ...], str]:
        """The shape and the dtype's name of a variable's cotangent."""
        n = len(self.arrays)
        k = variable.position
        x: Any = variable.view or (
            _jax.shaped_abstractify(self.arrays[k]) if k < n else self.refs[k - n]
        )
        return x.shape, x.dtype.name if jnp.issubdtype(x.dtype, jnp.inexact) else "float0"

    def gather(self, doing: str, leaves: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """A tangent for each value, from one for each variable."""
        tangents: list[Any] = [None] * len(values)
        for variable, leaf in zip(self.variables, leaves, strict=True):
            k = variable.position
            given = get(leaf) if is_ref(leaf) else leaf
            if variable.view is not None:
                given = _of_whole(doing, variable.view, values[k], given)
            tangents[k] = given if tangents[k] is None else tangents[k] + given
        return tangents

    def unflatten(self, values: Sequence[Any]) -> Any:
        """An array for each variable, from one for each value: of its shape, after other axes."""

        def part(variable: Variable) -> Any:
            value = values[variable.position]
            if variable.view is None:
                return value
            ref = self.refs[variable.position - len(self.arrays)]
            return part_of(value, variable.view, value.ndim - ref.ndim)

        return jax.tree.unflatten(self.tree, [part(v) for v in self.variables])


def _positions(doing: str, argnums: int | Sequence[int], args: tuple[Any, ...]) -> list[int]:
    given: Any = [argnums] if np.ndim(argnums) == 0 else argnums
    nums = [operator.index(k) for k in given]
    for k in nums:
        if not -len(args) <= k < len(args):
            raise RefTypeError(
                f"{doing} with respect to argnums={argnums} of a call with {len(args)} positional "
                "arguments: pass what is differentiated by position"
            )
    nums = [k % len(args) for k in nums]
    if len({*nums}) < len(nums):
        raise RefValueError(f"{doing} with respect to argnums={argnums}: an argument stands twice")
    return nums


def _check_distinct(doing: str, leaves: Sequence[Any]) -> None:
    """A ref may be a variable once: its parts may, too, if it isn't one as a whole."""
    whole = [id(x) for x in leaves if is_ref(x)]
    parts = [x.ref for x in leaves if isinstance(x, RefView)]
    repeated = [x for x in leaves if is_ref(x) and whole.count(id(x)) > 1]
    for ref in (*repeated, *(r for r in parts if id(r) in whole)):
        raise RefValueError(
            f"{doing} with respect to {describe(ref)} twice: its contents are one variable. "
            "Differentiate with respect to one of the arguments that hold it"
        )


def part_of(value: Any, view: RefView, leading: int = 0) -> Any:
    """The part of a ref's contents, after other axes, that a view names."""

    def take(x: Any) -> Any:
        for idx in view._path:
            x = Index.parse(idx, x.shape).read(x)
        return x

    if not leading:
        return take(value)
    front = value.shape[:leading]
    rows = jax.vmap(take)(value.reshape(math.prod(front), *value.shape[leading:]))
    return rows.reshape(*front, *rows.shape[1:])


def _of_whole(doing: str, view: RefView, whole: Any, tangent: Any) -> Any:
    """The tangent of a ref's contents in the direction of one of its part: the adjoint of that."""
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return np.zeros(whole.shape, jax.dtypes.float0)
    aval: Any = _jax.shaped_abstractify(tangent)
    if aval.shape != view.shape or (aval.dtype != view.dtype and not aval.weak_type):
        raise RefValueError(
            f"{doing}: the tangent of a view of {describe(view.ref)} of type {view.dtype}"
            f"{list(view.shape)} is of type {aval.dtype}{list(aval.shape)}"
        )
    _, scatter = jax.vjp(lambda x: part_of(x, view), jnp.zeros_like(whole))
    return scatter(jnp.asarray(tangent, whole.dtype))[0]


class Differentiable:
    """A traced call as a pure function of its variables.

    `values` is one array for each variable: the arrays, then the contents of refs. `check` is
    called with each, when they are known, and may refuse it.
    """

    _state: Sequence[Any]
    _constants: Sequence[Any]

    def __init__(
        self,
        doing: str,
        fun: Callable[..., Any],
        inputs: Inputs,
        has_aux: bool,
        check: Callable[[Any], None] = lambda x: None,
    ):
        self.doing, self.inputs, self._check = doing, inputs, check
        if has_aux:
            fun = _returning_pair(doing, fun)
        self._t = Transaction.of(
            fun, inputs.refs, inputs.arrays, inputs.rebuild, is_differentiated=True
        )
        traced, self.has_aux = self._t.traced, has_aux
        self.out_tree = traced.out_tree.children()[0] if has_aux else traced.out_tree
        places = range(self.out_tree.num_leaves)
        for k in places:
            if traced.out_leaves[k] is not None:
                raise RefEscapeError(
                    f"{doing} of a function that returns {_described(traced.out_leaves[k], inputs)}"
                    ": return its value, `ref[...]`, or the ref as auxiliary data (`has_aux`)"
                )
        arrays = [k for k, marker in enumerate(traced.out_leaves) if marker is None]
        self._outputs = [arrays.index(k) for k in places]
        self.has_backward_effects = has_custom_vjp(traced.jaxpr.jaxpr)

    @property
    def values(self) -> list[Any]:
        """The values of the variables at entry."""
        known = {
            slot.argument: value
            for slots, values in ((self._t.written, self._state), (self._t.read, self._constants))
            for slot, value in zip(slots, values, strict=True)
        }
        contents = [
            known[k] if k in known else zeros_like(ref)
            for k, ref in enumerate(self.inputs.refs[: self.inputs.n_refs])
        ]
        return [*self.inputs.arrays, *contents]

    def __call__(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """(outputs, what else comes of it: auxiliary arrays, new state, values of new refs)."""
        n = len(self.inputs.arrays)

        def at(slots: Sequence[Slot], held: Sequence[Any]) -> list[Any]:
            return [
                values[n + slot.argument]
                if slot.argument is not None and slot.argument < self.inputs.n_refs
                else value
                for slot, value in zip(slots, held, strict=True)
            ]

        state, (arrays, made) = self._t.run(
            at(self._t.written, self._state),
            at(self._t.read, self._constants),
            values[:n],
            self.inputs.refs,
        )
        return [arrays[k] for k in self._outputs], (arrays, state, made)

    def run(self, transformed: Callable[[list[Any]], tuple[Any, ...]]) -> tuple[Any, ...]:
        """`transformed(values)`, one of JAX's transformations of this function, as one operation.

        It gives a tuple, of which the last is what else this function returns. The state in that
        is written back, and only the auxiliary data are left of it.
        """

        def body(state: list[Any], constants: list[Any]) -> Any:
            self._state, self._constants = state, constants
            for x in self.values:
                self._check(x)
            *out, rest = transformed(self.values)
            return rest[1], (out, rest)

        out, (arrays, _, made) = self._t.update(self.inputs.refs, body)
        aux = self._t.result(arrays, made, self.inputs.refs)[1] if self.has_aux else None
        return *out, aux

    def backward(self, fun: Callable[..., Any], refs: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """`fun(refs, arrays)`, a backward pass of this function.

        JAX transposes loops and branches into ones that hide the refs they touch, those of users'
        backward rules, where only we can see them: it is a transaction of its own.
        """
        return (run if self.has_backward_effects else in_transaction)(fun, refs, arrays)

    def holding(self, in_nzs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Makes of a function of `values` one in which those flagged as false are constant."""
        if in_nzs is None:
            return lambda fun: fun
        inputs = self.inputs
        nonzero = flags(self.doing, "in_nzs", in_nzs, inputs.tree)
        moving = {v.position for v, flag in zip(inputs.variables, nonzero, strict=True) if flag}

        def held(fun: Callable[..., Any]) -> Callable[..., Any]:
            return lambda values: fun(
                [x if k in moving else lax.stop_gradient(x) for k, x in enumerate(values)]
            )

        return held

    def with_contents(self, values: Sequence[Any]) -> tuple[Any, Any]:
        """`self(values)`, with the final contents of the variables that it writes as outputs.

        They are a dictionary, by the number of the ref. Of the others, nothing has become.
        """
        out, rest = self(values)
        _, state, _ = rest
        n_refs = self.inputs.n_refs
        final = {
            slot.argument: value
            for slot, value in zip(self._t.written, state, strict=True)
            if slot.argument is not None and slot.argument < n_refs
        }
        return (out, final), rest

    def outputs(self, arrays: Sequence[Any]) -> Any:
        """The function's output, from one item for each array in it."""
        return jax.tree.unflatten(self.out_tree, arrays)


def _returning_pair(doing: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, whose result must be a pair."""

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = fun(*args, **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            what = "an array" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
            raise RefTypeError(
                f"{doing} with has_aux of a function that returns {what}: it must return a pair, "
                "(output, auxiliary data)"
            )
        output, aux = result
        return output, aux

    return checked


def check_reduce_axes(doing: str, reduce_axes: Any) -> None:
    """JAX still has the keyword, and takes nothing for it."""
    if reduce_axes:
        raise RefValueError(f"{doing}: reduce_axes={reduce_axes!r} means nothing any more in JAX")


def _described(marker: Any, inputs: Inputs) -> str:
    if isinstance(marker, NewRef):
        return marker.origin.describe() if marker.origin is not None else "a ref made inside"
    return describe(marker.ref if hasattr(marker, "ref") else inputs.refs[marker.position])


def derivative(
    doing: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    derive: Callable[[Differentiable, Inputs], Any],
) -> Callable[..., Any]:
    """The function of `fun`'s arguments that `derive(f, inputs)` evaluates."""

    @functools.wraps(fun)
    def derived(*args: Any, **kwargs: Any) -> Any:
        def check(x: Any) -> None:
            _check_variable(doing, x, holomorphic, allow_int)

        def inside(inputs: Inputs) -> Any:
            return derive(Differentiable(doing, fun, inputs, has_aux, check), inputs)

        return Inputs.of(doing, argnums, args, kwargs).in_transaction(inside)

    return derived


def _check_variable(doing: str, x: Any, holomorphic: bool, allow_int: bool) -> None:
    """Refuses what has no gradient of its own type, as JAX does."""
    dtype = jnp.result_type(x)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise RefTypeError(
            f"{doing} with respect to a variable of dtype {dtype}: it has no derivative"
        )
    if holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise RefTypeError(
            f"{doing} with holomorphic=True with respect to a variable of dtype {dtype}: it must "
            "be complex"
        )
    if jnp.issubdtype(dtype, jnp.inexact) or allow_int:
        return
    raise RefTypeError(
        f"{doing} with respect to a variable of dtype {dtype}: it has no gradient of that type. "
        "Leave it out of `argnums`, or set allow_int=True, which makes its gradient one of dtype "
        "float0"
    )
