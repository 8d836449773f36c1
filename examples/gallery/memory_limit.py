"""Ten convolutions of an image that fills half of the memory.

A convolution can't write to the memory that it reads. So an image that is convolved again and
again needs memory for two images, and no more if it is updated in place. Here each convolution is
followed by an exchange of the first and the last row, as on a ring. The function that takes the
image and returns another one needs four: the argument lives on beside the result, and XLA copies
the whole image for the exchange. Donating the argument by hand saves the first of these copies.

XLA says what a compiled program needs: `compiled.memory_analysis()`. So a test can keep it so.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

STAGES = 10


def convolve(image):
    kernel = jnp.ones((len(image), len(image), 3, 3)) / (9 * len(image))
    return jnp.tanh(lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME")[0])


@refs.jit
def in_place(image):
    def stage(_, carry):
        image[...] = convolve(image[...])
        image[:, 0], image[:, -1] = image[:, -1], image[:, 0]

    lax.fori_loop(0, STAGES, stage, None)


def functional(image):
    def stage(_, image):
        image = convolve(image)
        return image.at[:, 0].set(image[:, -1]).at[:, -1].set(image[:, 0])

    return lax.fori_loop(0, STAGES, stage, image)


def images_needed(jitted, image):
    """The memory of the compiled program, arguments and results included, in images."""
    memory = jitted.lower(image).compile().memory_analysis()
    size = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes  # results in the memory of arguments
    )
    return size / image.nbytes


def main(size=512):
    start = jax.random.normal(jax.random.key(0), (4, size, size))
    image = refs.new_ref(start, name="image")
    needed = {
        "functional": images_needed(jax.jit(functional), start),
        "functional, donated": images_needed(jax.jit(functional, donate_argnums=0), start),
        "refs.jit": images_needed(in_place, image),
    }

    pointer = image.unsafe_buffer_pointer()
    in_place(image)
    assert image.unsafe_buffer_pointer() == pointer
    np.testing.assert_allclose(image[...], jax.jit(functional)(start), rtol=1e-5, atol=1e-6)
    assert needed["refs.jit"] < 2.1
    assert needed["refs.jit"] < needed["functional, donated"] < needed["functional"]

    print(f"memory for {STAGES} convolutions, in images of {start.nbytes / 2**20:.1f} MiB:")
    for name, images in needed.items():
        print(f"  {name:20} {images:.2f}")
    return needed


def draw(axes, needed):
    bars = axes.barh([*needed], [*needed.values()], height=0.5, color="#56b4e9")
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.set(xlabel="memory, in images", xlim=(0, 4.5))
    axes.invert_yaxis()


if __name__ == "__main__":
    _gallery.run(main, draw)
