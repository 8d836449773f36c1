"""Programs without refs for `test_like_jax.py`: what is given to jit, and done in it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

X = np.arange(4, dtype=np.float32)
CASES = {}


def case(fun):
    CASES[fun.__name__] = fun
    return fun


# --- What is given ---


@case
def scalars(jit):
    f = jit(lambda *xs: [x + 1 for x in xs])
    return f(1, 2.0, 3j, True, np.float32(1), np.int8(3), jnp.int16(5))


@case
def weak_types(jit):
    f = jit(lambda x, y: (x, x * y, y, jnp.float32(1) * x))
    return f(1.0, 2), f(jnp.float32(1), 2), f(jnp.asarray(1.0), np.int32(2))


@case
def empty_and_none(jit):
    f = jit(lambda x, y=None, *, z=(): (x, y, z))
    return f(None), f((), y={}), f(1, z=(None, 2)), jit(lambda: None)(), jit(lambda: 3)()


@case
def keywords_defaults_and_stars(jit):
    f = jit(lambda a, b=2, *rest, c, d=4, **more: (a, b, rest, c, d, more))
    return f(1, c=3), f(1, 5, 6, 7, c=8, d=9, e=10), f(b=1, a=2, c=3)


@case
def not_enough_arguments(jit):
    return jit(lambda a, *, b: a)(1)


@case
def static_by_position(jit):
    f = jit(lambda n, x: [x] * n, static_argnums=0)
    return f(2, X), f(3, X), f(True, X)


@case
def static_by_name(jit):
    @functools.partial(jit, static_argnames=("n",))
    def f(x, n=2, *, mode="up"):
        return x + n if mode == "up" else x - n

    return f(X), f(X, 3), f(x=X, n=4)


@case
def static_that_is_no_array_else(jit):
    return jit(lambda x, how: how(x), static_argnames="how")(X, how=jnp.sum)


@case
def static_out_of_range(jit):
    return jit(lambda x: x, static_argnums=3)(X)


@case
def static_of_no_such_name(jit):
    return jit(lambda x: x, static_argnames="y")(X)


@case
def static_and_donated(jit):
    return jit(lambda x, y: x, static_argnums=0, donate_argnums=0)(1, 2)


@case
def donated(jit):
    x, y = jnp.ones(4), jnp.ones(4)
    f = jit(lambda x, y: x + y, donate_argnums=(0,))
    return f(x, y), x.is_deleted(), y.is_deleted()


@case
def donated_by_name_and_in_vain(jit):
    x = {"a": jnp.ones(4), "b": jnp.ones(3)}
    f = jit(lambda x, s: x["a"].sum() * s, donate_argnames="x")
    return f(x, s=2.0), x["a"].is_deleted(), x["b"].is_deleted()


@case
def donated_twice(jit):
    x = jnp.ones(4)
    return jit(lambda x, y: (x + 1, y + 2), donate_argnums=(0, 1))(x, x)


@case
def deleted(jit):
    x = jnp.ones(4)
    x.delete()
    return jit(lambda x: x + 1)(x)


@case
def unused(jit):
    return jit(lambda x, y: y, keep_unused=True)(X, 1), jit(lambda x, y: y)(X, 1)


@case
def no_array(jit):
    return jit(lambda x, y: y)(1, {"a": "text"})


@case
def too_large(jit):
    return jit(lambda x: x)(2**70)


def _bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@case
def keys(jit):
    f = jit(lambda k: (jax.random.split(k), jax.random.normal(k, (2,)), k))
    return jax.tree.map(_bits, (f(jax.random.key(1)), f(jax.random.key(1, impl="rbg"))))


@case
def float0(jit):
    zero = np.zeros((2,), jax.dtypes.float0)
    return jit(lambda x, y: (x, y))(zero, 1.0)


@case
def gradients_to_integers(jit):
    return jax.grad(jit(lambda n: n * 2.0), allow_int=True)(3)


@case
def extended_and_small_dtypes(jit):
    xs = [np.ones(2, t) for t in ("int8", "uint16", "complex64", "bool")]
    xs += [jnp.ones(2, t) for t in ("bfloat16", "float8_e4m3fn", "int4")]
    return jit(lambda xs: [x[::-1] for x in xs])(xs)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["name"])
@dataclasses.dataclass
class Named:
    x: object
    name: str

    def __post_init__(self):
        if isinstance(self.x, str):
            raise TypeError("never of text")

    def double(self, by=2):
        return Named(self.x * by, self.name)


@case
def custom_pytrees(jit):
    f = jit(lambda t, n: (t, n.x + t["a"], Named(t["a"], n.name)))
    return f({"a": 1.0}, Named(X, "one")), f({"a": 2}, Named(X, "two"))


@case
def methods(jit):
    return jit(Named.double)(Named(X, "n"), 3), jit(Named(X, "m").double)(by=4)


@case
def method_by_decorator(jit):
    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=[], drop_fields=[]
    )
    @dataclasses.dataclass
    class Scaled:
        x: object

        @functools.partial(jit, static_argnames="n")
        def times(self, n):
            return self.x * n

        @staticmethod
        @jit
        def twice(x):
            return x * 2

    return Scaled(X).times(3), Scaled(X).times(n=2), Scaled.twice(X)


class Adder:
    def __init__(self, n):
        self.n = n

    def __call__(self, x):
        return x + self.n


@case
def callable_objects(jit):
    return jit(Adder(2))(X), jit(functools.partial(lambda x, y: x - y, y=3))(X), jit(jnp.sin)(X)


@case
def a_generator(jit):
    def f(x):
        yield x

    return jit(f)(X)


# --- What is done ---


@case
def control_flow(jit):
    def f(x, n):
        y = lax.fori_loop(0, n, lambda i, c: c.at[i].add(i), x)
        _, ys = lax.scan(lambda c, a: (c + a, c * a), 0.0, y)
        return lax.cond(n > 2, jnp.cumsum, lambda a: a, ys)

    return jit(f)(X, 3), jit(f)(X, 1)


@case
def errors_of_the_user(jit):
    class Odd(KeyError):
        pass

    def f(x):
        raise Odd("what", x.shape)

    return jit(f)(X)


@case
def python_control_flow(jit):
    return jit(lambda x: 1 if x > 0 else 2)(1.0)


@case
def returns_no_array(jit):
    return jit(lambda x: {"a": "text"})(X)


@case
def leaks(jit):
    kept = []
    jit(lambda x: kept.append(x + 1))(X)
    return kept[0] + 2


@case
def nan_and_inf(jit):
    return jit(lambda x: jnp.log(x) / x)(X - 1)


@case
def promotion(jit):
    return jit(lambda x, y: x + y)(np.float32(1), np.int32(2))


@case
def prints_in_order(jit):
    def f(x):
        jax.debug.print("a {}", x, ordered=True)
        y = io_callback(lambda v: np.float32(v) * 2, jnp.float32(0), x, ordered=True)
        jax.debug.print("b {y}", y=y, ordered=True)
        return y

    f = jit(f)
    out = f(jnp.float32(1)), f(jnp.float32(2))
    jax.effects_barrier()
    return out


@case
def callback_that_raises(jit):
    def fails(x):
        raise KeyError("in a callback")

    f = jit(lambda x: jax.pure_callback(fails, jnp.float32(0), x))
    try:
        jax.block_until_ready(f(jnp.float32(1)))
    except Exception as error:
        return type(error), "in a callback" in str(error)


@case
def traced_once(jit):
    times = []
    f = jit(lambda x: times.append(1) or x + 1)
    jax.jit(lambda x: f(f(f(x))))(1.0)
    jax.vmap(f)(X)
    f(1.0), f(2.0), f(X), f(X + 1), f.lower(X), f.eval_shape(X)
    return len(times)


@case
def traced_again(jit):
    times = []
    f = jit(lambda x: times.append(1) or x + 1)
    f(1.0), f.clear_cache(), f(1.0), jax.clear_caches(), f(1.0)
    with jax.enable_x64(True):
        f(1.0)
    with jax.default_matmul_precision("float32"):
        f(1.0)
    return f(1.0), len(times)


@case
def traced_where_it_must_not_be(jit):
    f = jit(lambda x: x + 1)
    f(1.0)
    with jax.no_tracing():
        a = f(2.0)
        f(X)
    return a
