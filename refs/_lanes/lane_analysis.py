"""The lane analysis: an abstract run of a lane's jaxpr, before it is batched.

It tells which values may vary from lane to lane. So it finds the branches and loops in which lanes
may diverge, and refuses writes after which a shared ref would hold only one lane's version. `vmap`
means a `for` loop over the lanes, in any order. The allowed uses of a shared ref depend on all that
the lanes do to it:

- they only read it: allowed;
- they only accumulate into it, by one method: allowed;
- otherwise: they may overwrite it with a value that is the same in every lane, and use it only
  after such an overwriting of the whole, so that no lane sees another one's writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from refs import _jax
from refs._origin import Origin, origin_of
from refs._tracing.facts import facts_of, inner_calls
from refs._tracing.touch_analysis import Touch, holds_refs, touches_of, used
from refs._types import Atom, ClosedJaxpr, Eqn
from refs.errors import RefValueError

# All that lanes may do to a shared ref one after the other, and not at once.
_ORDERED = Touch.READ | Touch.WRITE


class Contents:
    """The abstract contents of a ref.

    Attributes:
      origin: the ref's, for messages.
      varies: whether they may vary from lane to lane.
      shared: None for a lane's own ref, otherwise how all the lanes touch it.
      is_set: whether this lane has overwritten the whole of a shared ref.
    """

    def __init__(self, origin: Origin, varies: bool, shared: Touch | None = None):
        self.origin, self.varies, self.shared = origin, varies, shared
        self.is_set = False

    @property
    def is_overwritten(self) -> bool:
        """Whether lanes share the ref, and do more than read it or accumulate by one method."""
        return self.shared is not None and self.shared.changes and not self.shared.method


class LaneAnalysis:
    """The analysis of one lane's jaxpr: in which branches and loops the lanes may diverge.

    In its abstract run the value of an array is a bool, whether it may vary from lane to lane, and
    that of a ref is its `Contents`.
    """

    def __init__(self, size: int, axis_name: Any):
        self._size, self._axis_name = size, axis_name
        self._diverges: dict[int, bool] = {}
        self._of_arrays: dict[tuple[Any, ...], list[bool]] = {}  # outputs of jaxprs without refs
        self._shared: list[Contents] = []
        self._made: dict[int, Contents] = {}
        self._growth = 0

    def again(self) -> LaneAnalysis:
        """A new analysis, for another run in the same lanes."""
        return LaneAnalysis(self._size, self._axis_name)

    def diverges(self, eqn: Eqn) -> bool:
        """Whether lanes may diverge at a branch or loop; True if the run hasn't seen it.

        It hasn't seen equations of rules that were traced later.
        """
        return self._diverges.get(id(eqn), True)

    def run(
        self, closed: ClosedJaxpr, refs: dict[int, Contents], args: Sequence[bool | Contents]
    ) -> None:
        """Runs a lane's jaxpr.

        Args:
          closed: the jaxpr.
          refs: the contents of the refs that it closes over, by their ids.
          args: for each input, whether it may vary, or a ref's `Contents`.
        """
        self._shared = [c for c in (*refs.values(), *args) if isinstance(c, Contents) and c.shared]
        self._run(closed, refs, args, False)

    def _run(
        self, closed: ClosedJaxpr, refs: dict[int, Contents], args: Sequence[Any], diverged: bool
    ) -> list[Any]:
        """The outputs. `diverged`: whether some lanes may not take part."""
        if holds_refs(closed) or any(isinstance(a, Contents) for a in args):
            return self._run_anew(closed, refs, args, diverged)
        # Functions of arrays call one another, and often the same one.
        key = closed.jaxpr, tuple(args), diverged
        if key not in self._of_arrays:
            self._of_arrays[key] = self._run_anew(closed, refs, args, diverged)
        return self._of_arrays[key]

    def _run_anew(
        self, closed: ClosedJaxpr, refs: dict[int, Contents], args: Sequence[Any], diverged: bool
    ) -> list[Any]:
        jaxpr = closed.jaxpr
        consts = [refs[id(c)] if isinstance(c, _jax.NativeRef) else False for c in closed.consts]
        env: dict[Any, Any] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )

        def value(atom: Atom) -> Any:
            return False if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [value(v) for v in eqn.invars]
            is_used = any(v in used(jaxpr) for v in eqn.outvars)
            out = self._step(eqn, refs, operands, diverged, is_used)
            env.update(zip(eqn.outvars, out, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _step(
        self, eqn: Eqn, refs: dict[int, Contents], args: list[Any], diverged: bool, is_used: bool
    ) -> list[Any]:
        primitive = _jax.primitive_of(eqn)
        if primitive is _jax.get_p or primitive is _jax.freeze_p:
            return [self._get(eqn, is_used, *args)]
        if primitive is _jax.swap_p:
            return [self._swap(eqn, diverged, is_used, *args)]
        if primitive is _jax.addupdate_p:
            return self._addupdate(eqn, diverged, *args)
        if primitive is _jax.new_ref_p or primitive is _jax.empty_ref_p:
            return [self._make(eqn, any(args))]
        if primitive is _jax.cond_p:
            return self._cond(eqn, refs, diverged, *args)
        if primitive is _jax.while_p:
            return self._while(eqn, refs, diverged, args)
        if primitive is _jax.scan_p:
            return self._scan(eqn, refs, diverged, args)
        if primitive is lax.optimization_barrier_p:  # JAX 0.12 returns no refs.
            is_returned = len(eqn.outvars) == len(args)
            return [a for a in args if is_returned or not isinstance(a, Contents)]
        if facts_of(eqn).runs_once:
            [(inner, _)] = inner_calls(eqn)
            return self._run(inner, refs, args, diverged)
        return self._unknown(eqn, refs, diverged, args)

    def _unknown(
        self, eqn: Eqn, refs: dict[int, Contents], diverged: bool, args: list[Any]
    ) -> list[Any]:
        """A primitive of which only the operands are known, and perhaps jaxprs that it runs.

        It may run these any number of times, and that number may depend on any operand.
        """
        varies = self._asks_which_lane(eqn) or any(
            a.varies if isinstance(a, Contents) else a for a in args
        )
        if not diverged and self._joins_lanes(eqn):
            varies = False
        calls = list(inner_calls(eqn))
        given = {id(v): a for v, a in zip(eqn.invars, args, strict=True)}

        def step(carry: list[Any]) -> list[Any]:
            before = [c.is_set for c in self._shared]
            for inner, operands in calls:
                of_inner = [given[id(v)] for v in operands]
                self._run(inner, refs, of_inner, diverged or varies)
            self._restore(before)
            return carry

        if calls:
            self._until_stable(step, [])
        else:
            for v, kind in touches_of(eqn):
                ref = given[id(v)]
                self._check_read(eqn, ref)
                if kind.changes:
                    if ref.is_overwritten and (varies or diverged):
                        self._refuse("lane-dependent write to", eqn, ref)
                    self._grow(ref, varies or diverged)
        return [args[0] if _jax.is_ref_type(v.aval) else varies for v in eqn.outvars]

    def _make(self, eqn: Eqn, varies: bool) -> Contents:
        """The contents of a ref that the lane makes: the same in all passes over a loop's body."""
        origin = origin_of(eqn.outvars[0].aval)
        made = self._made.setdefault(id(eqn), Contents(origin, varies))
        made.varies |= varies
        return made

    # -- refs -------------------------------------------------------------------------------------

    def _get(self, eqn: Eqn, is_used: bool, ref: Contents, *index: bool) -> bool:
        if is_used:
            self._check_read(eqn, ref)
        return ref.varies or any(index)

    def _swap(
        self, eqn: Eqn, diverged: bool, is_used: bool, ref: Contents, value: bool, *index: bool
    ) -> bool:
        varies = value or any(index) or diverged
        if ref.is_overwritten:
            if varies:
                self._refuse("lane-dependent write to", eqn, ref)
            if is_used:
                self._check_read(eqn, ref)
            ref.is_set |= not jax.tree.unflatten(eqn.params["tree"], index)
        self._grow(ref, varies)
        return ref.varies or any(index)

    def _addupdate(
        self, eqn: Eqn, diverged: bool, ref: Contents, value: bool, *index: bool
    ) -> list[Any]:
        varies = value or any(index) or diverged
        if ref.is_overwritten and (varies or not ref.is_set):
            self._refuse("accumulation, besides other uses, into", eqn, ref)
        self._grow(ref, varies)
        return []

    def _grow(self, ref: Contents, varies: bool) -> None:
        """Notes that a value is written to a lane's own ref."""
        if ref.shared is None and varies and not ref.varies:
            ref.varies = True
            self._growth += 1

    def _check_read(self, eqn: Eqn, ref: Contents) -> None:
        if ref.is_overwritten and not ref.is_set:
            self._refuse("use of what other lanes write to", eqn, ref)

    def _refuse(self, what: str, eqn: Eqn, ref: Contents) -> None:
        methods = ref.shared.methods if ref.shared is not None else []
        if len(methods) > 1 and ref.shared is not None and not ref.shared & _ORDERED:
            what = f"`{'` besides `'.join(methods)}` of"
        named = ref.origin.describe()
        raise RefValueError(
            f"vmap: {what} {named} at {_jax.user_line(eqn)}: all lanes share it, so after the map "
            f"it would depend on the order of the {self._size} lanes. Map it (`in_axes`), only "
            "accumulate into it (`ref[...] += …`, at an index array `ref.at[i].add(…)`; or only "
            "`.multiply`, only `.min` or only `.max`), or loop (`refs.scan`)"
        )

    # -- control flow -----------------------------------------------------------------------------

    def _note(self, eqn: Eqn, varies: bool) -> None:
        self._diverges[id(eqn)] = self._diverges.get(id(eqn), False) or varies

    def _cond(
        self, eqn: Eqn, refs: dict[int, Contents], diverged: bool, index: bool, *args: Any
    ) -> list[Any]:
        self._note(eqn, index)
        before = [c.is_set for c in self._shared]
        after = [True] * len(before)
        out = [index] * len(eqn.outvars)
        for branch in eqn.params["branches"]:
            self._restore(before)
            new = self._run(_jax.as_closed(branch), refs, args, diverged or index)
            out = [a or b for a, b in zip(out, new, strict=True)]
            after = [a and c.is_set for a, c in zip(after, self._shared, strict=True)]
        self._restore(after)
        return out

    def _while(
        self, eqn: Eqn, refs: dict[int, Contents], diverged: bool, args: list[Any]
    ) -> list[Any]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond = _jax.as_closed(eqn.params["cond_jaxpr"])
        body = _jax.as_closed(eqn.params["body_jaxpr"])
        body_args = args[n_cond : n_cond + n_body]
        parts = False

        def step(carry: list[Any]) -> list[Any]:
            nonlocal parts
            # The predicate is evaluated once before any body.
            [go_on] = self._run(cond, refs, [*args[:n_cond], *carry], diverged or parts)
            before = [c.is_set for c in self._shared]
            parts = parts or go_on
            new = self._run(body, refs, [*body_args, *carry], diverged or parts)
            self._restore(before)
            return [parts or a for a in new]

        carry = self._until_stable(step, args[n_cond + n_body :])
        self._note(eqn, parts)
        return carry

    def _scan(
        self, eqn: Eqn, refs: dict[int, Contents], diverged: bool, args: list[Any]
    ) -> list[Any]:
        p = _jax.scan_params(eqn)
        args = [args[k] for k in p.order]
        end = p.num_consts + p.num_carry
        rows: list[Any] = []

        def step(carry: list[Any]) -> list[Any]:
            before = [c.is_set for c in self._shared]
            out = self._run(p.jaxpr, refs, [*args[: p.num_consts], *carry, *args[end:]], diverged)
            # A loop without steps sets nothing, and a step over a ref sets no more than its row.
            if not p.length or any(isinstance(x, Contents) for x in args[end:]):
                self._restore(before)
            rows[:] = out[p.num_carry :]
            return out[: p.num_carry]

        return [*self._until_stable(step, args[p.num_consts : end]), *rows]

    def _until_stable(self, step: Callable[[list[Any]], list[Any]], carry: list[Any]) -> list[Any]:
        """The fixed point of a loop: runs `step` until no more values or contents may vary."""
        while True:
            growth = self._growth
            out = step(carry)
            new = [a or b for a, b in zip(carry, out, strict=True)]
            if new == carry and growth == self._growth:
                return carry
            carry = new

    def _restore(self, is_set: list[bool]) -> None:
        for ref, flag in zip(self._shared, is_set, strict=True):
            ref.is_set = flag

    def _joins_lanes(self, eqn: Eqn) -> bool:
        """Whether an equation is a collective over all lanes that gives each the same result."""
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        axes = axes if isinstance(axes, tuple) else (axes,)
        is_whole = eqn.params.get("axis_index_groups") is None
        return facts_of(eqn).lanes == "agree" and self._axis_name in axes and is_whole

    def _asks_which_lane(self, eqn: Eqn) -> bool:
        """Whether a collective in it gives lanes different results, as `axis_index` does."""
        if self._axis_name is None:
            return False
        return facts_of(eqn).lanes == "differ" or any(
            self._asks_which_lane(e)
            for inner in _jax.jaxprs_in(eqn.params)
            for e in inner.jaxpr.eqns
        )
