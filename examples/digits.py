"""Train a small convolutional network on real handwritten digits, with every number in a `Ref`.

    python examples/digits.py            # about twenty seconds on two CPU cores

Parameters, momentum, batch-norm statistics, the step counter and the learning rate are mutable
arrays. One compiled function updates them all in place; no state is threaded through it, and it
returns nothing but the loss. The parts, in the order in which they are worth reading:

    init        makes ordinary arrays, then `jax.tree.map(refs.new_ref, ...)` makes them mutable
    loss_fn     pure: takes values, returns the loss and this batch's statistics
    train_step  reads the refs, differentiates `loss_fn`, writes the refs
    evaluate    only reads
    train       the loop

Afterwards the same program is timed in two other styles (see `_digits_baselines.py`): with the
state threaded by hand through a donating `jax.jit`, and with JAX's own refs under `jax.jit`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import refs

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    raise SystemExit(
        f"This example needs scikit-learn and rich ({error}). From the top of the checkout:\n"
        '    python -m pip install ".[examples]"'
    ) from error

WIDTHS = (16, 32, 64)  # channels of the convolutions
STRIDES = (1, 2, 1)  # 8x8 -> 8x8 -> 4x4 -> 4x4
LEARNING_RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
EPSILON = 1e-5

# Nested dicts: of arrays where a function is pure, of refs where it mutates.
Values = dict[str, Any]
Net = dict[str, Any]


# --- The model: pure functions of values -----------------------------------------------------


def init(seed: int) -> Values:
    """The network's first state, as ordinary arrays."""
    keys = iter(jax.random.split(jax.random.key(seed), len(WIDTHS)))
    params: Values = {}
    stats: Values = {}
    fan_in = 1
    for i, width in enumerate(WIDTHS):
        params[f"conv{i}"] = {
            "weight": he_normal(next(keys), (3, 3, fan_in, width)),
            "scale": jnp.ones(width),
            "shift": jnp.zeros(width),
        }
        stats[f"conv{i}"] = {"mean": jnp.zeros(width), "var": jnp.ones(width)}
        fan_in = width
    side = 8 // math.prod(STRIDES)
    # Zeros: the untrained network finds all ten digits equally likely.
    params["dense"] = {"weight": jnp.zeros((side * side * fan_in, 10)), "bias": jnp.zeros(10)}
    return {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "stats": stats,
        "batches": jnp.zeros((), jnp.int32),
        "rate": jnp.asarray(LEARNING_RATE),
    }


def he_normal(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.normal(key, shape) * math.sqrt(2 / math.prod(shape[:-1]))


def forward(params: Values, images: Array, stats: Values | None) -> tuple[Array, Values]:
    """Logits, and the statistics used: `stats`, or this batch's own where `stats` is None."""
    used: Values = {}
    hidden = images[..., None]
    for i, stride in enumerate(STRIDES):
        layer = params[f"conv{i}"]
        hidden = lax.conv_general_dilated(
            hidden,
            layer["weight"],
            window_strides=(stride, stride),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        if stats is None:
            norm = {"mean": hidden.mean((0, 1, 2)), "var": hidden.var((0, 1, 2))}
        else:
            norm = stats[f"conv{i}"]
        used[f"conv{i}"] = norm
        hidden = (hidden - norm["mean"]) * lax.rsqrt(norm["var"] + EPSILON)
        hidden = jax.nn.relu(hidden * layer["scale"] + layer["shift"])
    features = hidden.reshape(len(images), -1)
    return features @ params["dense"]["weight"] + params["dense"]["bias"], used


def loss_fn(params: Values, images: Array, labels: Array) -> tuple[Array, Values]:
    """Mean cross-entropy, and the batch's statistics on the side (for `has_aux=True`)."""
    logits, batch_stats = forward(params, images, None)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -picked.mean(), batch_stats


def augment(batches: Array, images: Array) -> Array:
    """Shift each image by up to one pixel each way; the counter seeds the draw."""
    key = jax.random.fold_in(jax.random.key(0), batches)
    starts = jax.random.randint(key, (len(images), 2), 0, 3)
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1)))
    return jax.vmap(lambda image, at: lax.dynamic_slice(image, at, (8, 8)))(padded, starts)


# --- The state: refs, and the two compiled functions that use them ---------------------------


@refs.jit
def train_step(net: Net, images: Array, labels: Array) -> Array:
    """One step of momentum SGD. `net` is a tree of refs; all of it is updated in place."""
    net["batches"][...] += 1
    batches = net["batches"][...]
    rate = net["rate"][...]

    # Differentiate a pure function of the values, then write the results.
    params = jax.tree.map(lambda ref: ref[...], net["params"])
    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
        params, augment(batches, images), labels
    )

    def descend(param: refs.Ref, momentum: refs.Ref, grad: Array) -> None:
        momentum[...] = MOMENTUM * momentum[...] + grad + WEIGHT_DECAY * param[...]
        param[...] -= rate * momentum[...]

    jax.tree.map(descend, net["params"], net["momentum"], grads)

    # A plain average over the first ten batches, an exponential one from there on.
    blend = jnp.maximum(1 / batches, 0.1)

    def track(running: refs.Ref, value: Array) -> None:
        running[...] += blend * (value - running[...])

    jax.tree.map(track, net["stats"], batch_stats)
    return loss


