"""`refs.testing.check_reversible`: the report, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import NotReversibleError
from refs.testing import check_reversible
from tests.reversible import programs
from tests.reversible.common import FIXED, MODES, WS, X, Y

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def a():
    return refs.new_ref(X, name="a")


@pytest.fixture
def b():
    return refs.new_ref(Y, name="b")


def short(ref):
    """A ref's name, without its birthplace."""
    return ref.split(" (")[0]


# --- The report


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_report(a, b, mode):
    report = check_reversible(programs.sums, a, b, WS, mode=mode)
    assert [short(r.ref) for r in report.refs] == ["ref `a`", "ref `b`"]
    assert report.gradient < 1e-8
    for r in report.refs:
        if mode == "float":
            assert 0 <= r.drift < 1e-12
            assert r.bits >= 0
        else:
            assert r.drift == r.bits == 0
    assert [(short(w.ref), w.how) for w in report.writes] == [
        ("ref `a`", "a sum, undone"),
        ("ref `b`", "a sum, undone"),
    ]
    assert all("programs.py:" in w.line for w in report.writes)
    np.testing.assert_array_equal(a[...], X)
    np.testing.assert_array_equal(b[...], Y)


def test_text():
    a, b = refs.new_ref(1.0, name="a"), refs.new_ref(2.0, name="b")

    def program(k):
        a[...] += k * b[...]
        b[...] = -b[...]

    report = check_reversible(program, 3.0)
    [first, second] = report.refs
    [add, negate] = report.writes
    assert str(report).splitlines() == [
        f"gradient: differs by {report.gradient:.1e} from the one with a tape",
        f"{first.ref}: off by 0.0e+00, 0 bits",
        f"{second.ref}: off by 0.0e+00, 0 bits",
        f"{add.line}: {first.ref}: a sum, undone",
        f"{negate.line}: {second.ref}: a new value, undone",
    ]
    assert first.ref.startswith("ref `a` (created at ")


def test_floats_that_are_off(a, b):
    def program(k):
        def step(_, __):
            a[...] *= 1.1
            a[...] += k * jnp.sin(b[...])
            b[...] += a[...] / 3

        refs.fori_loop(0, 20, step, None)

    report = check_reversible(program, 0.3)
    assert any(r.drift > 0 for r in report.refs)
    assert all(r.bits > 0 for r in report.refs if r.drift > 0)
    exact = check_reversible(program, 0.3, mode=FIXED)
    assert all(r.drift == r.bits == 0 for r in exact.refs)


def test_a_sink_is_not_needed(a, b):
    log = refs.new_ref(np.zeros(4), name="log")
    mean = refs.new_ref(np.zeros(6), name="mean")

    def program(ws):
        def layer(k, w):
            a[...] += jnp.tanh(b[...]) * w
            log[k] = jnp.sum(a[...])
            mean[...] = 0.9 * mean[...] + 0.1 * jnp.roll(a[...], 1)
            mean[0] = mean[1]
            b[...] -= jnp.sin(a[...]) * w
            return k + 1, None

        refs.scan(layer, 0, ws)
        return jnp.sum(a[...])

    report = check_reversible(program, WS)
    found = {short(r.ref): (r.drift, r.bits) for r in report.refs}
    assert found["ref `log`"] == found["ref `mean`"] == (None, None)
    assert found["ref `a`"][0] is not None
    lines = str(report).splitlines()
    assert sum(line.endswith(": not needed") and "created" in line for line in lines) >= 2
    hows = {short(w.ref): w.how for w in report.writes}
    assert hows["ref `log`"] == hows["ref `mean`"] == "a new value, not needed"
    assert hows["ref `a`"] == "a sum, undone"


@pytest.mark.parametrize("anchors", [None, 2])
@pytest.mark.parametrize("mode", ["float", FIXED], ids=str)
def test_options_of_the_gradient(a, b, mode, anchors):
    report = check_reversible(programs.sums, a, b, WS, mode=mode, anchors=anchors, tolerance=1e-6)
    assert report.gradient < 1e-8


@pytest.mark.parametrize(
    "program", [programs.nested, programs.branching, programs.rows, programs.with_own_refs]
)
def test_writes_in_loops_are_listed_once(a, b, program):
    report = check_reversible(program, a, b, WS)
    of_a = [w for w in report.writes if short(w.ref) == "ref `a`"]
    assert report.gradient < 1e-10
    assert len(of_a) in (0, 1) or program is programs.nested
    assert all(w.how.endswith("undone") for w in of_a)


def test_writes_in_a_while_loop():
    a = refs.new_ref(1.0, name="a")

    def program(k):
        def step(i):
            a[...] += jnp.sin(k)
            return i + 1

        refs.while_loop(lambda i: i < 3, step, 0)

    report = check_reversible(program, 2.0)
    assert [w.how for w in report.writes] == ["a sum, undone"]
    assert report.gradient is None
    assert str(report).startswith("gradient: not compared: JAX has none of a while_loop")


