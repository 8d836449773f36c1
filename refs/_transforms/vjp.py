"""`refs.vjp`: the output, and a function that pulls cotangents back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._derivatives.at_top_level import backward
from refs._derivatives.derivative import check_reduce_axes, differentiable
from refs._derivatives.inputs import Inputs, Variable, part_of
from refs._handles.access import addupdate, describe, get
from refs._handles.predicates import is_ref
from refs._handles.view import RefView
from refs._transactions.signature import flags, mirrored
from refs._types import Jaxpr, PyTree, PyTreeDef, RefLike, Value
from refs.errors import RefTypeError, RefValueError


def vjp(
    fun: Callable[..., Any],
    *primals: PyTree,
    has_aux: bool = False,
    reduce_axes: Sequence[Any] = (),
    saveable_args: PyTree = True,
    in_nzs: PyTree = None,
) -> Any:
    """Evaluates `fun(*primals)` and the pullback there. Works like `jax.vjp`.

    Args:
      fun: a function over refs.
      *primals: arrays, refs, views and pytrees of them: all are variables. The derivative with
        respect to a ref is taken at the value that it holds when the call begins.
      has_aux: whether `fun` returns a pair, of which the second is auxiliary data.
      reduce_axes: has no meaning any more, as in JAX, and must be empty.
      saveable_args: which primals may be saved as they are for the backward pass: a bool for each,
        or a prefix. The caller puts the others into the pullback's `args_res` before calling it.
      in_nzs: which primals may have nonzero cotangents: a bool for each, or a prefix.

    Returns:
      `(output, pullback)`, or `(output, pullback, aux)`. The `Pullback` takes a cotangent of the
      output and returns a tuple of the primals' cotangents; that of a ref is an array. Its method
      `with_refs` accumulates cotangents into refs instead.

    Raises:
      RefValueError: if a ref is a variable twice; if `saveable_args` or `in_nzs` doesn't fit the
        primals.
      RefEscapeError: if `fun` returns a ref, other than as auxiliary data.

    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> out, pullback = refs.vjp(lambda w, x: w[...] * x, w, 3.0)
    >>> pullback(jnp.ones(2))
    (Array([3., 3.], dtype=float32), Array(3., dtype=float32, weak_type=True))
    """
    check_reduce_axes("vjp", reduce_axes)
    inputs = Inputs.of("vjp", tuple(range(len(primals))), primals, {}, "primals")
    f = differentiable("vjp", fun, inputs, has_aux)
    pure = f.holding(in_nzs)(f)
    out, native, aux = f.run(lambda values: jax.vjp(pure, values, has_aux=True))
    saveable = flags("vjp", "saveable_args", saveable_args, inputs.tree)
    pullback = Pullback(native, inputs, f.out_tree, f.has_backward_effects, saveable)
    return (f.outputs(out), pullback, aux) if has_aux else (f.outputs(out), pullback)


@jax.tree_util.register_pytree_node_class
class Pullback:
    """The second result of `refs.vjp`: a function from the output's cotangent to the primals'.

    It is a pytree of the values that the backward pass needs, so it can be passed to a jitted
    function. Its other attributes are those of `jax.vjp`'s function, as far as the installed JAX
    has them.

    Attributes:
      in_tree: the structure of the primals, of which views are leaves.
      out_tree: the structure of the output.
      args_res: for each primal, with tuples for containers other than lists and dicts: the values
        that the backward pass needs as they were given; for a ref, its value then. A `NotNeeded()`
        stands for a value that it doesn't need, a `NotSaveable()` for one that wasn't to be saved:
        put an array or a ref there before the call.
    """

    args_res: list[Any]
    _want_logs = False

    def __init__(
        self,
        native: Any,  # the function that `jax.vjp` returns
        inputs: Inputs,
        out_tree: PyTreeDef,
        has_effects: bool,
        saveable: Sequence[bool],
    ):
        self._native = native
        [held] = native.args_res
        native.args_res = []
        kept = [held[v.position] for v in inputs.variables]
        self._needed = tuple(not isinstance(x, _jax.NotNeeded) for x in kept)
        kept = [
            x if may or not needed else _jax.NotSaveable()
            for x, may, needed in zip(kept, saveable, self._needed, strict=True)
        ]
        self.args_res = [*mirrored(inputs.tree, kept)]
        self.in_tree, self._variables = inputs.tree, inputs.variables
        self._types = tuple(inputs.type_of(v) for v in inputs.variables)
        self.out_tree, self._has_effects = out_tree, has_effects

    def __call__(self, cotangent: PyTree) -> Any:
        """Returns the cotangent of each primal, given that of the output."""
        return self._apply([jax.ad.GradValue()] * len(self._variables), cotangent)

    def with_refs(self, *wanted: PyTree) -> Callable[[PyTree], Any]:
        """Chooses what happens to each cotangent. Works like `with_refs` of `jax.vjp`'s function.

        Args:
          *wanted: one for each primal, of the same structure. A leaf is a ref, to accumulate the
            cotangent into it; `jax.ad.GradValue()`, to return it; or `jax.ad.DontWant()`, not to
            compute it at all. Any other object stands for `GradValue()`, as in JAX.

        Returns:
          A function of the output's cotangent. Its result has `jax.ad.GradRef()` in place of a
          cotangent that was accumulated, and `jax.ad.DidntWant()` in place of one not computed.

        Raises:
          RefValueError: if the structure differs from that of the primals.
          RefTypeError: if a leaf is an array or a number, or a ref of another shape or dtype.

        >>> total = refs.new_ref(jnp.ones(2))
        >>> _, pullback = refs.vjp(lambda x: x**2, jnp.array([3.0, 4.0]))
        >>> pullback.with_refs(total)(jnp.ones(2))
        (GradRef(),)
        >>> total
        Ref([7., 9.], dtype=float32)
        """
        leaves, tree = jax.tree.flatten(wanted)
        if tree != self.in_tree:
            raise RefValueError(
                f"with_refs: the primals have the structure {self.in_tree}, and the arguments "
                f"{tree}"
            )
        for x, (shape, dtype) in zip(leaves, self._types, strict=True):
            if is_ref(x) and (x.shape, x.dtype.name) != (shape, dtype):
                raise RefTypeError(
                    f"with_refs: a cotangent of type {dtype}{list(shape)} can't be accumulated "
                    f"into {describe(x)} of type {x.dtype}{list(x.shape)}"
                )
            if not is_ref(x) and isinstance(x, jax.typing.ArrayLike):
                raise RefTypeError(
                    f"with_refs takes a Ref, `jax.ad.GradValue()` or `jax.ad.DontWant()` for each "
                    f"primal, not a {type(x).__name__}"
                )
        return lambda cotangent: self._apply(leaves, cotangent)

    @property
    def with_logs(self) -> Pullback:
        """The same, but it returns a pair: the cotangents, and the logs of backward rules."""
        logging = copy.copy(self)
        logging._native, logging._want_logs = self._native.with_logs, True
        return logging

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr of the tangents' computation."""
        return self._native.jaxpr

    @property
    def opaque_residuals(self) -> list[Value]:
        """The values computed from the primals and saved for the backward pass."""
        return self._native.opaque_residuals

    @property
    def structured_residuals(self) -> list[Any]:
        """The residuals that derivative rules save in structures of their own."""
        return self._native.structured_residuals

    @property
    def out_nzs(self) -> PyTree:
        """Which of the outputs depend on the primals."""
        return mirrored(self.out_tree, self._native.out_nzs)

    def _apply(self, wanted: list[Any], cotangent: PyTree) -> PyTree:
        cts, tree = jax.tree.flatten(cotangent)
        if tree != self.out_tree:
            raise RefValueError(
                f"the output of the differentiated function has the structure {self.out_tree}, "
                f"and the cotangent {tree}"
            )
        into = [x for x in wanted if is_ref(x)]

        native = copy.copy(self._native)
        native.args_res = [self._restored()]

        def pulled(into: list[RefLike], cts: list[Value]) -> tuple[list[Value], Any]:
            rest = iter(into)
            items = [next(rest) if is_ref(x) else x for x in wanted]
            values, logs = self._backward(native, items, cts)
            return [x for x in values if not _is_word(x)], logs

        found, logs = backward(pulled, into, cts, self._has_effects)
        arrays = iter(found)
        result = jax.tree.unflatten(
            self.in_tree,
            [
                jax.ad.GradRef()
                if is_ref(x)
                else (jax.ad.DidntWant() if isinstance(x, jax.ad.DontWant) else next(arrays))
                for x in wanted
            ],
        )
        return (result, logs) if self._want_logs else result

    def _restored(self) -> list[Value]:
        """For each value, that in `args_res`, or `NotNeeded()`."""
        places = jax.tree.structure([*mirrored(self.in_tree, self._needed)])
        words = (_jax.NotNeeded, _jax.NotSaveable, RefView)
        try:
            kept = places.flatten_up_to(self.args_res)
        except ValueError:  # The user may have put other containers there.
            kept = jax.tree.leaves(self.args_res, is_leaf=lambda x: isinstance(x, words))
        if len(kept) != len(self._variables):
            raise RefValueError(
                f"`args_res` of the pullback has {len(kept)} values, for {len(self._variables)} "
                "variables: put a value or a ref into the place of each"
            )
        values: list[Value] = [_jax.NotNeeded()] * self._n_values
        for k, (variable, x) in enumerate(zip(self._variables, kept, strict=True)):
            if not self._needed[k]:
                continue
            if isinstance(x, _jax.NotSaveable | None):
                raise RefValueError(
                    f"the pullback needs the value of variable {k} of {len(kept)}, which it hasn't "
                    "saved: put it into `args_res` first"
                )
            x = x.ref if isinstance(x, RefView) else x
            values[variable.position] = get(x) if is_ref(x) else x
        return values

    @property
    def _n_values(self) -> int:
        return 1 + max((v.position for v in self._variables), default=-1)

    def _backward(self, native: Any, wanted: list[Any], cts: list[Value]) -> tuple[list[Any], Any]:
        """(for each variable its cotangent, `GradRef()` or `DidntWant()`; the rules' logs)"""
        # JAX can't accumulate for a view: its cotangent is first cut out of that of the whole ref.
        is_direct = _jax.can_accumulate_gradients and not _takes_one_twice(native.jaxpr)
        asked: list[Any] = [jax.ad.DontWant()] * self._n_values
        for variable, x in zip(self._variables, wanted, strict=True):
            if is_ref(x) and not (is_direct and variable.view is None):
                x = jax.ad.GradValue()
            if not isinstance(x, jax.ad.DontWant):
                asked[variable.position] = x
        found = native.with_refs(asked)(cts)
        [values], logs = found if self._want_logs else (found, None)
        finished = [
            self._finish(v, x, values) for v, x in zip(self._variables, wanted, strict=True)
        ]
        return finished, logs

    def _finish(self, variable: Variable, wanted: Any, values: list[Value]) -> Any:
        value = values[variable.position]
        if isinstance(wanted, jax.ad.DontWant):
            return jax.ad.DidntWant()
        if variable.view is not None:
            value = part_of(value, variable.view)
        if is_ref(wanted) and not _is_word(value):
            addupdate(wanted, ..., value)
            return jax.ad.GradRef()
        return value

    def tree_flatten(self) -> tuple[Any, ...]:
        # The indices of a view may be arrays. Its ref isn't needed any more.
        flat = [v.view.tree_flatten() if v.view is not None else None for v in self._variables]
        arrays = [None if x is None else x[0][1:] for x in flat]
        paths = tuple(None if x is None else x[1] for x in flat)
        positions = tuple(v.position for v in self._variables)
        fixed = (self.in_tree, self._types, self.out_tree, self._has_effects)
        flags = (self._needed, self._want_logs)
        return (self._native, arrays, self.args_res), (positions, paths, flags, *fixed)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> Pullback:
        pullback = object.__new__(cls)
        pullback._native, arrays, pullback.args_res = children
        positions, paths, flags, *fixed = aux
        pullback._needed, pullback._want_logs = flags
        pullback.in_tree, pullback._types, pullback.out_tree, pullback._has_effects = fixed
        pullback._variables = tuple(
            Variable(k, None if p is None else RefView.tree_unflatten(p, (None, *indices)))
            for k, p, indices in zip(positions, paths, arrays, strict=True)
        )
        return pullback


@_jax.once_per_jaxpr
def _takes_one_twice(jaxpr: Jaxpr) -> bool:
    """Whether a loop or call, at any depth, takes a variable twice.

    A scan may take an array as a constant, and go over its rows besides: then JAX doesn't
    accumulate its cotangent into a ref.
    """
    for eqn in jaxpr.eqns:
        if inner := _jax.jaxprs_in(eqn.params):
            taken = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
            if len({*taken}) < len(taken) or any(_takes_one_twice(c.jaxpr) for c in inner):
                return True
    return False


def _is_word(x: Value) -> bool:
    return isinstance(x, jax.ad.GradRef | jax.ad.DidntWant)
