"""Follow a training run from a second process, while one compiled call updates the state.

    python examples/shared_memory.py     # about ten seconds on two CPU cores

The whole training is a single call of a compiled function, so its caller sees nothing until the
end. But every few steps the program calls back, with the parameters' own memory: the callback
copies it into a block of shared memory. Another process reads the block at any time, tests the
parameters on held-out digits, and prints the result.

Why is there a copy at all? XLA allocates the memory of its arrays by itself, and can't be told to
use a shared block. So one `memcpy` from XLA's memory to the shared block, with no array made in
between, is the minimum. The parts, in the order in which they are worth reading:

    train         the compiled function: steps, and now and then a callback
    Publisher     the callback: NumPy views of the parameters in, shared memory out
    follow        the second process; it uses NumPy only
    main          starts both

The block, `_shared_block.py`, has no lock: the training never waits, and a reader throws its copy
away if the training has written meanwhile.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _shared_block import Block
from digits import Data, load, pointers
from jax import Array
from rich.console import Console
from rich.table import Table

import refs

SIZES = (64, 256, 256, 10)
BATCH = 64
LEARNING_RATE = 0.002
MOMENTUM = 0.9
PAUSE = 0.0005  # seconds between two reads, if there is nothing new
PRINT_EVERY = 0.25  # seconds

Net = dict[str, Any]


# --- Training --------------------------------------------------------------------------------


def init(seed: int) -> Net:
    """The network's first state, as ordinary arrays; weight and bias of each layer in turn."""
    key, *keys = jax.random.split(jax.random.key(seed), len(SIZES))
    params: list[Array] = []
    for k, (m, n) in zip(keys, pairwise(SIZES), strict=True):
        params += [jax.random.normal(k, (m, n)) * math.sqrt(2 / m), jnp.zeros(n)]
    return {
        "params": params,
        "momentum": [jnp.zeros_like(param) for param in params],
        "key": key,
        "steps": jnp.zeros((), jnp.int32),
        "loss": jnp.zeros(()),
    }


def forward(params: Sequence[Any], images: Any, np: Any) -> Any:
    """Logits; with `jax.numpy` or with NumPy."""
    hidden = images
    for weight, bias in zip(params[:-2:2], params[1:-2:2], strict=True):
        hidden = np.maximum(hidden @ weight + bias, 0)
    return hidden @ params[-2] + params[-1]


def loss_fn(params: list[Array], images: Array, labels: Array) -> Array:
    logits = jax.nn.log_softmax(forward(params, images, jnp))
    return -jnp.take_along_axis(logits, labels[:, None], axis=1).mean()


def train_step(net: Net, images: Array, labels: Array) -> None:
    """One step of momentum SGD on a random batch."""
    net["key"][...], key = jax.random.split(net["key"][...])
    rows = jax.random.randint(key, (BATCH,), 0, len(labels))
    params = [ref[...] for ref in net["params"]]
    net["loss"][...], grads = jax.value_and_grad(loss_fn)(params, images[rows], labels[rows])
    for param, momentum, grad in zip(net["params"], net["momentum"], grads, strict=True):
        momentum[...] = MOMENTUM * momentum[...] + grad
        param[...] -= LEARNING_RATE * momentum[...]
    net["steps"][...] += 1


class Publisher:
    """Writes the parameters to the block, and keeps the checksums of all that it has written."""

    def __init__(self, block: Block):
        self.block = block
        self.checksums: dict[int, int] = {}  # by step

    def publish(self, params: list[np.ndarray], steps: np.ndarray, loss: np.ndarray) -> None:
        """The callback. Its arguments are XLA's memory, so the copy in `write` is the only one."""
        self.checksums[int(steps)] = self.block.write(int(steps), float(loss), params)


def train(net: Net, data: Data, publisher: Publisher, *, steps: int, every: int) -> None:
    """All steps in one compiled call, which publishes the parameters after every `every`."""

    @refs.jit
    def run(net: Net, images: Array, labels: Array) -> None:
        def some_steps(_: Any, nothing: None) -> None:
            refs.fori_loop(0, every, lambda _, nothing: train_step(net, images, labels), None)
            refs.io_callback(publisher.publish, None, net["params"], net["steps"], net["loss"])

        refs.fori_loop(0, steps // every, some_steps, None)

    run(net, flat(data.train_images), data.train_labels)
    jax.block_until_ready(net["loss"][...])


def flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1)


