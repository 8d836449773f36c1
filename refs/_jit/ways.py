"""How a compiled form is called: quickly, or carefully where a value could be lost.

Each of these functions exchanges the refs' buffers for the program's outputs
(`refs._buffers.exchange`). An entry has two: `call` for the dispatcher, which has only compared the
structure of the arguments, and `run` once the arguments are known to fit.

| | `entry.call` | `entry.run` |
|---|---|---|
| at first, and after a failure | `_unknown`: look the entry up | `_first` or `_careful` |
| when it has run, if it can't fail | `_over_one` or `_over_several` | the same |
| when it has run, if it can | `_careful_if_known` | `_careful` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import filterfalse, starmap
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._buffers.devices import devices_told
from refs._buffers.exchange import Busy, exchange, exchange_one
from refs._buffers.handles import is_ours
from refs._buffers.several import exchange_refs
from refs._buffers.signals import defer
from refs._callbacks.failure import failure_of, raise_failure
from refs._handles.access import describe
from refs._handles.resharding import go_along
from refs._jit.entry import Entry
from refs._jit.executable import TypesDiffer, before_python
from refs._jit.picking import RefsDiffer
from refs._types import Buffer, PyTree, RefLike, Value

# Raised when a call must be retried: with another compiled form (RefsDiffer, TypesDiffer), or once
# the buffers are free (Busy).
RETRY = (Busy, RefsDiffer, TypesDiffer)

_get_cell = attrgetter("_own_cell")
_get_device_cell = attrgetter("_device_cell")
_get_sharding = attrgetter("_sharding")


def prepare(entry: Entry) -> None:
    """Sets how an entry is called next: before its first run, and after a failure."""
    entry.call, entry.run = _unknown, _careful if entry.is_careful else _first


# The functions take the entry as an argument and don't close over it: the entry holds them, and
# that would be a cycle.


def _unknown(entry: Entry, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lets the dispatcher look for the entry with all that it must fit, and then `run` it."""
    raise RefsDiffer


