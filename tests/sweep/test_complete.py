"""The table has every public function of JAX, or says here why not."""

import importlib
import inspect
from collections.abc import Iterator

from tests.sweep.table import TABLE

# The names that the table has for them.
MODULES = {
    "jnp": "jax.numpy",
    "jnp.linalg": "jax.numpy.linalg",
    "jnp.fft": "jax.numpy.fft",
    "lax": "jax.lax",
    "lax.linalg": "jax.lax.linalg",
    "jax.nn": "jax.nn",
    "jax.nn.initializers": "jax.nn.initializers",
    "jax.random": "jax.random",
    "jax.image": "jax.image",
    "jax.ops": "jax.ops",
    **{
        f"jsp.{name}": f"jax.scipy.{name}"
        for name in ("fft", "integrate", "linalg", "ndimage", "signal", "special", "stats")
    },
}

LEFT_OUT = {
    "it says something of types or shapes, and returns no array": """
        jnp.broadcast_shapes jnp.can_cast jnp.einsum_path jnp.get_printoptions jnp.iscomplexobj
        jnp.isdtype jnp.isrealobj jnp.isscalar jnp.issubdtype jnp.iterable jnp.ndim
        jnp.promote_types jnp.result_type jnp.shape jnp.size lax.broadcast_shapes
        lax.conv_dimension_numbers lax.conv_general_permutations lax.conv_general_shape_tuple
        lax.conv_shape_tuple lax.conv_transpose_shape_tuple lax.dtype lax.padtype_to_pads
        lax.reduce_window_shape_tuple lax.shape_as_value jax.random.key_dtype jax.random.key_impl
        jax.nn.get_scaled_dot_general_config lax.ConvGeneralDilatedDimensionNumbers
        lax.DotDimensionNumbers lax.PrecisionLike""",
    "it prints, or reads or writes a file or a buffer of bytes": """
        jnp.array_repr jnp.array_str jnp.frombuffer jnp.fromfile jnp.fromiter jnp.fromstring
        jnp.load jnp.printoptions jnp.save jnp.savez jnp.set_printoptions""",
    "what it returns is undefined, or differs each time": """
        jnp.empty lax.rng_uniform""",
    "a key is what it makes of a number at top level: all others here take one": """
        jax.random.PRNGKey jax.random.key jax.random.Key""",
    "it is of devices, shardings or tokens, which tests of their own are about": """
        lax.after_all lax.create_token lax.pbroadcast lax.pcast lax.precv lax.psend
        lax.psum_scatter_start lax.ragged_all_to_all lax.with_sharding_constraint lax.dce_sink""",
    "it takes a format that only a GPU has": "jax.nn.scaled_dot_general",
}


def public() -> Iterator[str]:
    modules = {short: importlib.import_module(name) for short, name in MODULES.items()}
    stats = modules["jsp.stats"]
    for name, module in inspect.getmembers(stats, inspect.ismodule):
        modules[f"jsp.stats.{name}"] = module
    for short, module in modules.items():
        for name, value in inspect.getmembers(module):
            is_function = callable(value) and not inspect.isclass(value)
            if is_function and not name.startswith("_") and not inspect.ismodule(value):
                yield f"{short}.{name}"


HAS = {example.name for example in TABLE}
EXCUSED = {name for names in LEFT_OUT.values() for name in names.split()}


def test_every_function_is_there() -> None:
    assert sorted(set(public()) - HAS - EXCUSED) == []


def test_none_is_there_twice() -> None:
    assert sorted(HAS & EXCUSED) == []
    assert len(HAS) == len(TABLE)