@refs.jit
def evaluate(net: Net, images: Array, labels: Array) -> Array:
    """Accuracy with the running statistics. It only reads, so it changes nothing."""
    params, stats = jax.tree.map(lambda ref: ref[...], (net["params"], net["stats"]))
    logits, _ = forward(params, images, stats)
    return (logits.argmax(-1) == labels).mean()


# --- The data --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def minibatches(self, size: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        """One shuffled pass; the incomplete last batch is left out, so that shapes stay equal."""
        order = rng.permutation(len(self.train_labels))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield self.train_images[rows], self.train_labels[rows]


def load(limit: int | None = None) -> Data:
    """The 1,797 digits, split 80/20 with equal shares of each digit, always in the same way."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    parts = train_test_split(
        images[:limit],
        labels[:limit],
        test_size=0.2,
        stratify=labels[:limit],
        random_state=0,
    )
    train_images, test_images, train_labels, test_labels = parts
    return Data(train_images, train_labels, test_images, test_labels)


# --- Training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    net: Net
    losses: list[float]  # one a step
    test_accuracy: float
    seconds: float
    moved: int  # buffers whose address at the end differs from that after the first step
    peak_process_mb: float | None


def pointers(tree: Any) -> list[int]:
    """The address of each buffer."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def train(
    data: Data,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    on_epoch: Callable[[int, float, float], None] = lambda epoch, loss, accuracy: None,
) -> Result:
    """Train from scratch; `on_epoch` gets the epoch, its mean loss and the test accuracy."""
    if not 0 < batch_size <= len(data.train_labels):
        raise SystemExit(f"--batch-size must lie between 1 and {len(data.train_labels)}")
    if epochs < 1:
        raise SystemExit("--epochs must be at least 1")

    began = time.perf_counter()
    rng = np.random.default_rng(seed)
    net = jax.tree.map(refs.new_ref, init(seed))
    losses: list[Array] = []
    placed: list[int] = []
    accuracy = 0.0
    for epoch in range(epochs):
        # Written outside of the compiled step, which sees the new value: it is the same memory.
        net["rate"][...] = LEARNING_RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2
        first = len(losses)
        for images, labels in data.minibatches(batch_size, rng):
            losses.append(train_step(net, images, labels))
            placed = placed or pointers(net)
        accuracy = float(evaluate(net, data.test_images, data.test_labels))
        on_epoch(epoch, float(np.mean(losses[first:])), accuracy)
    return Result(
        net=net,
        losses=[float(loss) for loss in losses],
        test_accuracy=accuracy,
        seconds=time.perf_counter() - began,
        moved=sum(a != b for a, b in zip(placed, pointers(net), strict=True)),
        peak_process_mb=peak_process_mb(),
    )


def peak_process_mb() -> float | None:
    """The most memory this process has held, or None if the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)  # bytes there, kilobytes elsewhere


def peak_step_bytes(net: Net, images: Any, labels: Any) -> int | None:
    """The most device memory that one compiled step holds, or None if XLA does not say."""
    memory = train_step.lower(net, images, labels).compile().memory_analysis()
    if memory is None:
        return None
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes  # outputs in the memory of their arguments
    )


# --- The report ------------------------------------------------------------------------------


def main(
    *,
    epochs: int = 30,
    batch_size: int = 64,
    seed: int = 0,
    compare: bool = True,
    limit: int | None = None,
    console: Console | None = None,
) -> Result:
    """Train, compare, print. `limit` keeps only that many digits (for a quick look)."""
    console = console or Console()
    data = load(limit)
    columns = (
        BarColumn(),
        TextColumn("epoch {task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("test accuracy {task.fields[accuracy]:.2%}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs, loss=math.nan, accuracy=0.0)
        result = train(
            data,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            on_epoch=lambda epoch, loss, accuracy: progress.update(
                task, advance=1, loss=loss, accuracy=accuracy
            ),
        )

    cells = jax.tree.leaves(result.net)
    batch = next(data.minibatches(batch_size, np.random.default_rng(seed)))
    step_bytes = peak_step_bytes(result.net, *batch)
    table = Table(title="Handwritten digits, all state in refs", show_header=False)
    table.add_row("test accuracy", f"{result.test_accuracy:.2%}")
    table.add_row("steps", f"{len(result.losses):,} in {result.seconds:.1f} s, with compilation")
    table.add_row("state", f"{sum(ref.nbytes for ref in cells):,} bytes in {len(cells)} refs")
    table.add_row("in place", f"{result.moved} of {len(cells)} buffers moved")
    if step_bytes is not None:
        table.add_row("peak of the compiled step", f"{step_bytes:,} bytes")
    if result.peak_process_mb is not None:
        table.add_row("peak of the process", f"{result.peak_process_mb:,.0f} MB")
    console.print(table)

    if compare:
        import _digits_baselines as baselines

        with console.status("Timing three ways to write the same step…"):
            timings = baselines.compare(init(seed), *batch)
        console.print(baselines.table(timings))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, state in refs.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compare", dest="compare", action="store_false")
    main(**vars(parser.parse_args()))
