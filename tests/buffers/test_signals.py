"""Signals that wait for the end of an exchange: none is lost, and all handlers come back."""

import signal
import types

import jax
import jax.numpy as jnp
import pytest

import refs
from refs._buffers import exchange, signals
from tests.faults.harness import OnPurpose

NUMBERS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT


@pytest.fixture
def handled():
    """The numbers of the signals that were handled. SIGUSR1's handler and SIGINT's raise."""
    found = []

    def fails(number, _):
        found.append(number)
        raise OnPurpose

    def interrupts(number, _):
        found.append(number)
        raise KeyboardInterrupt

    handlers = fails, lambda number, _: found.append(number), interrupts
    before = [*map(signal.signal, NUMBERS, handlers)]
    yield found
    assert [*map(signal.getsignal, NUMBERS)] == [*handlers]
    assert not signals.deferred
    [*map(signal.signal, NUMBERS, before)]


def raise_all(held):
    signals.defer()
    signals.defer()  # once more, by another program in the same exchange
    for number in NUMBERS:
        signal.raise_signal(number)
    return [x + 1 for x in held], None


@pytest.mark.parametrize("n", [1, 2])
def test_all_are_handled_at_the_end(handled, n):
    cells = [[k] for k in range(n)]
    with pytest.raises((OnPurpose, KeyboardInterrupt)):
        exchange.exchange(cells, raise_all) if n > 1 else exchange.exchange_one(*cells, raise_all)
    assert cells == [[k + 1] for k in range(n)]
    assert sorted(handled) == sorted(NUMBERS)


def test_they_wait_for_the_exchange_around(handled):
    def outer(held):
        signals.defer()
        exchange.exchange_one([5], raise_all)
        assert not handled
        return held, None

    with pytest.raises((OnPurpose, KeyboardInterrupt)):
        exchange.exchange_one([1], outer)
    assert sorted(handled) == sorted(NUMBERS)


@pytest.mark.parametrize("k", range(3))
def test_a_handler_that_raises_while_the_others_are_put_back(handled, monkeypatch, k):
    put_back = []

    def put(number, handler):
        put_back.append(number)
        if len(put_back) == k + 1:
            raise OnPurpose  # as `signal.signal` does before it does anything
        return signal.signal(number, handler)

    def call(held):
        signals.defer()
        monkeypatch.setattr(signals, "signal", types.SimpleNamespace(signal=put))
        return held, None

    with pytest.raises(OnPurpose):
        exchange.exchange_one([1], call)


def test_an_error_of_the_program_ends_it(handled):
    def call(held):
        signals.defer()
        raise OnPurpose

    with pytest.raises(OnPurpose):
        exchange.exchange_one([1], call)


def test_a_callback_is_interrupted_though_it_runs_for_the_first_time(handled):
    def host(x):
        signal.raise_signal(signal.SIGINT)

    r = refs.new_ref(jnp.zeros(7))
    for call in refs.io_callback, refs.jit(refs.io_callback, static_argnums=(0, 1)):
        handled.clear()
        with pytest.raises((KeyboardInterrupt, refs.errors.CallbackError)):
            call(host, None, r)
            jax.effects_barrier()
        assert handled == [signal.SIGINT]
