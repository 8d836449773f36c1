"""Train a small language model on a mesh of devices, save it, and go on with half the devices.

    python examples/sharded_training.py            # about a minute on two CPU cores

The devices are made of this computer's CPU; on others only the mesh differs. Parameters, both
moments of Adam, the step counter and the random key are sharded refs. One compiled function
updates them in place. The parts, in the order in which they are worth reading:

    make_state  a tree of refs: each device has its part of each
    train_step  reads the refs, differentiates with respect to them, writes them
    save        lends the refs' own buffers to Orbax
    restore     writes a checkpoint into refs, however they are split over devices
    train       8 devices: trains, saves, and goes on
    resume      4 devices, another process: restores, and takes the steps after the save again

The main process starts `train` and `resume`, each in a process of its own, and compares what they
report. With `--compare` a third one times the step against one whose state is threaded by hand.
That and the model are in `_sharded_model.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import refs

try:
    import orbax.checkpoint as ocp
    from rich.console import Console
    from rich.panel import Panel
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise SystemExit(
        f"This example needs orbax-checkpoint and rich ({error}):\n"
        "    python -m pip install orbax-checkpoint rich"
    ) from error

import _sharded_model as model
from _sharded_model import State, Values

# The moments lie as their parameters do. `P()` is a whole copy on each device.
SPECS = {
    "params": model.SPECS,
    "mean": model.SPECS,
    "square": model.SPECS,
    "step": jax.P(),
    "key": jax.P(),
}


# --- The state, and the functions that use it -------------------------------------------------


def make_mesh(devices: int) -> jax.sharding.Mesh:
    """Two devices share one copy of the parameters; each such pair takes a part of the batch."""
    automatic = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((devices // 2, 2), ("data", "model"), axis_types=automatic)


def sharding(spec: jax.P) -> jax.NamedSharding:
    return jax.NamedSharding(jax.sharding.get_mesh(), spec)


def initial(seed: int, width: int, depth: int) -> Values:
    """The first state, as ordinary arrays."""
    first, later = jax.random.split(jax.random.key(seed))
    params = model.init(first, width, depth)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "step": jnp.int32(0), "key": later}


def make_state(width: int, depth: int) -> State:
    """Refs of zeros, to be filled by `refs.tree.set`. No device makes more than its part."""
    types = jax.eval_shape(partial(initial, 0, width, depth))
    return refs.tree.empty_ref(types, sharding=SPECS)


@refs.jit
def train_step(state: State, text: Array, steps: int) -> Array:
    """One of `steps` steps of Adam. `state` is a tree of refs; all of it is updated in place."""
    state["step"][...] += 1
    rate = model.adam_rate(state["step"][...], steps)
    # The key is state, too: after a restore it draws the batches that were to come.
    state["key"][...], now = jax.random.split(state["key"][...])
    windows = model.draw(now, text)
    loss, grads = refs.value_and_grad(model.loss_fn)(state["params"], windows)

    def adam(param: refs.Ref, mean: refs.Ref, square: refs.Ref, grad: Array) -> None:
        mean[...] += 0.1 * (grad - mean[...])
        square[...] += 0.02 * (grad**2 - square[...])
        param[...] -= rate * mean[...] / (jnp.sqrt(square[...]) + 1e-8)

    jax.tree.map(adam, state["params"], state["mean"], state["square"], grads)
    return loss


evaluate = refs.jit(model.loss_fn)


# --- Checkpoints ------------------------------------------------------------------------------


def save(path: Path, state: State) -> None:
    # Orbax reads the refs' own buffers, and has read them when the inner block ends.
    with ocp.StandardCheckpointer() as checkpointer, refs.tree.borrow(state) as arrays:
        checkpointer.save(path, arrays, force=True)
        checkpointer.wait_until_finished()


def restore(path: Path, state: State) -> None:
    # `abstract` says where the refs lie, so that each device reads its own part.
    with ocp.StandardCheckpointer() as checkpointer:
        refs.tree.set(state, checkpointer.restore(path, refs.tree.abstract(state)))


def digest(state: State) -> str:
    """A hash of every bit of the state, which doesn't depend on the mesh."""
    values = refs.tree.get(state)
    values["key"] = jax.random.key_data(values["key"])
    parts = [np.asarray(x).tobytes() for x in jax.tree.leaves(values)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def shards(state: State) -> list[tuple[jax.Device, int, int]]:
    """Of each part of each ref: its device, its address, and its size in bytes."""
    with refs.tree.borrow(state) as arrays:  # Of a ref itself, `addressable_shards` are copies.
        parts = [part for x in jax.tree.leaves(arrays) for part in x.addressable_shards]
        return [(p.device, p.data.unsafe_buffer_pointer(), p.data.nbytes) for p in parts]


# --- What runs in processes of its own --------------------------------------------------------


class Run:
    """Refs and text on a mesh of this process's devices, and a record of the steps."""

    def __init__(self, settings: argparse.Namespace, devices: int):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        jax.set_mesh(make_mesh(devices))
        self.total = settings.steps
        self.state = make_state(settings.width, settings.depth)
        self.first_shards = shards(self.state)
        train, valid = model.load()
        self.text = jax.device_put(train, sharding(jax.P()))
        self.valid = jax.device_put(model.windows(valid), sharding(jax.P("data")))
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def take(self, steps: int, title: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.completed}/{task.total}, loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
        )
        with Progress(*columns) as progress:
            task = progress.add_task(title, total=steps, loss=math.nan, speed=0)
            for _ in range(steps):
                began = time.perf_counter()
                loss = float(train_step(self.state, self.text, self.total))
                self.seconds.append(time.perf_counter() - began)
                self.losses.append(loss)
                progress.update(task, advance=1, loss=loss, speed=self.tokens_per_second())

    def tokens_per_second(self) -> float:
        return model.BATCH * model.CONTEXT / statistics.median(self.seconds[-50:])

    def facts(self) -> dict[str, Any]:
        now = shards(self.state)
        device = now[0][0]
        return {
            "losses": self.losses,
            "valid": float(evaluate(self.state["params"], self.valid)),
            "tokens_per_second": self.tokens_per_second(),
            "refs": len(jax.tree.leaves(self.state)),
            "bytes": sum(ref.nbytes for ref in jax.tree.leaves(self.state)),
            "bytes_of_device": sum(size for at, _, size in now if at == device),
            "shards": len(now),
            "moved": sum(a != b for a, b in zip(self.first_shards, now, strict=True)),
        }


