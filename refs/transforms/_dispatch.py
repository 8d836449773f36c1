"""How a compiled function is called: fast, and such that nothing is ever lost.

A call takes the buffers of the refs that it writes, gives them to XLA and puts the new ones in
their place. `refs._store` has the rule for what an interrupt may come between, and it holds here:
no statement may be added between those that take, call and put. Whatever is slow, looking up
arguments of a new kind or waiting for another thread, `Programs.settle` does, and the call begins
again. Programs that can fail while they run go through `run_carefully`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import chain, compress, count, filterfalse, repeat
from operator import getitem
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from refs import _holders, _jax, _store
from refs._eager import is_ours, update_native
from refs._signals import without_signals
from refs._store import Store, are_left, first, get_box, get_store, get_token
from refs._together import alone, together
from refs.callbacks._failure import failure_of, raise_failure
from refs.transforms._entry import Entry, OtherRefs, OtherTypes

if TYPE_CHECKING:
    from refs.transforms._programs import Programs


class NoEntry:
    """Stands for the entry of a call that has none yet, or none that is found quickly."""

    static = None
    is_bare = is_alone = is_special = is_plain = reads = False

    @staticmethod
    def flatten(tree: Any) -> list[Any]:
        raise ValueError

    @staticmethod
    def written_of(flat: list[Any]) -> Any:
        raise OtherRefs


def dispatcher(programs: Programs) -> Callable[..., Any]:
    """The function that users call: it runs the program that fits the arguments."""
    trace_state, eval_trace = _jax.trace_state, _jax.eval_trace
    nans, infs = _jax.debug_nans, _jax.debug_infs
    has_static, instances, reading = programs.has_static, programs.instances, _holders.reading
    inline: Any = NoEntry  # the program, while there is only one

    def forget() -> None:
        nonlocal inline
        inline = NoEntry

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inline
        if trace_state.value is not eval_trace or nans.value or infs.value or reading:
            return programs.call_otherwise(args, kwargs)
        entry: Any = inline
        static, rest_args, rest_kwargs = None, args, kwargs
        if has_static:
            static, rest_args, rest_kwargs = programs.take_static(args, kwargs, entry.static)
            entry = entry if entry.static == static else NoEntry
        try:
            flat = entry.flatten((rest_args, rest_kwargs))
        except ValueError:
            if instances and args and id(args[0]) in instances:
                return instances[id(args[0])](*args[1:], **kwargs)
            entry, flat = programs.find(static, rest_args, rest_kwargs)
        if entry.is_special:
            try:
                if entry.is_plain:
                    result = entry.compiled(*args, **kwargs)
                    inline = entry if entry.is_alone else NoEntry
                    return result
                if not entry.is_careful:
                    for result in run_apart(entry, flat):
                        return result
                elif entry.may_repeat(flat):
                    return run_carefully(entry, flat)
            except (OtherRefs, OtherTypes):
                pass  # It is for other arguments.
            entry = NoEntry
        attempt = misses = 0
        while True:
            looking, leave = None, ()
            if entry.reads:
                leave = map(list.pop, looking := [])
            try:
                written = flat if entry.is_bare else entry.written_of(flat)
                store = written[0]._store if written else Store.of([])
                box = store.box
                buffers = box[0]
                del box[0]
            except (AttributeError, IndexError, OtherRefs):
                pass  # An empty box, or other arguments than this entry is for.
            else:
                state = None
                operands: Any = None
                try:
                    holding = box
                    if (
                        (store.readers and not are_left([store]))
                        or store.shardings != entry.shardings
                        or (
                            store.size != 1
                            if entry.is_single
                            else [*map(get_token, written)] != store.tokens
                        )
                    ):
                        box += (buffers,)
                    elif entry.is_bare:
                        operands = ()
                        [(state, rest)] = [*map(entry.compiled, (buffers,))]
                        box += (state,)
                    else:
                        read = entry.look(flat, looking) if entry.reads else ()
                        operands = (read,), (entry.kept_of(flat),), (entry.donated_of(flat),)
                        [(state, rest)] = [*map(entry.compiled, (buffers,), *operands)]
                        box += (state,)
                        _ = [*leave]
                except BaseException as error:
                    box += (buffers,)
                    _ = [*leave]
                    holding = None
                    misses += isinstance(error, OtherTypes)
                    if misses > 3 or not entry.may_run_again(error, written, buffers, operands):
                        raise
                    state = None
                holding = buffers = looking = None  # noqa: F841
                if state is not None:
                    if entry is not inline:
                        inline = entry if entry.is_alone else NoEntry
                    return rest if entry.is_direct else entry.result(rest, flat)
            if _jax.is_jit_disabled():
                return programs.call_otherwise(args, kwargs)
            inline = NoEntry
            if (bound := programs.of_instance(args)) is not None:
                return bound(*args[1:], **kwargs)
            entry, flat = programs.settle(static, rest_args, rest_kwargs)
            if entry.is_plain:
                inline = entry if entry.is_alone else NoEntry
                return entry.run(args, kwargs)
            if entry.is_careful:
                inline = entry if entry.is_alone else NoEntry
                return run_carefully(entry, flat)
            if not entry.is_warm:
                return without_signals(functools.partial(run_carefully, entry, flat))
            if entry.is_special:
                inline = entry if entry.is_alone else NoEntry
                for result in run_apart(entry, flat):
                    return result
            if attempt:
                _store.wait(attempt, entry.refs_of(flat))
            attempt += 1

    programs.forget = forget
    return call


def run_apart(entry: Entry, flat: list[Any]) -> Sequence[Any]:
    """A call whose refs lie in several stores: its result, or nothing where they aren't to be had.

    It takes what all stores hold, or nothing, and puts all of it back in one statement each.
    """
    layout, written = entry.layout, entry.written_of(flat)
    if layout is None:
        return ()
    stores = [*map(get_store, layout.leaders(written))]
    if len({*stores}) < len(stores):
        return ()
    boxes = [*map(get_box, stores)]
    held: list[Any] = []
    results: list[Any] = []
    call: Any = operator.call
    news = map(call, layout.pieces, map(first, map(first, repeat(results))))
    put = map(list.append, boxes, map(list, news))
    put_back = map(list.append, boxes, held)
    looking: Any = []
    leave = map(list.pop, looking)
    take = chain(map(first, boxes), map(list.clear, boxes))
    try:
        held += take
    except IndexError:
        return ()  # One is empty: and nothing was taken.
    state: Any = ()
    operands = constants = None
    try:
        holding = boxes
        if not (are_left(stores) and layout.fits(written, stores)):
            _ = [*put_back]
            return ()
        state = [*layout.state([*chain.from_iterable(held[: len(boxes)])])]
        constants = entry.look(flat, looking) if entry.reads else []
        operands = entry.operands(flat, state, constants)
        results += map(entry.compiled, *zip(operands, strict=True))
        _ = [*put]
        _ = [*leave]
    except BaseException as error:
        _ = [*put_back]
        _ = [*leave]
        holding = looking = None
        if not entry.may_run_again(error, written, state, operands and [[constants]]):
            raise
        return ()
    holding = None  # noqa: F841
    [(_, rest)] = results
    return (rest if entry.is_direct else entry.result(rest, flat),)


def run_carefully(
    entry: Entry, flat: list[Any], compiled: Any = None, is_debugging: bool = False
) -> Any:
    """A call whose program can fail, or touches JAX's own handles; and a program's first call.

    XLA consumes what is donated even if the program then fails, so we keep copies. While one looks
    for NaNs, JAX runs a program that has made some a second time: then nothing is donated.
    """
    compiled = compiled or (entry.compiled_kept if is_debugging else entry.compiled)
    written = entry.written_of(flat)
    read = [*entry.read_of(flat)]

    def run(
        state: list[Any], constants: list[Any], lists: list[Any], indices: list[Any], leave: Any
    ) -> Any:
        calls_back = entry.can_fail  # noqa: F841  by which `refs._holders` knows us
        operands = entry.operands(flat, state, constants)
        kept = [] if is_debugging else entry.copied
        copies = _copies([state[k] for k in kept]) if kept else []
        saved = dict(zip(kept, copies, strict=True))
        results: list[Any] = []
        places = [*compress(count(), map(is_ours, written))]
        news = map(getitem, map(first, map(first, repeat(results))), places)
        place = map(list.__setitem__, lists, indices, news)
        olds = map(saved.get, places, map(state.__getitem__, places))
        restore = map(list.__setitem__, lists, indices, olds)
        try:
            results += map(compiled, *zip(operands, strict=True))
            _ = [*leave]
            jax.block_until_ready(results)
            if is_debugging:
                # What isn't donated may come back as it is, twice even.
                results[0] = (_copies(results[0][0]), results[0][1])
        except BaseException as error:
            if results and len(kept) < len(written) and not isinstance(error, Exception):
                # An interrupt while we waited: there is no way back any more, but one ahead.
                _ = [*place]
                raise
            _ = [*restore]
            store_native([saved.get(k, x) for k, x in enumerate(state)])
            if (failure := failure_of(error)) is not None:
                # What wasn't copied was in its callback's hands; and so all refs are ours.
                lost = () if is_debugging else failure.held  # Nothing is, where nothing is donated.
                held = [*filterfalse(saved.__contains__, lost)]
                for k in held:
                    lists[k][indices[k]] = jnp.array(failure.held[k])
                entry.note_failure(failure.error, written)
                raise_failure(failure, [written[k] for k in held])
            if isinstance(error, OtherTypes) or not entry.may_run_again(
                error, written, state, [[constants]]
            ):
                raise
            return None
        _ = [*place]
        store_native(results[0][0])
        return results[0]

    def store_native(state: list[Any]) -> None:
        for r, buffer in zip(written, state, strict=True):
            if not is_ours(r):
                update_native(r, buffer)

    key = id(read)
    no_more = map(_holders.reading.pop, (key,), (None,))
    try:
        if entry.can_fail and read:
            _holders.reading[key] = read
        alone(written)
        _, rest = together(written, read, run, entry.can_fail)
        entry.is_warm = entry.is_warm or compiled is entry.compiled
        return entry.result(rest, flat)
    finally:
        _ = [*no_more]


@jax.jit
def _copies(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(x) for x in arrays]
