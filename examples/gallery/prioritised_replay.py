"""Prioritised replay: a sum tree in a ref, sampled by many lanes at once.

The leaves of the tree are priorities, and each other node is the sum of its two children. To draw
an item with a probability proportional to its priority, walk down from the root. To change a
priority, walk up. Either takes a number of steps that is the logarithm of the capacity; in a ref
these steps touch nothing else, however large the tree is. Samples are lanes of `refs.vmap`, which
share the tree and only read it. Changes come one after the other, so an item that was drawn twice
ends with the last priority that it was given.

T. Schaul, J. Quan, I. Antonoglou and D. Silver, "Prioritized experience replay", arXiv:1511.05952.
"""

import _gallery
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs


class SumTree:
    """Node 1 is the root; the children of node i are 2i and 2i + 1; the leaves come last."""

    def __init__(self, depth):
        self.depth = depth
        self.capacity = 2**depth
        self.nodes = refs.new_ref(jnp.zeros(2 * self.capacity), name="nodes")

    def set(self, items, priorities):
        """Gives the items these priorities, in order."""

        def set_one(_, pair):
            node, change = pair[0] + self.capacity, pair[1] - self.nodes[pair[0] + self.capacity]

            def add(_, node):
                self.nodes[node] += change
                return node // 2

            lax.fori_loop(0, self.depth + 1, add, node)
            return None, None

        lax.scan(set_one, None, (items, priorities))

    def find(self, x):
        """The item at x, if each item takes up as much of [0, total) as its priority."""

        def descend(_, carry):
            node, x = carry
            left = self.nodes[2 * node]
            go_right = x >= left
            return 2 * node + go_right, x - jnp.where(go_right, left, 0)

        node, _ = lax.fori_loop(0, self.depth, descend, (1, x))
        return node - self.capacity


def main(depth=10, draws=200, batch=64):
    tree = SumTree(depth)
    rng = refs.random.stateful_rng(0)

    # Priorities are whole numbers, so that all sums are exact.
    priorities = np.random.default_rng(0).integers(1, 1000, tree.capacity).astype(np.float32)
    refs.jit(tree.set)(jnp.arange(tree.capacity), priorities)

    @refs.jit
    def sample():
        # One from each of `batch` equal parts, as in the paper.
        total = tree.nodes[1]
        parts = (jnp.arange(batch) + rng.uniform(size=batch)) / batch
        xs = jnp.minimum(jnp.floor(parts * total), total - 1)
        return xs, refs.vmap(tree.find)(xs)

    @refs.jit
    def replay():
        xs, items = sample()
        tree.set(items, jnp.ceil(tree.nodes[tree.capacity + items] / 2))
        return xs, items

    counts = np.zeros(tree.capacity)
    for _ in range(draws):
        xs, items = sample()
        np.testing.assert_array_equal(items, priorities.cumsum().searchsorted(xs, "right"))
        counts += np.bincount(items, minlength=tree.capacity)
    expected = counts.sum() * priorities / priorities.sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 5).all()

    after = priorities.copy()
    for _ in range(draws // 4):
        xs, items = replay()
        np.testing.assert_array_equal(items, after.cumsum().searchsorted(xs, "right"))
        after[items] = np.ceil(after[items] / 2)
    np.testing.assert_array_equal(tree.nodes[tree.capacity :], after)
    assert tree.nodes[1] == after.sum()

    print(f"{draws * batch:,} samples of {tree.capacity:,} items, all as NumPy draws them")
    print(f"priorities after replay, in all: {int(priorities.sum()):,} → {int(after.sum()):,}")
    return priorities, counts, expected


def draw(axes, result):
    priorities, counts, expected = result
    axes.plot(priorities, counts, ".", markersize=3, rasterized=True)
    axes.plot([0, priorities.max()], [0, expected.max()], label="expected")
    axes.set(xlabel="priority", ylabel="times drawn")
    axes.legend()


if __name__ == "__main__":
    _gallery.run(main, draw)
