"""The examples with callbacks: what Python writes is what the program has, and nothing moves."""

from __future__ import annotations

import importlib
import importlib.util
import io
from pathlib import Path

import jax
import numpy as np
import pytest

import refs

pytest.importorskip("sklearn")
rich_console = pytest.importorskip("rich.console")

EXAMPLES = str(Path(__file__).parent.parent / "examples")


def example(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def gym_env():
    pytest.importorskip("gymnasium")
    yield from example("gym_env")


@pytest.fixture(scope="module")
def shared_memory():
    yield from example("shared_memory")


@pytest.fixture
def console():
    return rich_console.Console(file=io.StringIO(), width=100)


class Places:
    """Where refs have their memory. It is asked before the call: a callback may not ask a ref."""

    def __init__(self, cells):
        self._spans = [(r.unsafe_buffer_pointer(), r.nbytes) for r in jax.tree.leaves(cells)]

    def hold(self, part):
        """Whether the NumPy array has its memory inside one of theirs."""
        address = part.ctypes.data
        return any(
            start <= address and address + part.nbytes <= start + n for start, n in self._spans
        )


# --- gym_env ---------------------------------------------------------------------------------


def play(env_id, actions, seed):
    """One environment, stepped by hand: observation, reward, terminated, ended, real."""
    gymnasium = pytest.importorskip("gymnasium")
    env, ended = gymnasium.make(env_id), False
    observation, _ = env.reset(seed=seed)
    for action in actions:
        before = observation
        if ended:
            observation, _ = env.reset()
            yield before, 0.0, False, (ended := False), False
        else:
            observation, reward, terminated, truncated, _ = env.step(int(action))
            yield before, reward, terminated, (ended := terminated or truncated), True
    env.close()
    yield observation, 0.0, False, False, False


@pytest.mark.slow
@pytest.mark.parametrize("env_id, steps", [("CartPole-v1", 300), ("Acrobot-v1", 600)])
def test_gym_env_replays(gym_env, console, env_id, steps):
    """Acrobot's first episodes run out of time, CartPole's end."""
    result = gym_env.main(
        env_id=env_id, steps=steps, chunk=steps // 2, n_envs=3, rows=700, seed=5, console=console
    )
    buffer = {name: np.asarray(ref[...]) for name, ref in result.buffer.items()}
    assert result.moved == 0
    returns = []
    for env in range(3):
        played = list(play(env_id, buffer["action"][:steps, env], 5 + env))
        for name, values in zip(
            ("observation", "reward", "terminated", "ended", "real"),
            zip(*played, strict=True),
            strict=True,
        ):
            expected = np.array(values, buffer[name].dtype)
            np.testing.assert_array_equal(buffer[name][: steps + 1, env], expected, name)
        ends = np.flatnonzero(buffer["ended"][:, env])
        returns += [x.sum() for x in np.split(buffer["reward"][:, env], ends + 1)[:-1]]
    assert sorted(result.returns) == sorted(returns) != []


@pytest.mark.slow
def test_gym_env_learns(gym_env, console, tmp_path):
    result = gym_env.main(steps=2500, rows=1024, out=tmp_path, console=console)
    assert result.at_start < 40
    assert result.at_end > 100
    assert result.moved == 0
    assert "0 of 6 parts moved" in console.file.getvalue()
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "CartPole-v1.png").stat().st_size > 1000


@pytest.mark.as_released
@pytest.mark.slow
def test_gym_env_writes_into_the_buffer(gym_env, monkeypatch):
    worlds = gym_env.Worlds("CartPole-v1", 64, 0)
    agent = jax.tree.map(refs.new_ref, gym_env.init(0, worlds))
    buffer = gym_env.make_buffer(worlds, 256)
    places, held = Places(buffer), []

    def step(actions, row, after):
        held.extend(map(places.hold, [*row.values(), after]))
        gym_env.Worlds.step(worlds, actions, row, after)

    monkeypatch.setattr(worlds, "step", step)
    train_steps, schedule = gym_env.make_train(worlds), gym_env.schedules(50)
    train_steps(agent, buffer, schedule)
    assert held == [True] * 50 * 5
    worlds.envs.close()


def test_gym_env_refuses_settings(gym_env, console):
    with pytest.raises(SystemExit) as caught:
        gym_env.main(steps=700, console=console)
    assert str(caught.value) == "--steps must be a multiple of 500, and at least 1000"


# --- shared_memory ---------------------------------------------------------------------------


@pytest.mark.slow
def test_shared_memory_is_followed(shared_memory, console):
    result = shared_memory.main(steps=1500, every=3, limit=400, quiet=True, console=console)
    sights = result.report.sights
    steps = [sight.step for sight in sights]
    assert list(result.checksums) == list(range(3, 1501, 3))
    assert steps == sorted(set(steps))
    assert steps[0] < 1500 == steps[-1]  # seen before the one compiled call had ended
    assert result.inconsistent == result.report.corrupt == 0
    assert result.moved == 0
    assert sights[-1].accuracy > 0.8
    assert "0 inconsistent" in console.file.getvalue()


@pytest.mark.as_released
@pytest.mark.slow
def test_shared_memory_callback_gets_the_parameters(shared_memory):
    net = jax.tree.map(refs.new_ref, shared_memory.init(0))
    places, held = Places(net["params"]), []

    class Publisher:
        def publish(self, params, steps, loss):
            held.extend(map(places.hold, params))

    data = shared_memory.load(200)
    shared_memory.train(net, data, Publisher(), steps=4, every=2)
    assert held == [True] * 2 * 6


def test_shared_memory_refuses_settings(shared_memory):
    with pytest.raises(SystemExit) as caught:
        shared_memory.main(steps=7, every=2)
    assert str(caught.value) == "--steps must be a multiple of --every, which is 2"


@pytest.fixture
def blocks(shared_memory):
    """One block, as its writer and its reader have it."""
    writer = shared_memory.Block(5)
    reader = shared_memory.Block(5, writer.name)
    yield writer, reader
    reader.close()
    writer.close()
    writer.unlink()


PARTS = [np.arange(4, dtype=np.float32).reshape(2, 2), np.full(1, 9, np.float32)]


def test_a_snapshot_is_read_once(blocks):
    writer, reader = blocks
    assert reader.read() is None
    crc = writer.write(3, 0.5, PARTS)
    found = reader.read()
    assert found[:3] == (3, 0.5, crc)
    assert found.values.tolist() == [0, 1, 2, 3, 9]
    assert reader.read() is None
    assert not reader.is_finished
    writer.finish()
    assert reader.is_finished
    assert (reader.torn, reader.corrupt) == (0, 0)


def test_a_reader_that_comes_while_it_is_written(blocks):
    writer, reader = blocks

    def parts():
        yield PARTS[0]
        assert reader.read() is None
        yield PARTS[1]

    writer.write(3, 0.5, parts())
    assert reader.torn == 1
    assert reader.read().step == 3


def test_a_reader_that_is_overtaken(blocks, monkeypatch):
    writer, reader = blocks
    writer.write(3, 0.5, PARTS)

    class Overtaken:
        def copy(self):
            writer.write(4, 0.25, PARTS)
            return values.copy()

    with monkeypatch.context() as patch:
        values = reader._values
        patch.setattr(reader, "_values", Overtaken())
        assert reader.read() is None
    assert (reader.torn, reader.read().step) == (1, 4)


def test_a_snapshot_with_the_wrong_checksum(blocks):
    writer, reader = blocks
    writer.write(3, 0.5, PARTS)
    writer._values[1] = 7
    assert reader.read() is None
    assert (reader.torn, reader.corrupt) == (0, 1)
