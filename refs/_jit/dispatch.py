"""The function that users call: it finds the compiled form for the arguments, and calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from refs import _jax
from refs._buffers.exchange import Busy, wait
from refs._jit.picking import RefsDiffer
from refs._jit.ways import RETRY

if TYPE_CHECKING:
    from refs._jit.programs import Programs


class NoForm:
    """Stands for the form of a call that has none yet, or none that a quick look-up finds."""

    @staticmethod
    def call(form: Any, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RefsDiffer


def dispatcher(programs: Programs) -> Callable[..., Any]:
    """The function that users call: it runs the program that fits the arguments."""
    trace_state, eval_trace = _jax.trace_state, _jax.eval_trace
    nans, infs = jax.debug_nans, jax.debug_infs
    has_static, instances = programs.has_static, programs.instances
    inline: Any = None  # the form, while there is only one

    def forget() -> None:
        nonlocal inline
        inline = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inline
        if trace_state.value is not eval_trace or nans.value or infs.value:
            return programs.call_otherwise(args, kwargs)
        form: Any = inline
        static, rest_args, rest_kwargs = None, args, kwargs
        if has_static:
            known = form and form.static
            static, rest_args, rest_kwargs = programs.take_static(args, kwargs, known)
            form = form if known == static else None
        if form is not None:
            try:
                flat = form.flatten((rest_args, rest_kwargs))
            except ValueError:
                form = None
        if form is None:
            if instances and args and id(args[0]) in instances:
                return instances[id(args[0])](*args[1:], **kwargs)
            form, flat = programs.find(static, rest_args, rest_kwargs)
        try:
            result = form.call(form, flat, args, kwargs)
        except RETRY:
            inline = None
        else:
            if form is not inline:
                inline = form if form.is_alone else None
            return result
        if _jax.is_jit_disabled():
            return programs.call_otherwise(args, kwargs)
        if (bound := programs.of_instance(args)) is not None:
            return bound(*args[1:], **kwargs)
        attempt = misses = 0
        while True:
            form, flat = programs.find_or_make(static, rest_args, rest_kwargs)
            try:
                result = form.run(form, flat, args, kwargs)
            except Busy:
                arguments = form.arguments
                attempt = wait(attempt, arguments.written_of(flat), arguments.read_of(flat))
            except RETRY:  # pragma: no cover, another thread has placed a ref elsewhere meanwhile
                misses += 1
                if misses > 3:
                    raise
            else:
                inline = form if form.is_alone else None
                return result

    programs.forget = forget
    return call


class Methods(dict[str, Any]):
    """The attributes of a compiled function, hidden from `functools.wraps`, which copies them.

    `jax.jit(f)` calls it: our `f.trace` would stand in the place of JAX's.
    """

    def keys(self) -> Any:
        return {}.keys()

    def __iter__(self) -> Any:
        return iter(())