def test_counters_and_keys():
    n = refs.new_ref(0, name="n")
    a, b = refs.new_ref(X, name="a"), refs.new_ref(Y, name="b")
    key = refs.new_ref(jax.random.key(0), name="key")
    root = refs.new_ref(jax.random.key(1), name="root")

    def program(ws):
        def layer(w):
            n[...] += 1
            kept = jax.random.bernoulli(jax.random.fold_in(root[...], n[...]), 0.5, (6,))
            key[...] = jax.random.fold_in(key[...], 1)
            a[...] += jnp.sin(b[...]) * w * kept
            b[...] -= jnp.cos(a[...])

        programs.scan(layer, ws)
        return jnp.sum(a[...])

    before = jax.random.key_data(key[...])
    report = check_reversible(program, WS)
    found = {short(r.ref): (r.drift, r.bits) for r in report.refs}
    assert found["ref `n`"] == (0.0, 0)
    assert found["ref `key`"] == (None, None)
    assert "ref `root`" not in found
    assert report.gradient < 1e-10
    np.testing.assert_array_equal(jax.random.key_data(key[...]), before)
    assert n[...] == 0


def test_keys_that_are_exchanged():
    first = refs.new_ref(jax.random.key(0), name="first")
    second = refs.new_ref(jax.random.key(1), name="second")
    a = refs.new_ref(X, name="a")

    def program(ws):
        def layer(w):
            old = first[...]
            first[...] = second[...]
            second[...] = old
            a[...] += w * jnp.exp(jax.random.normal(second[...], (6,), np.float64) * w)

        programs.scan(layer, ws)
        return jnp.sum(a[...])

    report = check_reversible(program, WS)
    found = {short(r.ref): (r.drift, r.bits) for r in report.refs}
    assert found["ref `first`"] == found["ref `second`"] == (0.0, 0)


def test_nothing_that_has_a_derivative():
    n = refs.new_ref(np.int32(3), name="n")

    def program(k):
        n[...] += k
        return n[...] * 2

    report = check_reversible(program, 4)
    assert report.gradient == 0
    assert [short(r.ref) for r in report.refs] == ["ref `n`"]
    assert n[...] == 3


def test_nothing_at_all():
    report = check_reversible(lambda: None)
    assert (report.refs, report.writes, report.gradient) == ((), (), 0)
    assert str(report) == "gradient: differs by 0.0e+00 from the one with a tape"


def test_refs_that_it_only_reads(a):
    report = check_reversible(lambda k: jnp.sum(a[...] * k), 2.0)
    assert (report.refs, report.writes) == ((), ())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_smaller_floats(dtype):
    a, b = (refs.new_ref(jnp.asarray(x, dtype), name=n) for x, n in ((X, "a"), (Y, "b")))
    # Floats of 16 bits are restored to a hundredth.
    report = check_reversible(programs.sums, a, b, jnp.asarray(WS, dtype), tolerance=0.03)
    assert report.gradient < (0.1 if dtype == jnp.bfloat16 else 1e-4)
    assert all(r.drift is not None for r in report.refs)


def test_complex_numbers():
    z = refs.new_ref(jnp.asarray(X + 1j * Y), name="z")

    def program(k):
        z[...] += k * 1j
        z[...] = -z[...]
        return jnp.sum(jnp.abs(z[...]) ** 2)

    report = check_reversible(program, 0.5)
    assert report.gradient < 1e-10
    assert report.refs[0].drift < 1e-12


def test_what_cannot_be_undone(a):
    def program(k):
        a[...] = jnp.tanh(k * a[...])

    with pytest.raises(NotReversibleError, match="the write of ref `a`"):
        check_reversible(program, 2.0)
    np.testing.assert_array_equal(a[...], X)


def test_what_is_not_restored(a, b):
    with pytest.raises(AssertionError, match="is NaN: the state was not restored within the") as e:
        check_reversible(programs.expanding, a, b, WS)
    assert "gradient: differs by nan" in str(e.value)
    np.testing.assert_array_equal(a[...], X)


def test_a_wrong_gradient(a, b):
    with pytest.raises(AssertionError, match=r"is off by \S+, and may by 1e-06"):
        check_reversible(programs.expanding, a, b, WS, tolerance=None)


def test_a_gradient_that_is_nan_itself(a):
    def program(k):
        a[...] += jnp.sqrt(k)

    with pytest.raises(AssertionError, match="is NaN: the plain gradient isn't finite either"):
        check_reversible(program, -1.0)


def test_a_while_loop_whose_gradient_is_nan(a, b):
    """There is no plain gradient to tell why."""

    def program(k):
        def step(n):
            a[...] += 9 * k * jnp.sin(b[...] ** 2)
            b[...] += 9 * a[...]
            return n + 1

        refs.while_loop(lambda n: n < 90, step, 0)
        return jnp.sum(a[...])

    with pytest.raises(AssertionError, match="or the plain gradient isn't finite either"):
        check_reversible(program, 1.0, tolerance=0.0)


def test_a_reversible_function_is_checked_with_its_own_options():
    def program(a, b, ws):
        return programs.sums(a, b, ws)

    a, b = refs.new_ref(X), refs.new_ref(2 * X)
    wrapped = refs.reversible(program, mode=FIXED)
    report = check_reversible(wrapped, a, b, WS)
    assert all(r.bits == 0 for r in report.refs)
    assert report.gradient is not None
    assert 0 < report.gradient < 1e-8  # It is compared with the plain one, not with itself.


@pytest.mark.parametrize(
    "make",
    [
        lambda: refs.reversible(len, tolerance=True),
        lambda: refs.reversible(len, anchors=True),
        lambda: refs.Fixed(True),
    ],
)
def test_a_bool_is_no_number(make):
    with pytest.raises(refs.errors.RefValueError, match="True"):
        make()
