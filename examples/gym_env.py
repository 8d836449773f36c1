"""Learn to balance a pole: Gymnasium's environments write into a replay buffer made of refs.

    python examples/gym_env.py       # CartPole, a quarter of a minute on two CPU cores
    python examples/gym_env.py --env Acrobot-v1 --steps 4000     # a swinging arm

One compiled function holds the whole loop over time: the agent picks actions, a callback steps the
environments and writes observations and rewards straight into the replay buffer's memory, and the
agent learns from a batch of that buffer. The buffer, the network, its target, Adam's moments, the
random key and the counters are mutable arrays; no state is threaded through. The parts, in the
order in which they are worth reading:

    Worlds.step   the callback: writes into NumPy views of the buffer's own memory
    make_buffer   the replay buffer, a row for each step of all environments
    act           picks actions for the row that is being filled
    learn         one step of double deep Q-learning (DQN) with Adam
    make_train    the loop over time, compiled
    train         calls it, and checks the addresses of the buffer
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import refs

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    raise SystemExit(
        f"This example needs gymnasium and rich ({error}). From the top of the checkout:\n"
        '    python -m pip install ".[examples]"'
    ) from error

WIDTH = 128  # units in each of the two hidden layers
BATCH = 128
UPDATES = 2  # batches learnt from in each step of the environments
DISCOUNT = 0.99
LEARNING_RATE = 1e-3
TARGET_RATE = 0.02  # how fast the target network follows
WARM_UP = 64  # steps before the agent learns
LAST_EPSILON = 0.02
WINDOW = 50  # episodes in a mean return

# Nested dicts: of arrays where a function is pure, of refs where it mutates.
Values = dict[str, Any]
Cells = dict[str, Any]


# --- The environments ------------------------------------------------------------------------


class Worlds:
    """Copies of one environment, stepped together, on the CPU and in Python."""

    writes = ("reward", "terminated", "ended", "real")  # and the observation that follows

    def __init__(self, env_id: str, n_envs: int, seed: int):
        # The environments run one after the other in this process, and return an array of
        # observations that they reuse: `step` copies it at once.
        self.envs = gymnasium.make_vec(
            env_id,
            num_envs=n_envs,
            vectorization_mode="sync",
            vector_kwargs={"copy": False, "autoreset_mode": AutoresetMode.NEXT_STEP},
        )
        self.n_actions = int(self.envs.single_action_space.n)
        self.first, _ = self.envs.reset(seed=seed)
        self.ended = np.zeros(n_envs, bool)

    def step(self, actions: np.ndarray, row: dict[str, np.ndarray], after: np.ndarray) -> None:
        """The callback. `row` and `after` are the buffer's own memory: writes stay there.

        After the end of an episode an environment takes one step that only resets it: its action is
        ignored and its reward is 0. So an episode's true last observation is in `after` like any
        other, and the transition from there to the next episode's start is marked as not real.
        """
        observations, rewards, terminated, truncated, _ = self.envs.step(actions)
        after[...] = observations
        row["reward"][...] = rewards
        row["terminated"][...] = terminated
        row["ended"][...] = terminated | truncated
        row["real"][...] = ~self.ended
        self.ended = terminated | truncated


def make_buffer(worlds: Worlds, rows: int) -> Cells:
    """The replay buffer. Row `t` has the observation and the action of time `t`, and the outcome.

    The observation that follows is in the next row; after the last row comes the first.
    """
    n = worlds.envs.num_envs
    observations = np.zeros((rows, *worlds.first.shape), np.float32)
    observations[0] = worlds.first
    return {
        "observation": refs.new_ref(observations),
        "action": refs.new_ref(jnp.zeros((rows, n), jnp.int32)),
        "reward": refs.new_ref(jnp.zeros((rows, n))),
        "terminated": refs.new_ref(jnp.zeros((rows, n), bool)),
        "ended": refs.new_ref(jnp.zeros((rows, n), bool)),
        "real": refs.new_ref(jnp.zeros((rows, n), bool)),
    }


# --- The agent: pure functions of values -----------------------------------------------------


def init(seed: int, worlds: Worlds) -> Values:
    """The agent's first state, as ordinary arrays."""
    key, *keys = jax.random.split(jax.random.key(seed), 4)
    sizes = [worlds.first.shape[-1], WIDTH, WIDTH, worlds.n_actions]
    params = [
        {"weight": jax.random.normal(k, (m, n)) * math.sqrt(2 / m), "bias": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]
    return {
        "params": params,
        "target": jax.tree.map(jnp.copy, params),
        "mean": jax.tree.map(jnp.zeros_like, params),
        "square": jax.tree.map(jnp.zeros_like, params),
        "key": key,
        "steps": jnp.zeros((), jnp.int32),
        "updates": jnp.zeros((), jnp.int32),
        "rate": jnp.asarray(LEARNING_RATE),
        "epsilon": jnp.asarray(1.0),
        "score": jnp.zeros(worlds.envs.num_envs),  # the return so far of the episodes under way
    }


def q_values(params: Values, observations: Array) -> Array:
    hidden = observations
    for layer in params[:-1]:
        hidden = jax.nn.relu(hidden @ layer["weight"] + layer["bias"])
    return hidden @ params[-1]["weight"] + params[-1]["bias"]


def loss_fn(params: Values, target: Values, batch: Values) -> Array:
    """The squared error against one step of lookahead; transitions that aren't real count as 0."""
    # The network itself picks the next action, its slower copy estimates the value.
    best = q_values(params, batch["after"]).argmax(-1, keepdims=True)
    worth = jnp.take_along_axis(q_values(target, batch["after"]), best, axis=-1)[:, 0]
    # An episode that ran out of time would have gone on: only a true end has the value 0.
    goal = batch["reward"] + DISCOUNT * jnp.where(batch["terminated"], 0.0, worth)
    values = q_values(params, batch["observation"])
    value = jnp.take_along_axis(values, batch["action"][:, None], axis=-1)[:, 0]
    error = value - jax.lax.stop_gradient(goal)
    return (error**2 * batch["real"]).mean()


# --- The state: refs, and the functions that read and write them -----------------------------


def fresh_key(agent: Cells) -> Array:
    agent["key"][...], key = jax.random.split(agent["key"][...])
    return key


def act(agent: Cells, observations: Array, n_actions: int) -> Array:
    """The best actions, or now and then (with probability epsilon) random ones."""
    params = jax.tree.map(lambda ref: ref[...], agent["params"])
    best = q_values(params, observations).argmax(-1).astype(jnp.int32)
    coin, choice = jax.random.split(fresh_key(agent))
    explores = jax.random.uniform(coin, best.shape) < agent["epsilon"][...]
    return jnp.where(explores, jax.random.randint(choice, best.shape, 0, n_actions), best)


def sample(agent: Cells, buffer: Cells) -> Values:
    """A batch of transitions from all rows that the buffer still has."""
    rows, n_envs = buffer["action"].shape
    key_row, key_env = jax.random.split(fresh_key(agent))
    now = agent["steps"][...]
    # Row `now` has an observation already, but the outcome isn't known yet.
    age = 1 + jax.random.randint(key_row, (BATCH,), 0, jnp.minimum(now, rows - 1))
    row, env = (now - age) % rows, jax.random.randint(key_env, (BATCH,), 0, n_envs)
    batch = {name: ref[row, env] for name, ref in buffer.items()}
    return {**batch, "after": buffer["observation"][(row + 1) % rows, env]}


def learn(agent: Cells, buffer: Cells) -> None:
    """One step of Adam on a batch, and a small step of the target network."""
    params, target = jax.tree.map(lambda ref: ref[...], (agent["params"], agent["target"]))
    grads = jax.grad(loss_fn)(params, target, sample(agent, buffer))
    agent["updates"][...] += 1
    t = agent["updates"][...]

    def descend(
        param: refs.Ref, target: refs.Ref, mean: refs.Ref, square: refs.Ref, grad: Array
    ) -> None:
        mean[...] += (1 - 0.9) * (grad - mean[...])
        square[...] += (1 - 0.999) * (grad**2 - square[...])
        scale = jnp.sqrt(square[...] / (1 - 0.999**t)) + 1e-5
        param[...] -= agent["rate"][...] * mean[...] / (1 - 0.9**t) / scale
        target[...] += TARGET_RATE * (param[...] - target[...])

    cells = (agent[name] for name in ("params", "target", "mean", "square"))
    jax.tree.map(descend, *cells, grads)


def make_train(worlds: Worlds) -> Callable[[Cells, Cells, Values], Array]:
    """Compiles the loop over time for these environments."""

    def step(agent: Cells, buffer: Cells) -> Array:
        """One step of all environments and of learning; gives the returns of ended episodes."""
        rows = buffer["action"].shape[0]
        row = agent["steps"][...] % rows
        actions = act(agent, buffer["observation"][row], worlds.n_actions)
        buffer["action"][row] = actions
        views = {name: buffer[name].at[row] for name in Worlds.writes}
        after = buffer["observation"].at[(row + 1) % rows]
        refs.io_callback(worlds.step, None, actions, views, after)
        agent["steps"][...] += 1
        updates = jnp.where(agent["steps"][...] < WARM_UP, 0, UPDATES)
        refs.fori_loop(0, updates, lambda _, nothing: learn(agent, buffer), None)

        agent["score"][...] += buffer["reward"][row]
        ended = buffer["ended"][row]
        returns = jnp.where(ended, agent["score"][...], jnp.nan)
        agent["score"][...] = jnp.where(ended, 0.0, agent["score"][...])
        return returns

    @refs.jit
    def train_steps(agent: Cells, buffer: Cells, schedule: Values) -> Array:
        def body(_: None, now: Values) -> tuple[None, Array]:
            for name, value in now.items():
                agent[name][...] = value
            return None, step(agent, buffer)

        return refs.scan(body, None, schedule)[1]

    return train_steps


# --- Training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    agent: Cells
    buffer: Cells
    returns: list[float]  # of every episode, in the order in which they ended
    ended_at: list[int]  # the number of steps then, of all environments together
    seconds: float
    steps_per_second: float  # likewise, after compilation
    moved: int  # refs of the replay buffer whose address differs from that before the first step
    at_start: float  # the mean of the first returns
    at_end: float  # and of the last


def schedules(steps: int) -> dict[str, np.ndarray]:
    """Epsilon falls in the first quarter of the steps, the learning rate in all of them."""
    done = np.arange(steps, dtype=np.float32) / steps
    return {
        "epsilon": np.maximum(np.float32(LAST_EPSILON) ** (4 * done), np.float32(LAST_EPSILON)),
        "rate": np.float32(LEARNING_RATE) * (1 - done),
    }


def pointers(cells: Cells) -> list[int]:
    """The address of each buffer."""
    return [ref.unsafe_buffer_pointer() for ref in jax.tree.leaves(cells)]


def train(
    worlds: Worlds,
    *,
    steps: int,
    chunk: int,
    rows: int,
    seed: int,
    on_chunk: Callable[[list[float]], None] = lambda returns: None,
) -> Result:
    """Train from scratch, `chunk` steps a call; `on_chunk` gets all returns so far."""
    if chunk < 1 or steps % chunk or steps < 2 * chunk:
        raise SystemExit(f"--steps must be a multiple of {chunk}, and at least {2 * chunk}")

    agent = jax.tree.map(refs.new_ref, init(seed, worlds))
    buffer = make_buffer(worlds, rows)
    placed = pointers(buffer)
    train_steps, schedule = make_train(worlds), schedules(steps)
    returns: list[float] = []
    ended_at: list[int] = []
    clock = [time.perf_counter()]
    for first in range(0, steps, chunk):
        now = {name: values[first : first + chunk] for name, values in schedule.items()}
        found = np.asarray(train_steps(agent, buffer, now))
        clock.append(time.perf_counter())
        step, env = np.nonzero(~np.isnan(found))
        returns += found[step, env].tolist()
        ended_at += ((first + step + 1) * worlds.envs.num_envs).tolist()
        on_chunk(returns)
    return Result(
        agent=agent,
        buffer=buffer,
        returns=returns,
        ended_at=ended_at,
        seconds=clock[-1] - clock[0],
        steps_per_second=(steps - chunk) * worlds.envs.num_envs / (clock[-1] - clock[1]),
        moved=sum(a != b for a, b in zip(placed, pointers(buffer), strict=True)),
        at_start=float(np.mean(returns[:WINDOW])),
        at_end=float(np.mean(returns[-WINDOW:])),
    )


# --- The report ------------------------------------------------------------------------------


def save_curve(result: Result, path: Path, title: str) -> bool:
    """Draws the learning curve, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    window = min(WINDOW, len(result.returns))
    means = np.convolve(result.returns, np.full(window, 1 / window), mode="valid")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(result.ended_at, result.returns, ".", markersize=3, alpha=0.4, label="an episode")
    axes.plot(result.ended_at[-len(means) :], means, label=f"mean of {window}")
    axes.set(title=title, xlabel="steps of all environments", ylabel="return")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def report(result: Result, env_id: str) -> Table:
    buffer = jax.tree.leaves(result.buffer)
    size = sum(ref.nbytes for ref in buffer) / 1e6
    table = Table(title=f"{env_id}, replay buffer in refs", show_header=False)
    table.add_row("mean return at the start", f"{result.at_start:.1f}")
    table.add_row("mean return at the end", f"{result.at_end:.1f}")
    table.add_row("episodes", f"{len(result.returns):,}")
    table.add_row("time", f"{result.seconds:.1f} s, with compilation")
    table.add_row("steps of environments a second", f"{result.steps_per_second:,.0f}")
    table.add_row("replay buffer", f"{size:.2f} MB, {result.moved} of {len(buffer)} parts moved")
    return table


def main(
    *,
    env_id: str = "CartPole-v1",
    steps: int = 10_000,
    n_envs: int = 16,
    rows: int = 4096,
    chunk: int = 500,
    seed: int = 0,
    out: Path | None = None,
    console: Console | None = None,
) -> Result:
    """Train and print. `steps` are of all environments together; `rows` is the buffer's length."""
    console = console or Console()
    columns = (
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,}"),
        TextColumn("mean return {task.fields[mean]:.1f}"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console)
    worlds = Worlds(env_id, n_envs, seed)
    with closing(worlds.envs), progress:
        task = progress.add_task("training", total=steps, mean=math.nan)

        def on_chunk(returns: list[float]) -> None:
            mean = float(np.mean(returns[-WINDOW:])) if returns else math.nan
            progress.update(task, advance=chunk, mean=mean)

        result = train(worlds, steps=steps, chunk=chunk, rows=rows, seed=seed, on_chunk=on_chunk)
    console.print(report(result, env_id))
    if out is not None and save_curve(result, path := out / f"{env_id}.png", env_id):
        console.print(f"The learning curve is in {path}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Deep Q-learning, its replay buffer in refs.")
    parser.add_argument("--env", dest="env_id", default="CartPole-v1", help="or Acrobot-v1")
    parser.add_argument("--steps", type=int, default=10_000, help="of all environments together")
    parser.add_argument("--n-envs", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4096, help="of the replay buffer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/gym_env"), help="for the plot")
    main(**vars(parser.parse_args()))
