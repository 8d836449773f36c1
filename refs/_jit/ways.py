"""The ways to call a compiled form: quickly, or carefully where something could be lost.

Each exchanges the refs' buffers for what the program makes of them (`refs._buffers.exchange`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._buffers.exchange import Busy, exchange, exchange_one
from refs._buffers.several import exchange_refs
from refs._buffers.signals import without_signals
from refs._callbacks.failure import failure_of, raise_failure
from refs._jit.arguments import RefsDiffer
from refs._jit.entry import Entry
from refs._jit.executable import TypesDiffer
from refs._types import Value

# Raised when a call must be retried: with another compiled form (RefsDiffer, TypesDiffer), or once
# the buffers are free (Busy).
RETRY = (Busy, RefsDiffer, TypesDiffer)

_get_cell = attrgetter("_cell")
_get_device_cell = attrgetter("_device_cell")
_get_sharding = attrgetter("_sharding")


def prepare(entry: Entry) -> None:
    """Sets how an entry is called next: before its first run, and after a failure."""
    entry.call, entry.run = _unknown, _careful if entry.is_careful else _first


# A way takes the entry as an argument and doesn't close over it: the entry holds the way, and that
# would be a cycle.


def _unknown(entry: Entry, flat: list[Any], args: Any, kwargs: Any) -> Any:
    raise RefsDiffer


def _first(entry: Entry, flat: list[Any], args: Any, kwargs: Any) -> Any:
    # JAX's Python code has the results in its hands for a while: an interrupt would lose them.
    result = without_signals(functools.partial(carefully, entry, flat))
    entry.call = entry.run = _quickly(entry)
    return result


def _careful(entry: Entry, flat: list[Any], args: Any, kwargs: Any) -> Any:
    result = carefully(entry, flat)
    entry.call = _careful_if_known
    return result


def _careful_if_known(entry: Entry, flat: list[Any], args: Any, kwargs: Any) -> Any:
    entry.arguments.check_alike(flat)
    return carefully(entry, flat)


def _quickly(entry: Entry) -> Callable[..., Any]:
    """The way for programs that can't fail while they run, over refs of ours."""
    is_one = len(entry.transaction.written) == 1 and not entry.arguments.reads
    return _over_one(entry) if is_one and entry.shardings is None else _over_several(entry)


def _over_one(entry: Entry) -> Callable[..., Any]:
    arguments, compiled, is_direct = entry.arguments, entry.executable.compiled, entry.is_direct
    is_bare, written_of = arguments.is_bare, arguments.written_of
    undonated_of, donated_of = arguments.undonated_of, arguments.donated_of

    def call(entry: Entry, flat: list[Any], args: Any, kwargs: Any) -> Any:
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

    def call(entry: Entry, flat: list[Any], args: Any, kwargs: Any) -> Any:
        read_cells: Sequence[Any] = ()
        try:
            written = flat if is_bare else written_of(flat)
            cells = [*map(get_cell, written)]
            if reads:
                read_cells = [*map(_get_cell, read_of(flat))]
            if shardings is not None and [*map(_get_sharding, written)] != shardings:
                raise RefsDiffer
        except AttributeError:  # They are no refs of ours, or lie on other devices.
            raise RefsDiffer from None
        try:
            if is_bare:
                rest = exchange(cells, compiled)
            else:
                read_buffers: list[Any] = []
                operands = read_buffers if reads else (), undonated_of(flat), donated_of(flat)
                rest = exchange(cells, compiled, operands, read_cells, read_buffers)
        except BaseException as error:
            after_failure(entry, error, flat)
            raise
        return rest if is_direct else entry.result(rest, flat)

    return call


def after_failure(entry: Entry, error: BaseException, flat: list[Any]) -> None:
    """What is to be done when a call has failed, all of its refs being back in their cells.

    Raises:
      Busy: if a ref's buffer was deleted. The retry raises the RefStateError that names the ref.
    """
    if isinstance(error, RETRY):
        return
    lost = (x.is_deleted() for ref in entry.arguments.refs_of(flat) for x in [*ref._cell])
    if _jax.is_about_deleted(error) and any(lost):
        raise Busy from None
    entry.note_failure(repr(error), entry.arguments.written_of(flat))
    prepare(entry)


def carefully(
    entry: Entry, flat: list[Any], compiled: Any = None, is_debugging: bool = False
) -> Any:
    """A call whose program can fail, or touches JAX's own handles; and a program's first call.

    XLA consumes what is donated even if the program then fails: so there are copies of what could
    be lost. While one looks for NaNs, JAX runs a program that has made some a second time: then
    nothing is donated. A program that was compiled ahead of time is given as `compiled`.
    """
    executable = entry.executable
    compiled = compiled or (executable.compiled_undonated if is_debugging else executable.compiled)
    written, read = entry.arguments.written_of(flat), [*entry.arguments.read_of(flat)]
    copied = [] if is_debugging else entry.copied

    has_olds = is_debugging or len(copied) == len(written)  # when the program has run
    failed: list[str] = []  # not the error: it would hold itself, and the refs

    def call(held: list[Any], read_buffers: list[Any]) -> Any:
        if any(x.is_deleted() for x in (*held, *read_buffers)):
            raise Busy  # A value is lost, which waiting says.
        olds, results = [*held], []  # type: ignore[var-annotated]
        copies = _copies([held[k] for k in copied]) if copied else ()
        for k, copy in zip(copied, copies, strict=True):
            olds[k] = copy
        operands = executable.operands(flat, held, read_buffers)
        try:
            results += starmap(compiled, (operands,))
            held[:] = results[0][0]
            jax.block_until_ready(results)
            if is_debugging:
                # What isn't donated may come back as it is, twice even.
                held[:] = _copies(held)
        except BaseException as error:
            if results and not has_olds and not isinstance(error, Exception):
                raise  # An interrupt while we waited. The old values are gone, the new ones come.
            held[:] = olds
            if isinstance(error, RETRY):
                raise
            if _jax.is_about_deleted(error) and any(x.is_deleted() for x in read_buffers):
                raise Busy from None  # Another thread has written it meanwhile.
            failure = failure_of(error)
            failed.append(repr(failure.error if failure else error))
            if failure is None:
                raise
            # What wasn't copied was in its callback's hands; and so all refs are ours.
            lost = {} if is_debugging else failure.held  # Nothing is, where nothing is donated.
            saved = [k for k in lost if k not in copied]
            for k in saved:
                held[k] = jnp.array(lost[k])
            raise_failure(failure, [written[k] for k in saved])
        return held, results[0][1]

    try:
        rest = exchange_refs(written, read, call, entry.can_fail)
    except BaseException:
        if failed:
            entry.note_failure(failed[0], written)
            prepare(entry)
        raise
    return entry.result(rest, flat)


@jax.jit
def _copies(arrays: list[Value]) -> list[Any]:
    return [jnp.copy(x) for x in arrays]
