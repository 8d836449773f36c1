"""How a program is run: quickly, or carefully where a value could be lost.

Both exchange the refs' buffers for the program's outputs (`refs._buffers.exchange`). A call that a
program isn't for is a `MISS`: the dispatcher looks for another one.
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
from refs._buffers.several import exchange_refs
from refs._buffers.signals import defer
from refs._buffers.stores import store_of
from refs._callbacks.failure import failure_of, raise_failure
from refs._handles.access import describe
from refs._handles.resharding import go_along
from refs._jit.plain import Plain
from refs._jit.program import MISS, Program, TypesDiffer, of_thread
from refs._types import Buffer, PyTree, RefLike, Value

_get_cell_alone = attrgetter("_cell_alone")
_get_cell = attrgetter("_store.cell")
_get_layout = attrgetter("_store.layout")


def quick_call(program: Program | Plain, is_one_of_many: bool) -> Callable[..., Any]:
    """The call of a program on arguments whose structure fits, but perhaps neither types nor refs.

    It takes the program as an argument and doesn't close over it: the program holds it, and that
    would be a cycle. `is_one_of_many`: whether there are programs for other types. JAX would notice
    those, too, but it takes long. The call raises Busy if a buffer isn't available.
    """
    if not is_one_of_many:
        return _call_plain if isinstance(program, Plain) else _call_of(program)
    call = _call_plain if isinstance(program, Plain) else _call_of(program)

    def call_if_known(program: Any, flat: list[Any], args: Any, kwargs: Any) -> Any:
        try:
            is_known = program.types_of(flat) in program.types
        except (TypeError, OverflowError):  # something that is no array
            return MISS
        return call(program, flat, args, kwargs) if is_known else MISS

    return call_if_known


def _call_plain(
    program: Plain, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return program.compiled(*args, **kwargs)
    except TypesDiffer:
        return MISS


def _call_of(program: Program) -> Callable[..., Any]:
    operands, compiled, is_direct = program.operands, program.compiled, program.is_direct
    written_of, read_of, is_read = operands.written_of, operands.read_of, operands.is_read
    arrays_of, layouts = operands.arrays_of, operands.packing.layouts
    get_cell = _get_cell if layouts else _get_cell_alone
    is_of_one = program.n_written == 1 and not (is_read or layouts or len(arrays_of) > 1)
    arrays_of_one = arrays_of[0] if arrays_of else None

    def call_one(program: Program, flat: list[Any], args: Any, kwargs: Any) -> Any:
        try:
            cell = written_of(flat)[0]._cell_alone
        except (AttributeError, TypeError):  # Another ref, or None.
            return MISS
        try:
            if arrays_of_one is None:
                rest = exchange_one(cell, compiled)
            else:
                rest = exchange_one(cell, compiled, arrays_of_one(flat))
        except BaseException as error:
            if is_retried(program, error, flat):
                return MISS
            raise
        return rest if is_direct else program.result(rest, flat)

    def call_several(program: Program, flat: list[Any], args: Any, kwargs: Any) -> Any:
        read_cells: Sequence[list[Buffer]] = ()
        read_buffers: list[Buffer] = []
        written = written_of(flat)
        try:
            cells = [*map(get_cell, written)]
            if is_read:
                read = read_of(flat)
                read_cells = [*map(get_cell, read)]
            if layouts:
                touched = [*written, *read] if is_read else written
                if [*map(_get_layout, touched)] != layouts:
                    return MISS
        except (AttributeError, TypeError):  # Some are no refs of ours, or of another layout; None.
            return MISS
        given = [pick(flat) for pick in arrays_of]
        if is_read:
            given.insert(0, read_buffers)
        try:
            rest = exchange(cells, compiled, tuple(given), read_cells, read_buffers)
        except BaseException as error:
            if is_retried(program, error, flat):
                return MISS
            raise
        return rest if is_direct else program.result(rest, flat)

    def call_carefully(program: Program, flat: list[Any], args: Any, kwargs: Any) -> Any:
        if not operands.are_alike(flat):
            return MISS
        try:
            return carefully(program, flat)
        except TypesDiffer:
            return MISS

    if program.is_careful:
        return call_carefully
    return call_one if is_of_one else call_several


def is_retried(program: Program, error: BaseException, flat: list[Any]) -> bool:
    """Cleans up after a call that has failed, when the buffers are back in their cells.

    Returns whether the call is to be made again, with another program. (Busy is raised: it is to be
    made with the same one, when the buffers are back.)

    Raises:
      RefValueError: if arguments and refs don't lie on the same devices.
    """
    if isinstance(error, Busy):
        return False
    if isinstance(error, TypesDiffer):
        program.forget_fast_path()
        return True
    touched = program.operands.refs_of(flat)
    is_elsewhere = _jax.what_is_said(error) == "incompatible devices"
    if is_elsewhere and go_along(touched, flat):
        return True
    if _jax.is_about_deleted(error) and any(store_of(ref).is_lost for ref in touched):
        return True  # The retry raises the error that names the ref.
    program.note_failure(repr(error), program.operands.written_of(flat))
    if is_elsewhere:
        with devices_told(f"a call of `{program.name}`", touched, flat):
            raise error
    return False


def carefully(
    program: Program,
    flat: list[Any],
    compiled: Callable[..., Any] | None = None,
    is_debugging: bool = False,
) -> PyTree:
    """A call whose program can fail, or touches JAX's own handles; and a program's first call.

    XLA consumes donated buffers even if the program then fails: so values that could be lost are
    copied. While JAX looks for NaNs (`is_debugging`), it runs a program that has made some a second
    time: then nothing is donated. `compiled` is a program that was compiled ahead of time.
    """
    written, read = program.operands.written_of(flat), [*program.operands.read_of(flat)]
    copied = [] if is_debugging else program.copied

    # Whether all old values still exist when the program has run.
    keeps_olds = is_debugging or len(copied) == len(written)
    run = compiled or (program.compiled_undonated if is_debugging else program.compiled)
    failed: list[str] = []  # not the errors: their tracebacks hold this frame, and so the refs

    def call(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[list[Buffer], Any]:
        if any(x.is_deleted() for x in (*held, *read_buffers)):
            raise Busy  # A value is lost: waiting raises the error for it.
        olds, results = [*held], []  # type: ignore[var-annotated]
        copies = _copies([held[k] for k in copied]) if copied else ()
        for k, copy in zip(copied, copies, strict=True):
            olds[k] = copy
        operands, has_olds = program.operands.of(flat, held, read_buffers), keeps_olds
        if compiled and not program.can_fail:
            defer()  # It may be JAX's Python code that runs it.

        def keep_olds() -> None:
            nonlocal has_olds
            if not has_olds:
                olds[:] = _copies(held)
                has_olds = True

        before = _jax.callbacks_so_far()
        of_thread.before.append(keep_olds)
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
            if isinstance(error, Busy | TypesDiffer):
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
                numbers = program.numbers
                lost = {numbers[n]: x for n, x in failure.held.items() if n in numbers}
            saved = [*filterfalse(copied.__contains__, lost)]
            for k in saved:
                held[k] = jnp.array(lost[k])
            try:
                raise_failure(failure, [written[k] for k in saved])
            finally:
                del failure  # Its traceback holds this frame, and so the refs.
        finally:
            of_thread.before.pop()
        return held, results[0][1]

    try:
        rest = exchange_refs(written, read, call, program.can_fail)
    except BaseException as error:
        if failed:
            program.note_failure(failed[0], written)
            _note_other_processes(error, written)
        raise
    return program.result(rest, flat)


def _note_other_processes(error: BaseException, written: Sequence[RefLike]) -> None:
    shared = [ref for ref in written if not ref.sharding.is_fully_addressable]
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
