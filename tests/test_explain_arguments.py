"""`refs.explain` and `assert_in_place`: which refs a function is given, and their names."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import refs
from refs.testing import assert_in_place

pytestmark = pytest.mark.as_released

N = 10_000


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, is_ref=True)


def told(report):
    return [(r.name, r.type, r.does, r.keeps_memory) for r in report.refs]


def test_abstract_refs_are_named_by_their_paths():
    def step(state, x, *, n):
        state["w"][0] = x * state["b"][1]
        n[...] += 1

    state = refs.tree.abstract({"w": refs.new_ref(jnp.zeros(N)), "b": refs.new_ref(jnp.zeros(3))})
    n = jax.ShapeDtypeStruct((), jnp.int32, is_ref=True)
    report = refs.explain(step, state, 1.0, n=n)
    assert told(report) == told(refs.jit(step).explain(state, 1.0, n=n))
    assert told(report) == [
        ("state['b']", "float32[3]", "read", None),
        ("state['w']", f"float32[{N}]", "written", True),
        ("n", "int32[]", "added to", True),
    ]


def test_an_abstract_ref_in_two_places_is_two():
    def step(a, b):
        a[0] = b[0]

    one = abstract(N)
    report = refs.explain(step, one, one)
    assert told(report) == [
        ("a", f"float32[{N}]", "written", True),
        ("b", f"float32[{N}]", "read", None),
    ]


def test_abstract_refs_are_in_place():
    def swap(state, k):
        w = state["w"]
        w[k], w[k + 1] = w[k + 1], w[k]

    def keeping(state, k):
        old = state["w"][...]
        swap(state, k)
        return old

    def keeping_by_hand(state, k):
        w = state["w"]
        return {"w": w.at[k].set(w[k + 1]).at[k + 1].set(w[k])}, w

    state = {"w": abstract(N)}
    assert_in_place(swap, state, 3)
    with pytest.raises(AssertionError, match=r"as many as ref `state\['w'\]`"):
        assert_in_place(keeping, state, 3)
    assert_in_place(keeping, state, 3, like=keeping_by_hand)


def test_keywords_in_another_order_than_the_parameters():
    """JAX sorts keywords by name; a report is by the order of the program's arguments."""

    def step(x, b, a, **others):
        b[0] = a[0] * x
        others["z"][0] = x

    sizes = {"a": 3, "b": N, "z": 4}
    given = {name: refs.new_ref(jnp.zeros(n)) for name, n in sizes.items()}
    assert told(refs.explain(step, 1.0, **given)) == [
        ("a", "float32[3]", "read", None),
        ("b", f"float32[{N}]", "written", True),
        ("z", "float32[4]", "written", True),
    ]


class Plain:
    def __init__(self):
        self.w = refs.new_ref(jnp.zeros(N), name="w")

    @refs.jit
    def step(self, r, x=2.0):
        self.w[0] = r[1] * x

    @refs.jit
    def keep(self, r):
        old = r[...]
        r[0] = 1.0
        return old

    def not_compiled(self, r, x=2.0):
        self.w[0] = r[1] * x


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    w: refs.Ref

    step, keep, not_compiled = Plain.step, Plain.keep, Plain.not_compiled

    @functools.partial(jax.jit, donate_argnums=1)
    def of_arrays(self, x):
        return x.at[0].set(1.0)


@pytest.mark.parametrize("method", ["step", "not_compiled"])
@pytest.mark.parametrize(
    ("make", "w", "role"),
    [(Plain, "w", "closed over"), (lambda: Tree(refs.new_ref(jnp.zeros(N))), "self.w", "argument")],
)
def test_bound_methods(method, make, w, role):
    instance = make()
    step = getattr(instance, method)
    report = refs.explain(step, refs.new_ref(jnp.zeros(3)), x=1.0)
    if method == "step":
        assert {(r.name, r.role, r.does) for r in report.refs} == {
            (w, role, "written"),
            ("r", "argument", "read"),
        }
    assert report.function == method
    assert_in_place(step, refs.new_ref(jnp.zeros(3)), 1.0)


@pytest.mark.parametrize("make", [Plain, lambda: Tree(refs.new_ref(jnp.zeros(N)))])
def test_a_ref_that_a_bound_method_is_given_is_named(make):
    with pytest.raises(AssertionError, match=r"as many as ref `r` \(created"):
        assert_in_place(make().keep, refs.new_ref(jnp.zeros(N)))
    assert_in_place(make().keep, refs.new_ref(jnp.zeros(N)), like=lambda r: (r.at[0].set(1.0), r))


def test_a_bound_method_that_jax_compiles():
    tree = Tree(jnp.zeros(3))
    assert_in_place(tree.of_arrays, jnp.zeros(N))
    assert refs.explain(tree.of_arrays, jnp.zeros(N)).refs == ()


# --- Refs that are made inside, and other names of a ref


def test_a_ref_that_is_made_here_and_used_inside_others_has_one_row():
    def step(x):
        t = refs.new_ref(x, name="t")
        refs.new_ref(x, name="unused")

        def add(k, _):
            t[k] += 1.0

        refs.fori_loop(0, 3, add, None)
        refs.fori_loop(0, 2, add, None)

    t, unused = refs.explain(step, jnp.zeros(3)).refs
    assert (t.name, t.role, t.does, len(t.lines)) == ("t", "made inside", "added to", 2)
    assert (unused.name, unused.does) == ("unused", "not touched")


def test_a_ref_with_a_second_name():
    def step(r):
        again = checkpoint_name(r, "again")
        again[0] = 1.0

    r = refs.new_ref(jnp.zeros(3), name="r")
    assert [(x.name, x.does) for x in refs.explain(step, r).refs] == [("r", "written")]


@refs.jit
def made(x):
    s = refs.new_ref(x, name="s")
    s[0] = 2.0
    return s


@refs.jit
def made_beside(r, x):
    r[0] += 1.0
    return made(x)


def test_a_ref_that_a_compiled_function_makes_and_returns_has_one_row():
    def step(x):
        a, b = made(x), refs.jit(made)(x)
        c = made_beside(a, x)
        d = made_beside(a, c[...])  # of the same jaxpr
        d[2] = 4.0
        a[1] *= 2.0
        b[1] = c[1]
        return a, c

    report = refs.explain(step, jnp.ones(3))
    assert [(r.name, r.role, r.does) for r in report.refs] == [
        ("s", "made inside", "written, added to, multiplied"),
        ("s", "made inside", "written"),
        ("s", "made inside", "written, read"),
        ("s", "made inside", "written"),
    ]
    assert len({r.created for r in report.refs}) == 1
    for r in refs.jit(step)(jnp.ones(3)):
        assert str(r.name) == "s"


def test_a_ref_of_the_value_of_another_one_is_another():
    def value(x):
        r = refs.new_ref(x, name="r")
        r[0] = 2.0
        return r[...]

    def step(x):
        again = refs.new_ref(value(x), name="again")
        again[1] = 3.0
        return again

    assert [(r.name, r.does) for r in refs.explain(step, jnp.ones(3)).refs] == [
        ("r", "written, read"),
        ("again", "written"),
    ]


def test_refs_that_are_made_in_a_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        r = refs.new_ref(x, name="r")
        r[0] = 2.0
        return r[...]

    step = jax.shard_map(body, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    [ref] = refs.explain(step, jnp.ones(3)).refs
    assert (ref.name, ref.does) == ("r", "written, read")
    assert [x.inside[0].split(" at ")[0] for x in ref.lines] == ["shard_map"] * 2