def train(settings: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """The first process: train, save, and go on."""
    run = Run(settings, settings.devices)
    refs.tree.set(run.state, initial(settings.seed, settings.width, settings.depth))
    run.take(settings.steps - settings.again, f"{settings.devices} devices: training  ")
    save(checkpoint, run.state)
    saved = digest(run.state)
    run.take(settings.again, f"{settings.devices} devices: going on  ")
    return {"state": saved, **run.facts()}


def resume(settings: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """The second process: restore on half of the devices, and take the last steps again."""
    devices = settings.devices // 2
    run = Run(settings, devices)
    restore(checkpoint, run.state)
    restored = digest(run.state)
    run.take(settings.again, f"{devices} devices: after restore")
    prompt = np.frombuffer(settings.prompt.encode(), np.uint8)
    sample = model.generate(run.state["params"], prompt, jax.random.key(settings.seed))
    text = bytes(np.asarray(sample)).decode(errors="replace")
    return {"state": restored, "sample": text, **run.facts()}


def compare(settings: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """The third process: time the step against the same without refs, from the checkpoint."""
    run = Run(settings, settings.devices)
    restore(checkpoint, run.state)
    threaded = refs.tree.get(run.state)
    return model.compare(train_step, run.state, threaded, run.text)


PARTS = {"train": train, "resume": resume, "compare": compare}


# --- The main process -------------------------------------------------------------------------


def start(part: str, directory: str) -> dict[str, Any]:
    """Run this program once more, as one of its parts, and return what that reports."""
    command = [sys.executable, __file__, *sys.argv[1:], "--checkpoint", directory, "--part", part]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)  # It has printed why.
    return json.loads((Path(directory) / f"{part}.json").read_text())


def main(settings: argparse.Namespace, directory: str) -> None:
    before, after = start("train", directory), start("resume", directory)
    first, again = before["losses"][-settings.again :], after["losses"]
    apart = max(abs(a - b) / a for a, b in zip(first, again, strict=True))
    equal = "equal, bit for bit" if before["state"] == after["state"] else "DIFFERENT"

    table = Table(title="A language model, all state in sharded refs", show_header=False)
    table.add_row("first and last loss", f"{before['losses'][0]:.3f}, {first[-1]:.3f} nats a byte")
    table.add_row("validation loss", f"{before['valid']:.3f}")
    for counted, loss in model.entropies(*model.load()).items():
        table.add_row(f"  of a model that counts {counted}", f"{loss:.3f}")
    table.add_row("state", f"{before['bytes']:,} bytes in {before['refs']} refs")
    for title, run in (("before", before), ("after", after)):
        devices = run["shards"] // run["refs"]
        table.add_section()
        table.add_row(f"{title} the restore", f"{devices} devices")
        table.add_row("  state on each of them", f"{run['bytes_of_device']:,} bytes")
        table.add_row("  speed", f"{run['tokens_per_second']:,.0f} tokens/s")
        table.add_row("  in place", f"{run['moved']} of {run['shards']} shards moved")
    table.add_section()
    table.add_row("restored state", equal)
    table.add_row(f"losses of the {len(again)} steps taken twice", f"{apart:.1e} apart at most")
    console = Console()
    console.print(table)
    console.print(Panel(Text(after["sample"]), title="Written by the restored model", width=80))
    if settings.compare:
        console.print(model.table(start("compare", directory)))
    if before["state"] != after["state"] or not apart < 1e-3:
        raise SystemExit("The resumed run isn't the one that was saved.")
    console.print("The resumed run takes the same steps as the one that was saved.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sharded training and checkpoints with refs.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--again", type=int, default=20, help="of them, those after the save")
    parser.add_argument("--devices", type=int, default=8, help="resumed on half as many")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2, help="blocks of the transformer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="The ", help="what the written text begins with")
    parser.add_argument("--checkpoint", metavar="DIR", help="keep it there; default: don't")
    parser.add_argument("--compare", action="store_true", help="time a step without refs, too")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.devices < 4 or model.BATCH % (settings.devices // 2) or settings.devices % 4:
        parser.error("--devices must be 4, 8, 16 or 32")
    if not 0 < settings.again < settings.steps:
        parser.error("--again must lie between 1 and --steps - 1")
    if settings.width % model.HEADS or settings.width < 1:
        parser.error(f"--width must be a multiple of {model.HEADS}")
    if settings.depth < 1:
        parser.error("--depth must be at least 1")
    if not 0 < len(settings.prompt.encode()) < model.CONTEXT:
        parser.error(f"--prompt must have 1 to {model.CONTEXT - 1} bytes")
    return settings


if __name__ == "__main__":
    settings = parse()
    if settings.part:
        directory = Path(settings.checkpoint)
        facts = PARTS[settings.part](settings, directory / "state")
        (directory / f"{settings.part}.json").write_text(json.dumps(facts))
    elif settings.checkpoint:
        directory = Path(settings.checkpoint).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        main(settings, str(directory))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(settings, directory)
