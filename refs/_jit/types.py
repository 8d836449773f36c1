"""The types of a `refs.jit` function and of the keywords, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, overload

from refs._explain.report import Explanation
from refs._jit.stages import Lowered, Traced

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)


class Jitted(Protocol[P, R_co]):
    """The function that `refs.jit` returns, for type checkers and editors."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Jitted[P, R_co]: ...

    @overload
    def __get__(
        self: Jitted[Concatenate[Any, Q], R_co], instance: object, owner: Any = None
    ) -> Callable[Q, R_co]: ...

    def trace(self, *args: Any, **kwargs: Any) -> Traced: ...

    def lower(self, *args: Any, **kwargs: Any) -> Lowered: ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...

    def explain(self, *args: Any, **kwargs: Any) -> Explanation: ...

    def clear_cache(self) -> None: ...


class Keywords(TypedDict, total=False):
    """The keywords of `jit`, for type checkers."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: dict[str, Any] | None
