"""Decoding with a key-value cache that can be rolled back: speculative decoding.

The cache is a few refs: the keys and values of each layer, and how many tokens they hold. A call of
the model writes the rows of new tokens in place. To roll back, write the length: what lies behind
it is overwritten later.

A draft model guesses a few tokens, one by one, and the whole model reads them in one call. Where it
would have chosen differently, its choice is taken, and the cache is rolled back. So the tokens are
those of the model alone, from fewer calls. The draft is the model's own first layer here.

Y. Leviathan, M. Kalman and Y. Matias, "Fast inference from transformers via speculative decoding",
arXiv:2211.17192.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

WORDS, WIDTH, LAYERS, GUESSES = 100, 32, 4, 4


def new_params(key, size):
    tokens, positions, qkv, out = jax.random.split(key, 4)
    return {
        "tokens": jax.random.normal(tokens, (WORDS, WIDTH)),
        "positions": jax.random.normal(positions, (size, WIDTH)),
        "qkv": 0.05 * jax.random.normal(qkv, (LAYERS, 3, WIDTH, WIDTH)),
        "out": jax.random.normal(out, (WIDTH, WORDS)),
    }


class Model:
    def __init__(self, params, size):
        self.params = params
        self.keys = refs.new_ref(jnp.zeros((LAYERS, size, WIDTH)), name="keys")
        self.values = refs.new_ref(jnp.zeros((LAYERS, size, WIDTH)), name="values")
        self.length = refs.new_ref(0, name="length")

    def read(self, tokens, depth=LAYERS):
        """Appends tokens to the cache; returns the best successor of each, by `depth` layers."""
        p = self.params
        positions = self.length[...] + jnp.arange(len(tokens))
        seen = jnp.arange(self.keys.shape[1]) <= positions[:, None]
        x = p["tokens"][tokens] + p["positions"][positions]
        for i in range(depth):
            q, self.keys[i, positions], self.values[i, positions] = x @ p["qkv"][i]
            scores = jnp.where(seen, q @ self.keys[i].T, -jnp.inf)
            x += jax.nn.softmax(scores) @ self.values[i]
        self.length[...] += len(tokens)
        return (x @ p["out"]).argmax(-1)


def from_scratch(params, text):
    """The successor of a text, in NumPy and without a cache."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p["tokens"][text] + p["positions"][: len(text)]
    for i in range(LAYERS):
        q, k, v = x @ p["qkv"][i]
        weights = np.tril(np.exp(q @ k.T))
        x = x + weights / weights.sum(1, keepdims=True) @ v
    return int((x[-1] @ p["out"]).argmax())


def main(n=120):
    size = n + GUESSES + 1
    model = Model(new_params(jax.random.key(0), size), size)
    text = refs.new_ref(jnp.zeros(size, jnp.int32), name="text")  # it starts with token 0
    calls = refs.new_ref(0, name="calls")
    progress = refs.new_ref(jnp.zeros(n, jnp.int32), name="progress")

    @refs.jit
    def decode():
        def call(_):
            start = model.length[...]  # the tokens before text[start] are in the cache

            def guess(k, token):
                text[start + k + 1] = model.read(token[None], depth=1)[0]
                return text[start + k + 1]

            lax.fori_loop(0, GUESSES, guess, text[start])
            model.length[...] = start  # rolls the draft back

            window = start + jnp.arange(GUESSES + 1)
            chosen = model.read(text[window])
            right = jnp.cumprod(text[window[1:]] == chosen[:-1]).sum()
            text[window + 1] = chosen
            model.length[...] = start + right + 1  # rolls wrong guesses back
            calls[...] += 1
            progress[calls[...]] = model.length[...]

        lax.while_loop(lambda _: model.length[...] < n - 1, call, None)

    refs.testing.assert_in_place(decode)
    decode()
    expected = [0]
    while len(expected) < n:
        expected.append(from_scratch(model.params, expected))
    np.testing.assert_array_equal(text[:n], expected)
    assert int(calls) < n

    print(f"{int(model.length)} tokens from {int(calls)} calls of the model: {text[:8]} …")
    return progress[: int(calls) + 1]


def draw(axes, progress):
    axes.plot(progress, label="speculative")
    axes.plot(range(len(progress)), color="#666", linestyle=":", label="one token a call")
    axes.set(xlabel="calls of the model", ylabel="tokens")
    axes.legend()


if __name__ == "__main__":
    _gallery.run(main, draw)
