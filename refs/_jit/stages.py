"""The stages of compilation of a `refs.jit` function, after `jax.stages`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._buffers.stores import store_of
from refs._handles.access import describe
from refs._handles.predicates import is_ref
from refs._handles.resharding import placement_of
from refs._jit.program import Description
from refs._jit.running import carefully
from refs._origin import UNKNOWN
from refs._types import Aval, ClosedJaxpr
from refs.errors import RefTypeError

_Fit = Callable[[Any, Sequence[Any], tuple[Any, ...], dict[str, Any]], tuple[bool, list[Any]]]


class _Stage:
    """A stage of a form of a program. Its other attributes are those of JAX's stage of it.

    Attributes:
      args_info: for each argument its type, and whether it is donated.
      in_tree: the structure of the arguments: `(args, kwargs)`.
      out_info: the result's shapes and dtypes.
      out_tree: the result's structure.
      of_jax: JAX's stage of the pure program, whose first arguments are the values of written refs.
    """

    def __init__(self, program: Any, kinds: Any, of_jax: Any, fit: _Fit):
        self._program, self._kinds, self.of_jax, self._fit = program, kinds, of_jax, fit
        self._told: Any = of_jax
        if not program.is_plain:
            self._told = Description(program, self._form)
        self.args_info, self.out_info = self._told.args_info, self._told.out_info
        trees = of_jax if program.is_plain else program
        self.in_tree, self.out_tree = trees.in_tree, trees.out_tree

    @property
    def _form(self) -> Any:
        """The traced function, if it isn't JAX's alone."""
        return self._program.forms[self._kinds]

    def __getattr__(self, name: str) -> Any:
        # While a copy is made it has no attributes yet: then this raises AttributeError.
        return getattr(object.__getattribute__(self, "of_jax"), name)


class Traced(_Stage):
    """A traced function over refs.

    Attributes:
      effectful_jaxpr: the function's jaxpr, over refs. The function is traced for it once more.
      jaxpr: the pure jaxpr that is compiled: it takes the state, and its first outputs are the new
        state. In it, the program is one `in_place` equation, which is put in order when it is
        lowered. For a function without refs, both attributes are its one jaxpr.
      placements: the sharding of each leaf of the arguments; None where nobody has said one.
    """

    def __init__(
        self,
        program: Any,
        kinds: Any,
        of_jax: Any,
        fit: _Fit,
        given: Sequence[Any],
        effectful: Callable[[], ClosedJaxpr] | None,
    ):
        super().__init__(program, kinds, of_jax, fit)
        self.jaxpr, self._effectful = of_jax.jaxpr, effectful
        self.placements = [*map(placement_of, given)]

    @functools.cached_property
    def effectful_jaxpr(self) -> ClosedJaxpr:
        return self.jaxpr if self._effectful is None else self._effectful()

    def lower(
        self, *, lowering_platforms: Sequence[str] | None = None, _private_parameters: Any = None
    ) -> Lowered:
        """Lowers to StableHLO, for other platforms than this machine's if they are given.

        Raises:
          RefTypeError: for `jax.export`, if the function touches refs besides its own.
        """
        if _private_parameters is not None and not self._program.is_plain:
            t = self._form
            origin = next(
                (s.origin for s in (*t.written, *t.read) if s.origin is not UNKNOWN), UNKNOWN
            )
            used = "refs" if origin is UNKNOWN else origin.describe()
            raise RefTypeError(
                f"jax.export of `{self._program.name}`, which uses {used}: JAX knows no refs. "
                "`refs.export.export` makes a program that takes their values and returns the new "
                "ones, and `refs.export.call` calls it with refs"
            )
        lowered = self.of_jax.lower(
            lowering_platforms=lowering_platforms, _private_parameters=_private_parameters
        )
        return Lowered(self._program, self._kinds, lowered, self._fit)


class Lowered(_Stage):
    """A lowered function over refs.

    Attributes:
      written: the origins (names and creation sites) of the refs that are written, or of the packs
        that they lie in; their buffers are the first parameters of the program, in this order.
      is_plain: whether the function touches no refs but its own: then it is JAX's.
    """

    def __init__(self, program: Any, kinds: Any, of_jax: Any, fit: _Fit):
        super().__init__(program, kinds, of_jax, fit)
        self.is_plain = program.is_plain
        self.written = []
        if not program.is_plain:
            packing, slots = self._form.packing, self._form.written
            self.written = packing.per_operand(packing.bases, [s.origin for s in slots])

    def described(self, arguments: Sequence[str]) -> list[str]:
        """What is written, given what the distinct refs among the arguments are."""
        packing, slots = self._form.packing, self._form.written
        of_slots = [
            s.origin.describe() if s.argument is None else arguments[int(s.argument)] for s in slots
        ]
        return packing.per_operand([base.describe() for base in packing.bases], of_slots)

    def compile(self, compiler_options: dict[str, Any] | None = None, **keywords: Any) -> Compiled:
        """Compiles for the devices that the refs are on."""
        compiled = self.of_jax.compile(compiler_options, **keywords)
        return Compiled(self._program, self._kinds, compiled, self._fit)


class Compiled(_Stage):
    """A compiled function over refs: call it as the function itself, without static arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._program.is_plain:
            return self.of_jax(*args, **kwargs)
        fits, flat = self._fit(self._program, self._told.argument_types, args, kwargs)
        if not fits:
            raise RefTypeError(
                "a compiled function was called with arguments of other types, or other aliases "
                "among its refs, than it was compiled for, or with static ones, which it has "
                f"already{self._packed(flat)}{self._differences(args, kwargs)}"
            )
        try:
            return carefully(self._program, flat, self.of_jax)
        except ValueError as error:
            if "sharding" in str(error):  # XLA's arguments have names of their own.
                refs = self._program.operands
                picked = {"state": refs.written_of(flat), "constants": refs.read_of(flat)}
                names = [
                    f"{k}[{n}]: {describe(r)}" for k, x in picked.items() for n, r in enumerate(x)
                ]
                error.add_note("\n".join(["The arguments that are values of refs:", *names]))
            raise

    def _packed(self, flat: list[Any]) -> str:
        is_packed = self._program.operands.packing.selections
        if is_packed or any(is_ref(x) and store_of(x).is_shared for x in flat):
            return " (refs of a pack are of other types than others: compile it for such a pack)"
        return ""

    def _differences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The arguments of other types, each in a line of its own."""
        given, tree = jax.tree.flatten_with_path((args, kwargs))
        if tree != self.in_tree:
            return ""
        lines = [":"]
        for (path, x), aval in zip(given, self._told.argument_types, strict=True):
            was, found = _described(aval), _described(jax.typeof(x))
            lies_elsewhere = is_ref(x) and jax.typeof(x) != aval and found == was
            if found.lstrip("~") != was.lstrip("~") or lies_elsewhere:
                found += ", which lies elsewhere" if lies_elsewhere else ""
                name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
                lines.append(f"Argument {name} compiled with {was} and called with {found}")
        return "\n".join(lines) if len(lines) > 1 else ""


def _described(aval: Aval) -> str:
    return f"Ref{{{aval.inner_aval}}}" if _jax.is_ref_type(aval) else str(aval)
