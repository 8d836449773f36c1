"""A small training program over the devices of several processes, and how to start those.

Each process runs this file. It prints one JSON object, which `start` returns.
"""

import json
import os
import signal
import sys
import time

from tests.processes import run_together

N_DEVICES = 4  # of all processes together


def start(what, n_processes, n_devices=N_DEVICES, timeout=240, **options):
    """What each of the processes says: `(exit status, what it printed, its seconds)`."""
    given = str(n_devices // n_processes), json.dumps(options)
    command = ("-m", "tests.devices.training", what, *given)
    found = []
    for status, out, err, seconds in run_together(n_processes, *command, timeout=timeout):
        # Gloo prints, too.
        said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        found.append((status, {"stderr": err[-3000:]} | (said[0] if said else {}), seconds))
    return found


def tell(**said):
    print(json.dumps(said), flush=True)


def make(kind):
    """The state, sharded, the step, and a function that gives the `k`-th batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import NamedSharding, P

    import refs

    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    random = np.random.default_rng(0)
    params = {
        "w": random.normal(0, 0.1, (64, 32)).astype(np.float32),
        "v": random.normal(0, 0.1, (32, 10)).astype(np.float32),
    }
    zeros = {k: np.zeros_like(x) for k, x in params.items()}
    tree = {"params": params, "m": zeros, "v": zeros, "count": np.int32(0)}
    place = {"dp": whole, "fsdp": split}[kind]
    places = {"params": place, "m": place, "v": place, "count": None}
    state = refs.tree.new_ref(tree, sharding=places, name="state")
    labels = random.integers(0, 10, 1800).astype(np.int32)
    images = (random.uniform(0, 1, (10, 64))[labels] + random.normal(0, 0.3, (1800, 64))).astype(
        np.float32
    )

    def loss(params, x, y):
        logits = jax.nn.relu(x @ params["w"][...]) @ params["v"][...]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    @refs.jit
    def step(state, x, y):
        value, grads = refs.value_and_grad(loss)(state["params"], x, y)
        state["count"][...] += 1
        t = state["count"][...]
        for k, g in grads.items():
            m, v = state["m"][k], state["v"][k]
            m[...] += 0.1 * (g - m[...])
            v[...] += 0.001 * (g * g - v[...])
            mean, var = m[...] / (1 - 0.9**t), v[...] / (1 - 0.999**t)
            state["params"][k][...] -= 0.01 * mean / (jnp.sqrt(var) + 1e-8)
        return value

    def batch(k):
        at = np.arange(64 * k, 64 * (k + 1)) % len(images)
        return tuple(
            jax.make_array_from_callback(x[at].shape, split, lambda i, x=x[at]: x[i])
            for x in (images, labels)
        )

    return state, step, batch


def train(kind, steps=30):
    state, step, batch = make(kind)
    losses = [float(step(state, *batch(k)).addressable_data(0)) for k in range(steps)]
    tell(losses=losses)


def save(kind, folder, steps=10, more=10):
    """Takes steps, saves in the background, goes on at once."""
    import orbax.checkpoint as ocp

    import refs

    state, step, batch = make(kind)
    for k in range(steps):
        step(state, *batch(k)).block_until_ready()
    with ocp.StandardCheckpointer() as checkpointer:
        with refs.tree.borrow(state) as arrays:
            checkpointer.save(folder, arrays)
        losses = [
            float(step(state, *batch(k)).addressable_data(0)) for k in range(steps, steps + more)
        ]
        checkpointer.wait_until_finished()
    tell(losses=losses)


def resume(kind, folder, steps=10, more=10):
    """Restores what `save` has saved into refs of its own, and goes on."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    import refs

    state, step, batch = make(kind)

    def shards():
        placed = {k: refs for k, refs in state.items() if k != "count"}
        with refs.tree.borrow(placed) as arrays:
            return [
                s.data.unsafe_buffer_pointer()
                for x in jax.tree.leaves(arrays)
                for s in x.addressable_shards
            ]

    where = shards()
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, refs.tree.abstract(state))
    refs.tree.set(state, restored)
    moved = sum(a != b for a, b in zip(where, shards(), strict=True))
    gathered = jax.experimental.multihost_utils.process_allgather(refs.tree.get(state), tiled=True)
    bits = {
        jax.tree_util.keystr(path): np.asarray(x).tobytes().hex()[:4096]
        for path, x in jax.tree.leaves_with_path(gathered)
    }
    losses = [float(step(state, *batch(k)).addressable_data(0)) for k in range(steps, steps + more)]
    tell(losses=losses, bits=bits, moved=moved)


def killed(kind, victim):
    """One of the processes is killed at the fifth step."""
    import jax

    state, step, batch = make(kind)
    for k in range(10**6):
        if k == 5 and jax.process_index() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            step(state, *batch(k)).block_until_ready()
        except Exception as error:
            seen = {}
            for name, ref in {"w": state["params"]["w"], "count": state["count"]}.items():
                try:
                    seen[name] = str(ref[...].addressable_data(0).sum())
                except Exception as again:
                    seen[name] = f"{type(again).__name__}: {again}"[:300]
            tell(
                step=k,
                error=f"{type(error).__name__}: {error}"[:500],
                seconds=time.monotonic() - begun,
                seen=seen,
            )
            os._exit(3)


def callback_fails(where, agrees):
    """A callback fails on one process: it raises, or says so, and all processes agree."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import NamedSharding, P

    import refs

    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    r = refs.new_ref(np.zeros(8, np.float32), sharding=NamedSharding(mesh, P("x")), name="r")
    total = refs.new_ref(np.float32(0), name="total")
    fails = False

    def check(x):
        is_bad = fails and jax.process_index() == where
        if is_bad and not agrees:
            raise OSError("disk full")
        return np.array(not is_bad)

    def of_shard(r):
        ok = refs.io_callback(check, jax.ShapeDtypeStruct((), jnp.bool_), r[0])
        if agrees:
            ok = jax.lax.pmin(ok.astype(jnp.int32), "x") == 1
        r[...] = jnp.where(ok, r[...] + 1, r[...])

    @refs.jit
    def step(r):
        total[...] += 1
        refs.shard_map(of_shard, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)(r)

    step(r)
    fails = True
    try:
        step(r)
        error, notes = None, []
    except Exception as e:
        error, notes = f"{type(e).__name__}: {e}", e.__notes__
    seen = [np.asarray(s.data).tolist() for s in r.addressable_shards]
    tell(error=error, notes=notes, r=seen, total=float(total[...].addressable_data(0)))
    jax.distributed.shutdown()  # waits for the other: JAX ends those whose leader has gone
    os._exit(0)


if __name__ == "__main__":
    what, n_local, options, address, n, k = sys.argv[1:]
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(n_local))
    if int(n) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, int(n), int(k), heartbeat_timeout_seconds=10)
    globals()[what](**json.loads(options))
