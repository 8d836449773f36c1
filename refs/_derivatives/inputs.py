"""The variables of a differentiated call: arrays, and the contents of refs at entry.

A view among the arguments stands for its part of a ref's contents.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._handles.access import check_ref, describe, get
from refs._handles.predicates import is_ref, is_view
from refs._handles.view import RefView
from refs._indexing.index import Index
from refs._tracing.names import one_name
from refs._tracing.trace import Call
from refs._transactions.signature import check_arrays, dtype_of, path_of
from refs._types import Aval, PyTree, PyTreeDef, RefLike, Value
from refs.errors import RefTypeError, RefValueError


class Variable(NamedTuple):
    """A leaf of the differentiated arguments: the value at `position`, or the view's part of it.

    It is a pytree: the indices of the view may be traced.
    """

    position: int
    view: RefView | None = None


class Inputs(NamedTuple):
    """The arguments of a call, with the variables taken out.

    The `values` of the variables are `arrays`, then the contents of `refs`.

    Attributes:
      call: the call, which takes the variables: `call.rebuild(refs, arrays)` has the arrays in the
        variables' places, and each ref wherever it was, also in views.
      tree: the structure of the variables, with views as leaves.
      variables: for each leaf of `tree`, its place among the values.
      path: gives the path of an array variable in the arguments, by its position.
    """

    call: Call
    tree: PyTreeDef
    variables: tuple[Variable, ...]
    path: Callable[[int], str]

    @staticmethod
    def of(
        doing: str,
        argnums: int | Sequence[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "args",
    ) -> Inputs:
        args, kwargs = jax.tree.map(lambda x: one_name(x) if is_ref(x) else x, (args, kwargs))
        chosen = _positions(doing, argnums, args)
        flat, whole = jax.tree.flatten((args, kwargs), is_leaf=is_view)
        given = args[chosen[0]] if np.ndim(argnums) == 0 else tuple(args[k] for k in chosen)
        tree = jax.tree.structure(given, is_leaf=is_view)
        # The places in `flat` of the leaves that are variables, in the order of `given`.
        sizes = [len(jax.tree.leaves(x, is_leaf=is_view)) for x in args]
        starts = [0, *accumulate(sizes)]
        places = [starts[k] + j for k in chosen for j in range(sizes[k])]
        _check_distinct(doing, [flat[i] for i in places])

        def ref_of(x: Value) -> RefLike | None:
            return x.ref if is_view(x) else x if is_ref(x) else None

        for x in flat:
            if is_ref(ref := ref_of(x)):
                check_ref(ref, doing)
        if any(ref_of(x) is not None for x in flat):  # Otherwise JAX's own error is told.
            check_arrays(doing, whole, flat, places, names=(name, "kwargs"))
        variable_refs = {id(r) for i in places if (r := ref_of(flat[i])) is not None}
        found = [i for i in sorted(places) if ref_of(flat[i]) is None]
        arrays = {i: k for k, i in enumerate(found)}
        is_variable = [
            id(x) in variable_refs if is_ref(x) else i in arrays
            for i, part in enumerate(flat)
            for x in (jax.tree.leaves(part) if is_view(part) else [part])
        ]
        leaves = jax.tree.leaves((args, kwargs))
        kept = {k: leaves[k] for k, is_taken in enumerate(is_variable) if not is_taken}
        call = Call.of(args, kwargs, kept=kept)
        place = {id(ref): len(found) + k for k, ref in enumerate(call.refs)}

        def variable(i: int) -> Variable:
            ref = ref_of(flat[i])
            if ref is None:
                return Variable(arrays[i])
            return Variable(place[id(ref)], flat[i] if is_view(flat[i]) else None)

        variables = tuple(variable(i) for i in places)
        return Inputs(
            call, tree, variables, lambda k: path_of(whole, found[k], names=(name, "kwargs"))
        )

    @property
    def refs(self) -> list[RefLike]:
        """The distinct refs that are variables. Other refs and arrays stay in the call."""
        return self.call.refs

    @property
    def arrays(self) -> list[Value]:
        """The array variables."""
        return self.call.leaves

    def describe(self, k: int) -> str:
        """The `k`-th value, for messages."""
        n = len(self.arrays)
        return f"`{self.path(k)}`" if k < n else describe(self.refs[k - n])

    def flatten(self, doing: str, given: PyTree) -> list[Value | RefLike]:
        """A leaf for each variable, after a check of the structure; see `gather` for the values."""
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
        x: Value = variable.view
        if x is None:
            x = _jax.shaped_abstractify(self.arrays[k]) if k < n else self.refs[k - n]
        if dtype_of(x) is None:  # A value of a user's own type: the type's name stands for it.
            return (), str(x)
        return x.shape, x.dtype.name if jnp.issubdtype(x.dtype, jnp.inexact) else "float0"

    def gather(
        self, doing: str, leaves: Sequence[Value | RefLike], values: Sequence[Value]
    ) -> list[Value]:
        """A tangent for each value, from one for each variable: those of one ref's parts add up.

        A leaf has the shape of its variable, `[*view.shape]` for a view, and a tangent that of the
        value, `[*ref.shape]`.
        """
        tangents: list[Value] = [None] * len(values)
        for variable, leaf in zip(self.variables, leaves, strict=True):
            k = variable.position
            given = get(leaf) if is_ref(leaf) else leaf
            if variable.view is not None:
                given = _of_whole(doing, variable.view, values[k], given)
            tangents[k] = given if tangents[k] is None else tangents[k] + given
        return tangents

    def unflatten(self, values: Sequence[Value]) -> PyTree:
        """An array for each variable, from one for each value, `[*leading, *value.shape]`."""

        def part(variable: Variable) -> Value:
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


def _check_distinct(doing: str, leaves: Sequence[Value]) -> None:
    """Refuses a ref that is a variable twice, or both whole and in parts. Only parts may repeat."""
    whole = Counter(id(x) for x in leaves if is_ref(x))
    parts = [x.ref for x in leaves if isinstance(x, RefView)]
    repeated = [x for x in leaves if is_ref(x) and whole[id(x)] > 1]
    for ref in (*repeated, *(r for r in parts if id(r) in whole)):
        raise RefValueError(
            f"{doing} with respect to {describe(ref)} twice: its contents are one variable. "
            "Differentiate with respect to one of the arguments that hold it"
        )


def part_of(value: Value, view: RefView, leading: int = 0) -> Value:
    """A view's part, `[*leading axes, *view.shape]`, of a value `[*leading axes, *ref.shape]`."""

    def take(x: Value) -> Value:
        for idx in view._path:
            x = Index.parse(idx, x.shape).read(x)
        return x

    if not leading:
        return take(value)
    front = value.shape[:leading]
    rows = jax.vmap(take)(value.reshape(math.prod(front), *value.shape[leading:]))
    return rows.reshape(*front, *rows.shape[1:])


def _of_whole(doing: str, view: RefView, whole: Value, tangent: Value) -> Value:
    """The tangent of a ref's contents, given that of a view's part: the adjoint of `part_of`.

    `whole` and the result: `[*ref.shape]`; `tangent`: `[*view.shape]`.
    """
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return np.zeros(whole.shape, jax.dtypes.float0)
    aval: Aval = _jax.shaped_abstractify(tangent)
    if aval.shape != view.shape or (aval.dtype != view.dtype and not aval.weak_type):
        raise RefValueError(
            f"{doing}: the tangent of a view of {describe(view.ref)} of type {view.dtype}"
            f"{list(view.shape)} is of type {aval.dtype}{list(aval.shape)}"
        )
    _, scatter = jax.vjp(lambda x: part_of(x, view), jnp.zeros_like(whole))
    return scatter(jnp.asarray(tangent, whole.dtype))[0]
