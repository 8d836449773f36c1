"""The programs of `callbacks.py`: two NumPy functions, and the ways to call each from JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

import refs

# -- Programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """An update of an array, once a step, in three forms.

    Attributes:
      title: the program's.
      touch: (array, number of the step) -> None; in place, on NumPy.
      value: the same, for callbacks that are given a value and return a new one.
      by_hand: the same in jnp, without a callback, of (array, number of the step, *given).
      given: arrays that are on the device from the start.
    """

    title: str
    touch: Callable[[Any, Any], None]
    value: Callable[[Any, Any], Any]
    by_hand: Callable[..., Any]
    given: tuple[Any, ...] = ()


def one_element(n: int) -> Program:
    def touch(x: Any, k: Any) -> None:
        x[int(k) * 7919 % n] += 1  # not the same cache line each time

    def value(x: Any, k: Any) -> Any:
        new = np.array(x)
        touch(new, k)
        return new

    return Program("one element", touch, value, lambda x, k: x.at[k * 7919 % n].add(1))


def whole_buffer(n: int) -> Program:
    # All pages are written to: untouched pages would take no memory, nor time to read.
    frames = np.stack([np.arange(n, dtype=np.float32) % 97 + shift for shift in (0, 1)])

    def touch(x: Any, k: Any) -> None:
        x[...] = frames[int(k) % 2]

    return Program(
        "whole buffer",
        touch,
        lambda x, k: frames[int(k) % 2],
        lambda x, k, on_device: x.at[...].set(on_device[k % 2]),
        (jnp.asarray(frames),),
    )


PROGRAMS = {"one element": one_element, "whole buffer": whole_buffer}


def watched(program: Program, seen: list[int]) -> Program:
    """The same program, with callbacks that append the address of their memory to `seen`."""

    def touch(x: Any, k: Any) -> None:
        seen.append(x.ctypes.data)
        program.touch(x, k)

    def value(x: Any, k: Any) -> Any:
        seen.append(np.asarray(x).ctypes.data)
        return program.value(x, k)

    return replace(program, touch=touch, value=value)


# -- Ways -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way of calling, on state of its own: float32 zeros at first.

    Attributes:
      step: number of the step -> None; updates the state by a call at top level, and waits for it.
      loop: (number of the first step, how many) -> None; the steps in a `fori_loop`.
      state: () -> the array of shape `[n]`, or the ref that holds it.
    """

    step: Callable[[int], None]
    loop: Callable[[int, int], None] | None
    state: Callable[[], Any]


def jitted_refs(program: Program, n: int) -> Way:
    """`refs.io_callback` under `refs.jit`."""
    state = refs.new_ref(jnp.zeros(n, jnp.float32))

    @refs.jit
    def step(state: Any, k: Any) -> Any:
        refs.io_callback(program.touch, None, state, k)
        return jnp.int32(0)  # to wait for

    @refs.jit
    def loop(state: Any, k: Any, n_steps: Any) -> Any:
        def body(i: Any, _: Any) -> None:
            refs.io_callback(program.touch, None, state, i)

        lax.fori_loop(k, k + n_steps, body, None)
        return jnp.int32(0)

    return Way(
        lambda k: step(state, np.int32(k)).block_until_ready(),
        lambda k, n_steps: loop(state, np.int32(k), np.int32(n_steps)).block_until_ready(),
        lambda: state,
    )


def eager_refs(program: Program, n: int) -> Way:
    """`refs.io_callback` at top level, which returns after the callback has."""
    state = refs.new_ref(jnp.zeros(n, jnp.float32))
    return Way(
        lambda k: refs.io_callback(program.touch, None, state, np.int32(k)), None, lambda: state
    )


def threaded(function: Callable[..., Any], n: int, given: tuple[Any, ...] = ()) -> Way:
    """`function(state, k, *given) -> state` under a `jax.jit` that donates the state."""
    state = jnp.zeros(n, jnp.float32)
    compiled_step = jax.jit(function, donate_argnums=0)

    @functools.partial(jax.jit, donate_argnums=0)
    def compiled_loop(state: Any, k: Any, n_steps: Any, *given: Any) -> Any:
        return lax.fori_loop(k, k + n_steps, lambda i, state: function(state, i, *given), state)

    def step(k: int) -> None:
        nonlocal state
        state = compiled_step(state, np.int32(k), *given).block_until_ready()

    def loop(k: int, n_steps: int) -> None:
        nonlocal state
        new = compiled_loop(state, np.int32(k), np.int32(n_steps), *given)
        state = new.block_until_ready()

    return Way(step, loop, lambda: state)


def by_value(callback: Callable[..., Any], program: Program, n: int) -> Way:
    """`jax.pure_callback` or `io_callback`: the callback gets a value and returns a new one."""
    kind = jax.ShapeDtypeStruct((n,), jnp.float32)
    return threaded(lambda x, k: callback(program.value, kind, x, k), n)


def on_buffers(program: Program, n: int) -> Way:
    """`buffer_callback`, with its result in the memory of its first argument."""

    def touch(_: Any, out: Any, x: Any, k: Any) -> None:
        program.touch(np.asarray(out), np.asarray(k))

    kind = jax.ShapeDtypeStruct((n,), jnp.float32)
    return threaded(buffer_callback(touch, kind, input_output_aliases={0: 0}), n)


OURS, EAGER, PURE, BY_HAND = "refs.jit", "refs,\neager", "jax.\npure_callback", "jnp,\nby hand"
BUFFERS = "jax.\nbuffer_callback"
WAYS: dict[str, Callable[[Program, int], Way]] = {
    OURS: jitted_refs,
    EAGER: eager_refs,
    PURE: functools.partial(by_value, jax.pure_callback),
    "jax.\nio_callback": functools.partial(by_value, io_callback),
    BUFFERS: on_buffers,
    BY_HAND: lambda program, n: threaded(program.by_hand, n, program.given),
}

# -- The values that all ways must agree on -------------------------------------------------------

CHECKED = 3  # steps at top level, and as many in a loop


def checked(program: Program, n: int) -> dict[str, Way]:
    """The ways, after some steps of each; checks that the state is the one that NumPy gets."""
    expected = np.zeros(n, np.float32)
    found = {name: make(program, n) for name, make in WAYS.items()}
    for k in range(2 * CHECKED):
        program.touch(expected, k)
    for name, way in found.items():
        for k in range(CHECKED):
            way.step(k)
        if way.loop is not None:
            way.loop(CHECKED, CHECKED)
        else:
            for k in range(CHECKED, 2 * CHECKED):
                way.step(k)
        message = f"{program.title}, {name}, {n} elements"
        np.testing.assert_array_equal(np.asarray(way.state()[...]), expected, err_msg=message)
    return found


# -- Memory: the state's own, or a copy -----------------------------------------------------------


def pointers(make: Callable[[Program, int], Way], program: Program, n: int) -> tuple[bool, ...]:
    """Whether a step at top level, and each of three in a loop, were in the state's own memory.

    That is: the memory given to the callbacks, and the state before and after, have one address.
    Without a callback, only the last two are compared.
    """
    seen: list[int] = []
    way = make(watched(program, seen), n)
    calls = [lambda: way.step(0)]
    if way.loop is not None:
        calls.append(lambda: way.loop(1, 3))  # type: ignore[misc]
    found = []
    for call in calls:
        call()  # compiled, and not a first call any more
        seen.clear()
        before = way.state().unsafe_buffer_pointer()
        call()
        found.append({before} == {*seen, way.state().unsafe_buffer_pointer()})
    return tuple(found)
