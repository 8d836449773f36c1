"""Running mean and variance of a stream, inside a jitted scan.

The layer owns its statistics and updates them where it is called, as batch normalisation does. The
loop over the stream doesn't know of them: nothing is threaded through the scan. The update merges
each batch into the mean and the sum of squared deviations, which is stable; the difference
`mean(x²) - mean(x)²` loses all its digits where the mean is large.

B. P. Welford, "Note on a method for calculating corrected sums of squares and products",
Technometrics 4 (1962); for batches T. F. Chan, G. H. Golub and R. J. LeVeque (1979).
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs


class Normalise:
    """Subtracts the running mean, and divides by the running standard deviation."""

    def __init__(self, features):
        self.count = refs.new_ref(0.0, name="count")
        self.mean = refs.new_ref(jnp.zeros(features), name="mean")
        self.squares = refs.new_ref(jnp.zeros(features), name="squares")

    def __call__(self, x):
        n, batch = self.count[...], len(x)
        self.count[...] += batch
        delta = x.mean(0) - self.mean[...]
        self.mean[...] += delta * batch / self.count[...]
        self.squares[...] += x.var(0) * batch + delta**2 * n * batch / self.count[...]
        return (x - self.mean[...]) / (self.std() + 1e-6)

    def std(self):
        return jnp.sqrt(self.squares[...] / self.count[...])


def naive(xs):
    """The standard deviation of the first k batches, for each k, from sums of squares."""
    n = xs.shape[1] * jnp.arange(1, len(xs) + 1)[:, None]
    mean = xs.sum(1).cumsum(0) / n
    return jnp.sqrt(jnp.maximum((xs**2).sum(1).cumsum(0) / n - mean**2, 0))


def main(steps=200):
    layer = Normalise(3)

    @refs.jit
    def observe(xs):
        def step(_, x):
            y = layer(x)
            return None, (y, layer.std())

        return lax.scan(step, None, xs)[1]

    means, stds = jnp.array([0.0, 100.0, 10_000.0]), jnp.array([1.0, 2.0, 0.5])
    stream = means + stds * jax.random.normal(jax.random.key(0), (steps, 32, 3))
    parts = jnp.split(stream, [steps // 2])
    seen = [observe(part) for part in parts]  # the second call goes on where the first ended

    seen_std = np.concatenate([std for _, std in seen])
    values = np.asarray(stream, np.float64).reshape(-1, 3)
    np.testing.assert_allclose(layer.mean[...], values.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(seen_std[-1], values.std(0), rtol=1e-2)
    last = (np.asarray(stream[-1], np.float64) - values.mean(0)) / values.std(0)
    np.testing.assert_allclose(seen[-1][0][-1], last, atol=0.02)

    by_sums = np.asarray(naive(stream))
    print(f"after {int(layer.count)} values")
    print(f"  standard deviation, NumPy in float64: {values.std(0).round(3)}")
    print(f"  refs, in float32:                     {seen_std[-1].round(3)}")
    print(f"  mean(x²) - mean(x)², in float32:      {by_sums[-1].round(3)}")
    return seen_std[:, 2], by_sums[:, 2]


def draw(axes, result):
    merged, by_sums = result
    axes.plot(by_sums, label="mean(x²) − mean(x)²", color="#e69f00")
    axes.plot(merged, label="merged, in refs", color="#0072b2")
    axes.axhline(0.5, color="#666", linestyle=":", label="true")
    axes.set(xlabel="batches seen", ylabel="standard deviation", title="stream with mean 10,000")
    axes.legend()


if __name__ == "__main__":
    _gallery.run(main, draw)
