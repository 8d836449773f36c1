"""Errors about reversible functions. See `test_errors.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs
from refs import errors
from tests.errors.case import X, raises


def gradient(program, **options):
    """The gradient of a program of a number, undone."""
    return refs.grad(refs.reversible(program, **options))(1.0)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: what it adds "
    "needs ref `r` (created at FILE:N) as it was at FILE:N. Write to another ref, keep the old "
    "value in one, or use refs.checkpoint",
)
def reversible_sum_of_itself(r, i):
    def program(k):
        def step(_, __):
            r[...] += jnp.tanh(k * r[...])

        refs.fori_loop(0, 3, step, None)
        return r[0]

    gradient(program)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: the old value "
    "is lost: `tanh` at FILE:N can't be undone. Update by sums, `ref[...] += x`, keep the old "
    "value in another ref, or use refs.inverse or refs.checkpoint",
)
def reversible_overwriting(r, i):
    def program(k):
        out = jnp.sum(r[...] ** 2 * k)
        r[...] = jnp.tanh(r[...])
        return out

    gradient(program)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: the old value "
    "is lost, because nothing that is known afterwards is made of it. Write to another ref, keep "
    "the old value in one, or use refs.checkpoint",
)
def reversible_overwriting_a_part(r, i):
    def program(k):
        out = jnp.sum(r[...] ** 2 * k)
        r[0] = 1.0
        return out

    gradient(program)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: its index is "
    "known only when the program runs, or an array that may name an element twice: only sums can "
    "be undone there, `ref[i] += x` at integers, `ref.at[i].add(x)` at arrays of them",
)
def reversible_overwriting_at_an_index(r, i):
    def program(k):
        def step(n, _):
            r[n] = -r[n]

        out = jnp.sum(r[...] ** 2 * k)
        refs.fori_loop(0, 3, step, None)
        return out

    gradient(program)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: what it adds "
    "needs a part of the loop's carry that can't be undone: in refs.Fixed only refs can. Write "
    "to another ref, keep the old value in one, or use refs.checkpoint",
)
def reversible_carry_in_an_exact_mode(r, i):
    def program(k):
        def step(c, _):
            r[...] += jnp.sin(c)
            return c * 1.5, None

        refs.scan(step, k, None, 3)
        return r[0]

    gradient(program, mode=refs.Fixed(20))


@raises(
    errors.NotReversibleError,
    "reversible: the derivative at FILE:N needs a value that was computed at FILE:N, which doesn't "
    "follow from what is known at the end. Update by sums, `a = a + f(b)`, keep it in a ref that "
    "isn't written again, or use refs.inverse or refs.checkpoint",
)
def reversible_number_from_outside(r, i):
    s = refs.new_ref(jnp.ones(3))

    def program(k):
        def step(_, x):
            s[...] += k * x
            return None, None

        refs.scan(step, None, jnp.arange(3.0))
        y = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), 2.0)
        z = refs.io_callback(lambda: np.float32(2.0), jax.ShapeDtypeStruct((), jnp.float32))
        return jnp.sum(s[...]) * y * z

    gradient(program)


@raises(
    errors.NotReversibleError,
    "reversible: the derivative rule of `custom_jvp_call` at FILE:N closes over a value that is "
    "computed outside of it, and runs when that is gone: pass the value to the custom function as "
    "an argument",
)
def reversible_rule_that_closes_over_a_value(r, i):
    def program(k):
        two = jnp.sum(jnp.ones(2))

        @jax.custom_jvp
        def double(x):
            return 2 * x

        double.defjvp(lambda x, t: (double(*x), t[0] * two))
        r[...] += double(k)
        return r[0]

    refs.jit(lambda: gradient(program))()


@raises(
    errors.NotReversibleError,
    "reversible: what `host_callback` at FILE:N does to ref `r` (created at FILE:N) can't be "
    "undone: write the ref outside of it, or use refs.checkpoint",
)
def reversible_callback(r, i):
    def program(k):
        s = refs.new_ref(0.0)
        s[...] += jnp.sum(jnp.sin(k * r[...]))
        refs.io_callback(lambda r: None, None, r)
        return s[...]

    gradient(program)


@raises(
    errors.RefTypeError,
    "reversible: a second derivative of a function in mode refs.Fixed, whose states are integers: "
    "use mode 'float'",
)
def reversible_second_derivative_of_integers(r, i):
    def program(k):
        r[...] += k**2
        return r[0]

    refs.grad(refs.grad(refs.reversible(program, mode=refs.Fixed(20))))(1.0)


@raises(
    errors.RefTypeError,
    "reversible: a ref (created at FILE:N) has dtype complex64, and mode Fixed(bits=24) keeps real "
    "numbers: use mode 'float', or two refs",
)
def reversible_complex_in_fixed(r, i):
    z = refs.new_ref(jnp.ones(2, jnp.complex64))

    def program(k):
        z[...] += k
        return z[0].real

    gradient(program, mode=refs.Fixed())


@raises(
    errors.RefValueError,
    "reversible: ref `r` (created at FILE:N) has dtype float32, which is kept as a 32-bit integer, "
    "and Fixed(bits=40) asks for 40 binary places: 31 are the most",
)
def reversible_too_many_bits(r, i):
    def program(k):
        r[...] += k
        return r[0]

    gradient(program, mode=refs.Fixed(40))


@raises(
    errors.RefValueError,
    "refs.Fixed(bits=64): the number of binary places is an integer from 0 to 31, or to 63 for "
    "float64",
)
def fixed_of_too_many_bits(r, i):
    refs.Fixed(64)


@raises(
    errors.RefValueError,
    "reversible: mode 'exact': a mode is 'float' or refs.Fixed(bits)",
)
def reversible_in_no_mode(r, i):
    refs.reversible(lambda: None, mode="exact")


@raises(
    errors.RefValueError,
    "reversible: tolerance -1: it is a number, not negative, or None",
)
def reversible_with_a_negative_tolerance(r, i):
    refs.reversible(lambda: None, tolerance=-1)


@raises(
    errors.RefValueError,
    "reversible: anchors 0: it is a positive number of steps, or None",
)
def reversible_without_steps_between_anchors(r, i):
    refs.reversible(lambda: None, anchors=0)


@raises(
    errors.RefTypeError,
    "inverse: ref `r` (created at FILE:N) is an argument, and the function is one of arrays: pass "
    "its value, `ref[...]`",
)
def inverse_of_a_ref(r, i):
    refs.inverse(lambda x: x, lambda x: x)(r)


@raises(errors.RefTypeError, "inverse: the first argument is a list: it must be one array")
def inverse_of_a_list(r, i):
    refs.inverse(lambda x: x, lambda x: x)([1.0])


@raises(
    errors.RefTypeError,
    "inverse: a function touches ref `r` (created at FILE:N): read it before, `ref[...]`, and pass "
    "the value",
)
def inverse_that_touches_a_ref(r, i):
    refs.inverse(lambda x: x + r[...], lambda x: x - r[...])(X)


@raises(errors.RefTypeError, "inverse: a function returns 2 arrays: it must be one")
def inverse_of_a_function_to_two(r, i):
    refs.inverse(lambda x: (x, x), lambda x: x)(X)


@raises(
    errors.RefValueError,
    "inverse: the inverse gives float32[4], and the first argument is float32[3]",
)
def inverse_of_another_shape(r, i):
    refs.inverse(lambda x: x, lambda x: lax.pad(x, 0.0, [(0, 1, 0)]))(X)


@raises(
    errors.RefEscapeError,
    "check_reversible inside a transformation: it transforms the function itself. Call it at top "
    "level",
)
def check_reversible_inside(r, i):
    refs.jit(lambda: refs.testing.check_reversible(lambda: None))()


@raises(
    AssertionError,
    "check_reversible: the gradient with respect to ref `r` (created at FILE:N) is off by 0.0e+00, "
    "and may by -1\ngradient: differs by 0.0e+00 from the one with a tape\nref `r` (created at "
    "FILE:N): off by 0.0e+00, 0 bits\nFILE:N: ref `r` (created at FILE:N): a sum, undone",
)
def check_reversible_that_fails(r, i):
    def program(k):
        r[...] += k

    refs.testing.check_reversible(program, 1.0, rtol=-1)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: which branch "
    "was taken isn't known afterwards. Choose by what isn't written again, a counter for instance",
)
def reversible_branch_by_what_is_written(r, i):
    def program(k):
        out = jnp.sum(r[...] ** 2 * k)
        refs.cond(r[0] > 0, lambda: r.set(r[...] + k), lambda: r.set(r[...] - 1))
        return out

    gradient(program)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: the number of "
    "steps of a while_loop in another one isn't kept: use scan or fori_loop for one of the two",
)
def reversible_while_loop_in_a_while_loop(r, i):
    def program(k):
        def step(n):
            def inner(m):
                r[...] += jnp.sin(k)
                return m + 1

            refs.while_loop(lambda m: m < 2, inner, 0)
            r[0] += r[1]
            return n + 1

        out = jnp.sum(r[...] ** 2 * k)
        refs.while_loop(lambda n: n < 2, step, 0)
        return out

    gradient(program)


@raises(
    errors.NotReversibleError,
    "reversible: the write of ref `r` (created at FILE:N) at FILE:N can't be undone: the old value "
    "is lost: in refs.Fixed sums, moves and negation are undone, and products with a number, in "
    "loops with a known number of steps. Update by sums, `ref[...] += x`, keep the old value in a "
    "ref, or use refs.checkpoint",
)
def reversible_product_with_what_is_traced(r, i):
    def program(k):
        r[...] *= k
        return r[0]

    gradient(program, mode=refs.Fixed(20))


@raises(
    errors.NotReversibleError,
    "reversible: the write of a ref (created at FILE:N) at FILE:N can't be undone: the old value "
    "is lost. Update by sums, `ref[...] += x`, keep the old value in a ref, or use refs.checkpoint",
)
def reversible_overwriting_by_a_number(r, i):
    s = refs.new_ref(0.5)

    def program(k):
        out = s[...] ** 2 * k
        s[...] = 1.0
        return out

    gradient(program)
