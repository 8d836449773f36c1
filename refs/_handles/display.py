"""How a ref is shown in notebooks: as HTML, and by treescope."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from refs._origin import origin_of
from refs.errors import RefStateError

if TYPE_CHECKING:
    from refs._handles.ref import Ref


def html_of(ref: Ref) -> str:
    """The name, birthplace and size of a ref above its `repr`."""
    origin = origin_of(ref._aval)
    named = f"<b>{escape(origin.name)}</b> " if origin.name else ""
    site = f", created at {escape(str(origin.site))}" if origin.site else ""
    size = f"{ref.size * ref.dtype.itemsize:,} bytes"
    return (
        f'<div>{named}<span style="opacity: 0.7">{size}{site}</span>'
        f"<pre>{escape(repr(ref))}</pre></div>"
    )


def treescope_of(ref: Ref, path: str | None, subtree_renderer: Any) -> Any:
    """A ref as treescope renders it, with its value as an array of its own."""
    from treescope import repr_lib  # pyright: ignore[reportMissingImports]

    origin = origin_of(ref._aval)
    try:
        value: Any = ref[...]
    except RefStateError:  # It has ended, or its value is in a call that runs.
        value = None
    return repr_lib.render_object_constructor(
        object_type=type(ref),
        attributes={"value": value, "name": origin.name, "created": str(origin.site)},
        path=path,
        subtree_renderer=subtree_renderer,
    )
