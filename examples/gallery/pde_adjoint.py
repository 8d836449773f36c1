"""What lies under the ground? The gradient of a wave by the medium that it goes through.

A wave starts at the left and is recorded there, with the echoes of a layer that it meets. From the
record, gradient descent finds the layer: full waveform inversion. The wave equation is stepped in
place, and the steps can be undone, `v += ...` and then `u += ...`. So under `refs.reversible` the
backward pass runs the wave backwards, in memory that doesn't grow with the number of steps. That is
the adjoint method, without an adjoint equation derived by hand.

A. Tarantola, "Inversion of seismic reflection data in the acoustic approximation", Geophysics 49
(1984).
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

CELLS, SOURCE = 100, 5


def laplacian(u):
    return jnp.pad(u, (1, 0))[:-1] - 2 * u + jnp.pad(u, (0, 1))[1:]


def listen(medium, record):
    """The error of the echoes, and the echoes; `medium` holds squares of velocities."""
    u, v = (refs.new_ref(jnp.zeros(CELLS), name=name) for name in "uv")
    error = refs.new_ref(0.0, name="error")

    def step(_, now):
        k, recorded = now
        v[...] += medium * laplacian(u[...])
        v[SOURCE] += jnp.exp(-(((k - 30) / 10) ** 2))
        u[...] += v[...]
        error[...] += (u[SOURCE] - recorded) ** 2
        return None, u[SOURCE]

    _, echoes = lax.scan(step, None, (jnp.arange(len(record)), record))
    return error[...] / len(record), echoes


def misfit(medium, record):
    return listen(medium, record)[0]


def kibibytes(gradient, medium, record):
    memory = gradient.lower(medium, record).compile().memory_analysis()
    return memory.temp_size_in_bytes / 1024


def main(steps=400, iterations=300):
    start = jnp.full(CELLS, 0.25)
    true = start.at[40:55].set(0.18)
    _, record = jax.jit(listen)(true, jnp.zeros(steps))

    gradient = refs.jit(refs.grad(refs.reversible(misfit)))
    plain = jax.jit(jax.grad(misfit))
    g = gradient(start, record)
    np.testing.assert_allclose(g, plain(start, record), rtol=1e-3, atol=1e-3 * jnp.abs(g).max())
    ahead, behind = (misfit(start + h * (true - start), record) for h in (0.01, -0.01))
    np.testing.assert_allclose(g @ (true - start), (ahead - behind) / 0.02, rtol=0.02)
    for name, function in ("refs.reversible", gradient), ("plain gradient", plain):
        print(f"{name}, {steps} steps: {kibibytes(function, start, record):.0f} KiB")

    medium = refs.new_ref(start, name="medium")
    mean, squares = (refs.new_ref(jnp.zeros(CELLS)) for _ in range(2))  # of gradients, for Adam

    @refs.jit
    def descend(k):
        g = gradient(medium[...], record)
        mean[...] += 0.1 * (g - mean[...])
        squares[...] += 0.01 * (g**2 - squares[...])
        rate = 0.003 * jnp.sqrt(1 - 0.99**k) / (1 - 0.9**k)
        medium[...] -= rate * mean[...] / (jnp.sqrt(squares[...]) + 1e-9)

    for k in range(iterations):
        descend(k + 1.0)
    before, after = misfit(start, record), misfit(medium[...], record)
    assert after < 0.01 * before
    print(f"error of the echoes: {before:.4f}, after {iterations} iterations {after:.4f}")
    print(f"mean inside the layer: {medium[40:55].mean():.3f}, in truth 0.18, at the start 0.25")
    return true, medium[...]


def draw(axes, result):
    true, found = result
    axes.plot(true, color="#666", linestyle=":", label="true")
    axes.plot(found, label="found from echoes")
    axes.set(xlabel="cell", ylabel="velocity²", ylim=(0.1, 0.35))
    axes.legend()


if __name__ == "__main__":
    _gallery.run(main, draw)
