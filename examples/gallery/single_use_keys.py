"""Random keys that can be used once.

A key of `jax.random` that is used twice gives the same numbers twice, and nothing says so: averages
of "independent" estimates don't get any better. Here a key is kept in a ref, and whoever uses it
takes it out with `refs.freeze`, which ends the ref. A second use is an error that names both lines,
when the program runs or, in a compiled function, when it is traced.

Where keys needn't be handed out one by one, a generator does the bookkeeping: each call of
`rng.key()` gives the next key.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np

import refs


def estimate(once, points=200):
    """π, from random points in a square. Uses up the key."""
    xy = jax.random.uniform(refs.freeze(once), (points, 2))
    return 4 * jnp.mean((xy**2).sum(1) < 1)


@refs.jit
def careless(key):
    once = refs.new_ref(key, name="once")
    return estimate(once), estimate(once)


def main(n=300):
    keys = jax.random.split(jax.random.key(0), n)
    once = [refs.new_ref(key, name=f"keys[{k}]") for k, key in enumerate(keys)]
    fresh = np.array([estimate(key) for key in once])
    reused = np.array([estimate(refs.new_ref(keys[0])) for _ in range(n)])  # a copy of one key

    messages = []
    for second_use in (lambda: estimate(once[3]), lambda: careless(keys[0])):
        try:
            second_use()
        except refs.errors.RefStateError as error:
            messages.append(str(error))
    assert len(messages) == 2
    assert all("which was frozen at" in message for message in messages)

    rng = refs.random.stateful_rng(0)
    drawn = [jax.random.normal(rng.key()) for _ in range(3)]
    by_hand = [jax.random.normal(jax.random.fold_in(jax.random.key(0), k)) for k in range(3)]
    np.testing.assert_array_equal(drawn, by_hand)

    spread = np.sqrt(np.pi * (4 - np.pi) / 200)  # of one estimate
    assert np.ptp(reused) == 0
    assert abs(fresh.mean() - np.pi) < 4 * spread / np.sqrt(n)
    print(f"π from {n} estimates with keys used once: {fresh.mean():.4f}")
    print(f"π from {n} estimates with one key: {reused.mean():.4f}")
    print("\n".join(messages))
    return fresh, reused


def draw(axes, result):
    fresh, reused = result
    used = np.arange(1, 1 + len(fresh))
    axes.plot(used, reused.cumsum() / used, label="one key, reused", color="#e69f00")
    axes.plot(used, fresh.cumsum() / used, label="keys used once", color="#0072b2")
    axes.axhline(np.pi, color="#666", linestyle=":", label="π")
    axes.set(xlabel="estimates", ylabel="their mean", ylim=(3.05, 3.3))
    axes.legend(loc="upper right")


if __name__ == "__main__":
    _gallery.run(main, draw)