def _first(entry: Entry, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = carefully(entry, flat)
    entry.call = entry.run = _quickly(entry)
    return result


def _careful(entry: Entry, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = carefully(entry, flat)
    entry.call = _careful_if_known
    return result


def _careful_if_known(
    entry: Entry, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    entry.arguments.check_alike(flat)
    return carefully(entry, flat)


def _quickly(entry: Entry) -> Callable[..., Any]:
    """The quick call, for programs that can't fail while they run, over refs of ours."""
    is_one = len(entry.transaction.written) == 1 and not entry.arguments.reads
    return _over_one(entry) if is_one and entry.shardings is None else _over_several(entry)


def _over_one(entry: Entry) -> Callable[..., Any]:
    arguments, compiled, is_direct = entry.arguments, entry.executable.compiled, entry.is_direct
    is_bare, written_of = arguments.is_bare, arguments.written_of
    undonated_of, donated_of = arguments.undonated_of, arguments.donated_of

    def call(entry: Entry, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            cell = (flat if is_bare else written_of(flat))[0]._device_cell
        except AttributeError:
            raise RefsDiffer from None
        try:
            if is_bare:
                rest = exchange_one(cell, compiled)
            else:
                rest = exchange_one(cell, compiled, (), undonated_of(flat), donated_of(flat))
        except BaseException as error:
            after_failure(entry, error, flat)
            raise
        return rest if is_direct else entry.result(rest, flat)

    return call


def _over_several(entry: Entry) -> Callable[..., Any]:
    arguments, compiled, is_direct = entry.arguments, entry.executable.compiled, entry.is_direct
    is_bare, written_of = arguments.is_bare, arguments.written_of
    reads, read_of = arguments.reads, arguments.read_of
    undonated_of, donated_of, shardings = (
        arguments.undonated_of,
        arguments.donated_of,
        entry.shardings,
    )
    get_cell = _get_device_cell if shardings is None else _get_cell

    def call(entry: Entry, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read_cells: Sequence[list[Buffer]] = ()
        try:
            written = flat if is_bare else written_of(flat)
            cells = [*map(get_cell, written)]
            if reads:
                read_cells = [*map(_get_cell, read_of(flat))]
            if shardings is not None and [*map(_get_sharding, written)] != shardings:
                raise RefsDiffer
        except AttributeError:  # Some are no refs of ours, or lie on other devices.
            raise RefsDiffer from None
        try:
            if is_bare:
                rest = exchange(cells, compiled)
            else:
                read_buffers: list[Buffer] = []
                operands = read_buffers if reads else (), undonated_of(flat), donated_of(flat)
                rest = exchange(cells, compiled, operands, read_cells, read_buffers)
        except BaseException as error:
            after_failure(entry, error, flat)
            raise
        return rest if is_direct else entry.result(rest, flat)

    return call


def after_failure(entry: Entry, error: BaseException, flat: list[Any]) -> None:
    """Cleans up after a call that has failed, when the buffers are back in their cells.

    Raises:
      Busy: if a ref's buffer was deleted. The retry raises the RefStateError that names the ref.
      RefsDiffer: if refs have been moved to where an argument lies now.
      RefValueError: if arguments and refs don't lie on the same devices.
    """
    if isinstance(error, RETRY):
        return
    touched = entry.arguments.refs_of(flat)
    is_elsewhere = _jax.what_is_said(error) == "incompatible devices"
    if is_elsewhere and go_along(touched, flat):
        raise RefsDiffer from None
    lost = (x.is_deleted() for ref in touched for x in [*ref._cell])
    if _jax.is_about_deleted(error) and any(lost):
        raise Busy from None
    entry.note_failure(repr(error), entry.arguments.written_of(flat))
    prepare(entry)
    if is_elsewhere:
        with devices_told(f"a call of `{entry.name}`", touched, flat):
            raise error


def carefully(
    entry: Entry,
    flat: list[Any],
    compiled: Callable[..., Any] | None = None,
    is_debugging: bool = False,
) -> PyTree:
    """A call whose program can fail, or touches JAX's own handles; and a program's first call.

    XLA consumes donated buffers even if the program then fails: so values that could be lost are
    copied. While JAX looks for NaNs (`is_debugging`), it runs a program that has made some a second
    time: then nothing is donated. `compiled` is a program that was compiled ahead of time.
    """
    executable = entry.executable
    written, read = entry.arguments.written_of(flat), [*entry.arguments.read_of(flat)]
    copied = [] if is_debugging else entry.copied

    # Whether all old values still exist when the program has run.
    keeps_olds = is_debugging or len(copied) == len(written)
    run = compiled or (executable.compiled_undonated if is_debugging else executable.compiled)
    failed: list[str] = []  # not the errors: their tracebacks hold this frame, and so the refs

    def call(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[list[Buffer], Any]:
        if any(x.is_deleted() for x in (*held, *read_buffers)):
            raise Busy  # A value is lost: waiting raises the error for it.
        olds, results = [*held], []  # type: ignore[var-annotated]
        copies = _copies([held[k] for k in copied]) if copied else ()
        for k, copy in zip(copied, copies, strict=True):
            olds[k] = copy
        operands, has_olds = executable.operands(flat, held, read_buffers), keeps_olds
        if compiled and not entry.can_fail:
            defer()  # It may be JAX's Python code that runs it.

        def keep_olds() -> None:
            nonlocal has_olds
            if not has_olds:
                olds[:] = _copies(held)
                has_olds = True

        before_python.calls.append(keep_olds)
        before = _jax.callbacks_so_far()
        try:
            results += starmap(run, (operands,))
            held[:] = results[0][0]
            _jax.finish(results, before)
            if is_debugging:
                # An operand that isn't donated may come back as it is, even twice.
                held[:] = _copies(held)
        except BaseException as error:
            if results and not has_olds and not isinstance(error, Exception):
                # An interrupt while waiting: the old values are gone, the new ones come.
                raise  # pragma: no cover, the processes that are interrupted aren't measured
            held[:] = olds
            if isinstance(error, RETRY):
                raise
            if _jax.is_about_deleted(error) and any(x.is_deleted() for x in read_buffers):
                raise Busy from None  # pragma: no cover, another thread has written it meanwhile
            failure = failure_of(error)
            failed.append(repr(failure.error if failure else error))
            if failure is None:
                raise
            # A ref without a copy was given to the callback that failed. Only refs of ours can be.
            lost = {}
            if not is_debugging:  # Nothing is lost where nothing is donated.
                numbers = entry.transaction.numbers
                lost = {numbers[n]: x for n, x in failure.held.items() if n in numbers}
            saved = [*filterfalse(copied.__contains__, lost)]
            for k in saved:
                held[k] = jnp.array(lost[k])
            raise_failure(failure, [written[k] for k in saved])
        finally:
            before_python.calls.pop()
        return held, results[0][1]

    try:
        rest = exchange_refs(written, read, call, entry.can_fail)
    except BaseException as error:
        if failed:
            entry.note_failure(failed[0], written)
            prepare(entry)
            _note_other_processes(error, written)
        raise
    return entry.result(rest, flat)


def _note_other_processes(error: BaseException, written: Sequence[RefLike]) -> None:
    shared = [ref for ref in written if is_ours(ref) and not ref.is_fully_addressable]
    if shared:
        error.add_note(
            f"This is what happened in process {jax.process_index()}: its parts of "
            f"{', '.join(map(describe, shared))} keep their old values. Other processes, in which "
            "nothing failed, have written theirs, or wait in a collective for this one. End all "
            "processes, and start them again from a checkpoint. What can fail in one of them, a "
            "callback for instance, must not raise: let it return whether it succeeded, and write "
            "only if it has in all"
        )


@jax.jit
def _copies(arrays: list[Value]) -> list[Value]:
    return [jnp.copy(x) for x in arrays]