# --- The second process ----------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """The reader's results for one snapshot."""

    step: int
    crc: int  # of the values that it used
    loss: float  # of the batch, from the training
    accuracy: float  # on the held-out digits, from the reader

    def describe(self) -> str:
        return f"step {self.step:,}, loss {self.loss:.4f}, test accuracy {self.accuracy:.2%}"


@dataclass(frozen=True)
class Report:
    sights: list[Sight]
    torn: int  # copies thrown away because the training was writing
    corrupt: int  # copies with the right counter and the wrong checksum


def follow(
    name: str, images: np.ndarray, labels: np.ndarray, to_main: Connection, quiet: bool
) -> None:
    """Reads the block and tests its parameters until the training has ended; sends a report."""
    shapes = [s for m, n in pairwise(SIZES) for s in ((m, n), (n,))]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    trainer = multiprocessing.parent_process()
    sights: list[Sight] = []
    printed = -math.inf
    with closing(Block(int(ends[-1]), name)) as block:
        to_main.send("ready")
        while trainer is None or trainer.is_alive():
            finished = block.is_finished  # before reading, so that the last snapshot isn't missed
            found = block.read()
            if found is not None:
                parts = np.split(found.values, ends[:-1])
                params = [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]
                right = forward(params, images, np).argmax(-1) == labels
                sights.append(Sight(found.step, found.crc, found.loss, float(right.mean())))
                if not quiet and time.monotonic() - printed > PRINT_EVERY:
                    print(f"reader: {sights[-1].describe()}", flush=True)
                    printed = time.monotonic()
            elif finished:
                break
            else:
                time.sleep(PAUSE)
        to_main.send(Report(sights, block.torn, block.corrupt))


# --- Both ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    net: Net
    report: Report
    checksums: dict[int, int]  # of what was published, by step
    seconds: float  # with compilation
    moved: int  # buffers of the state whose address has changed at the end

    @property
    def inconsistent(self) -> int:
        """How many snapshots the reader used that differ from the published ones."""
        return sum(self.checksums.get(sight.step) != sight.crc for sight in self.report.sights)


def train_and_follow(data: Data, *, steps: int, every: int, seed: int, quiet: bool) -> Result:
    if every < 1 or steps < every or steps % every:
        raise SystemExit(f"--steps must be a multiple of --every, which is {every}")

    net = jax.tree.map(refs.new_ref, init(seed))
    placed = pointers(net)
    # A forked child would inherit XLA's locks, but not the threads that hold them.
    spawn = multiprocessing.get_context("spawn")
    from_reader, to_main = spawn.Pipe(duplex=False)
    block = Block(sum(ref.size for ref in net["params"]))
    publisher = Publisher(block)
    held_out = (flat(data.test_images), data.test_labels)
    reader = spawn.Process(target=follow, args=(block.name, *held_out, to_main, quiet), daemon=True)
    try:
        reader.start()
        to_main.close()  # so that the pipe ends with the reader
        from_reader.recv()
        began = time.perf_counter()
        try:
            train(net, data, publisher, steps=steps, every=every)
        finally:
            block.finish()
        seconds = time.perf_counter() - began
        report = from_reader.recv()
        reader.join()
    finally:
        from_reader.close()
        block.close()
        block.unlink()
    moved = sum(a != b for a, b in zip(placed, pointers(net), strict=True))
    return Result(net, report, publisher.checksums, seconds, moved)


def summary(result: Result) -> Table:
    sights, cells = result.report.sights, jax.tree.leaves(result.net)
    size = sum(ref.nbytes for ref in result.net["params"])
    table = Table(title="A training run, seen from another process", show_header=False)
    table.add_row("training", f"{int(result.net['steps'][...]):,} steps in {result.seconds:.1f} s")
    table.add_row("in place", f"{result.moved} of {len(cells)} buffers moved")
    table.add_row("published", f"{len(result.checksums):,} times {size:,} bytes")
    table.add_row("seen by the reader", f"{len(sights):,}, {result.inconsistent} inconsistent")
    table.add_row("thrown away as torn", f"{result.report.torn:,}")
    for name, sight in (("first seen", sights[0]), ("last seen", sights[-1])):
        table.add_row(name, sight.describe())
    return table


def main(
    *,
    steps: int = 6000,
    every: int = 5,
    seed: int = 0,
    limit: int | None = None,
    quiet: bool = False,
    console: Console | None = None,
) -> Result:
    """Train, follow, print. `limit` keeps that many digits; with `quiet` only `main` prints."""
    result = train_and_follow(load(limit), steps=steps, every=every, seed=seed, quiet=quiet)
    (console or Console()).print(summary(result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Follow a training run from a second process.")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--every", type=int, default=5, help="steps between two publications")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
