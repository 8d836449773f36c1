"""What refs have been through is not seen: histories of all that can be done to a few refs.

Each step draws what it does, and does it to the refs of a pool and, in plain Python, to their
models, which are NumPy arrays. After each all refs hold what their models hold. A step that
doesn't end ends the process, and the stacks of its threads are printed.

    HYPOTHESIS_PROFILE=nightly python -m pytest tests/histories --hypothesis-seed=0
"""

import copy
import faulthandler
import gc
import pickle
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import refs
from refs.errors import RefStateError
from tests import oracle
from tests.faults.harness import OnPurpose, is_caused_by, side_by_side
from tests.histories import programs
from tests.histories.programs import ATOMIC, CALL_BACK, WAYS, prepared
from tests.laws.ways import fewer, observed, same
from tests.processes import run_again_with_devices

N = jax.device_count()
LIMIT = 30  # seconds; a step takes less than one
MOST = 6  # refs

seeds = st.integers(0, 2**64 - 1)
randoms = st.randoms(use_true_random=False)
TYPES = [
    (np.dtype(name), shape)
    for name in ("float32", "int32", "uint8", "bool", "complex64")
    for shape in ((), (2,), (3, 2))
]


def made_in_jit(value):
    return refs.jit(refs.new_ref)(value)


def made_empty(value):
    r = refs.empty_ref(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding))
    r[...] = value
    return r


MAKERS = {"new_ref": refs.new_ref, "in jit": made_in_jit, "empty_ref": made_empty}
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda r: pickle.loads(pickle.dumps(r)),
    "new_ref": lambda r: refs.new_ref(r[...]),
}


class Histories(RuleBasedStateMachine):
    """A pool of refs, and of what they must hold."""

    def __init__(self):
        super().__init__()
        self.refs, self.models, self.steps = {}, {}, []
        self.names = (f"p{k}" for k in count())
        for k in range(3):
            self.add(refs.new_ref(jnp.full(2, k, jnp.float32)), np.full(2, k, np.float32))
        # What is written together may be kept together: each history begins with some that are.
        write_together([*self.refs.values()], [])
        mix([*self.models.values()], [])

    def add(self, ref, value):
        name = next(self.names)
        self.refs[name], self.models[name] = ref, oracle.Ref(value)

    def remove(self, name):
        """The ref, which steps that are made again don't use."""
        self.steps = [step for step in self.steps if name not in step.names]
        return self.refs.pop(name), self.models.pop(name)

    has_room = precondition(lambda self: len(self.refs) < MOST)
    has_some = precondition(lambda self: len(self.refs) > 2)

    # -- Refs come and go ------------------------------------------------------------------------

    @has_room
    @rule(type=st.sampled_from(TYPES), how=st.sampled_from([*MAKERS]), device=st.integers(0, N - 1))
    def make(self, type, how, device):
        dtype, shape = type
        value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        placed = jax.device_put(value, jax.devices()[device]) if device else jnp.array(value)
        self.add(MAKERS[how](placed), value)

    @has_room
    @rule(random=randoms, how=st.sampled_from([*COPIES]))
    def copy(self, random, how):
        name = random.choice([*self.refs])
        self.add(COPIES[how](self.refs[name]), self.models[name].value)

    @has_some
    @rule(random=randoms, collect=st.booleans())
    def forget(self, random, collect):
        self.remove(random.choice([*self.refs]))
        if collect:
            gc.collect()

    @has_some
    @rule(random=randoms, freezes=st.booleans(), way=st.sampled_from([*WAYS]))
    def end(self, random, freezes, way):
        """It says so when it is used."""
        names = self.some(random)
        name = random.choice(names)
        if freezes:
            assert same(np.array(refs.freeze(self.refs[name])), self.models[name].value)
        else:
            refs.free_ref(self.refs[name])
        with pytest.raises(RefStateError, match="which was fr"):
            self.refs[name][...]
        with pytest.raises(Exception, match="which was fr") as caught:
            WAYS[way](lambda *rs: tuple(r[...] for r in rs), *(self.refs[n] for n in names))
        assert is_caused_by(caught.value, RefStateError)
        self.remove(name)

    # -- Programs --------------------------------------------------------------------------------

    def some(self, random):
        """Refs that lie on the same device, in any order."""
        device = random.choice([*self.refs.values()]).sharding
        names = [name for name, ref in self.refs.items() if ref.sharding == device]
        return random.sample(names, random.randint(1, min(4, len(names))))

    def step(self, random, seed, way, then=lambda: None):
        names = self.some(random)
        cut = random.randint(1, len(names))
        program = programs.draw(seed, self.models, names[:cut], names[cut:], way)
        note(f"{way}: {program}\n{program.arguments()}\n")
        return prepared(program, names, way, self.refs, self.models, then)

    @rule(random=randoms, seed=seeds, way=st.sampled_from([*WAYS]))
    def run(self, random, seed, way):
        step = self.step(random, seed, way)
        self.steps.append(step)
        self.compare(step, self.refs, self.models)

    @precondition(lambda self: self.steps)
    @rule(random=randoms)
    def run_again(self, random):
        """On the same refs, or, if it closes over none, on others of their types and devices."""
        step = random.choice(self.steps)
        kinds = {}
        for name, ref in self.refs.items():
            kinds.setdefault((ref.dtype, ref.shape, ref.sharding), []).append(name)
        others = {name: name for name in self.refs}
        for names in kinds.values() if not step.closes_over_refs else ():
            others |= zip(names, random.sample(names, len(names)), strict=True)
        self.compare(
            step,
            {name: self.refs[other] for name, other in others.items()},
            {name: self.models[other] for name, other in others.items()},
        )

    def compare(self, step, pool, models):
        with np.errstate(over="ignore"):
            expected = step.model(models)
        got = step.function(pool)
        if got is None:
            return
        cells, of = ({name: pool[name] for name in step.names} for pool in (models, pool))
        expected, found = observed(expected, cells), observed(got, of)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert same(value, found[name]), (name, value, found[name])
        for k, ref in enumerate(got):
            if isinstance(ref, refs.Ref) and not any(ref is r for r in self.refs.values()):
                self.add(ref, expected[f"results[{k}][...]"])

    @rule(random=randoms, seed=seeds, way=st.sampled_from(ATOMIC), runs=st.booleans())
    def fail(self, random, seed, way, runs):
        """It raises when it is traced or when it runs, and nothing has changed."""
        step = self.step(random, seed, way, fail_when_run if runs else fail)
        for _ in range(2):
            with pytest.raises(Exception) as caught:  # noqa: PT011  # of JAX's, from a callback
                step.function(self.refs)
                jax.effects_barrier()  # What touches no refs is JAX's own, and may be running.
            assert is_caused_by(caught.value, OnPurpose)

    @rule(random=randoms, jits=st.booleans())
    def map_lanes(self, random, jits):
        """Each lane has a row of the refs that have such, and shares what it only reads."""
        names = [name for name in self.some(random) if self.models[name].shape]
        if not names:
            return
        size = self.models[names[0]].shape[0]
        mapped = [name for name in names if self.models[name].shape[0] == size]
        written = mapped[: random.randint(1, len(mapped))]
        read = [name for name in names if name not in written]
        axes = [0] * len(written), [0 if name in mapped else None for name in read]
        transform = refs.jit(refs.vmap(mix, axes)) if jits else refs.vmap(mix, axes)
        transform([self.refs[name] for name in written], [self.refs[name] for name in read])
        for k in range(size):
            rows = {name: self.models[name].at[k] for name in mapped}
            shared = [rows.get(name, self.models[name]) for name in read]
            mix([rows[name] for name in written], shared)

    # -- Callbacks and threads -------------------------------------------------------------------

    def mix(self, random, way, program):
        """`program(written, read, handles of what is read)` in this way, and what it must do."""
        names = self.some(random)
        cut = random.randint(1, len(names))
        handles = [self.refs[name] for name in names]

        def function(*args):
            program(args[:cut], args[cut:], handles[cut:])
            return ()

        WAYS[way](function, *handles)
        mix([self.models[n] for n in names[:cut]], [self.models[n] for n in names[cut:]])

    @rule(random=randoms, way=st.sampled_from([*WAYS]))
    def write_and_read(self, random, way):
        """All that are there, where a random program might leave some alone."""
        self.mix(random, way, lambda written, read, _: mix(written, read))

    @rule(random=randoms, way=st.sampled_from(CALL_BACK), reads_itself=st.booleans())
    def call_back(self, random, way, reads_itself):
        """With what it reads among its arguments, or not."""

        def program(written, read, handles):
            if reads_itself:
                host = lambda ws: mix(ws, [*map(np.asarray, handles)])  # noqa: E731
                refs.io_callback(host, None, written)
            else:
                refs.io_callback(mix, None, written, [r[...] for r in read])

        self.mix(random, way, program)

    @has_some
    @rule(random=randoms, seeds=st.lists(seeds, min_size=4, max_size=4), data=st.data())
    def beside(self, random, seeds, data):
        """Two threads, which write refs of their own and may read the same others."""
        names = random.sample([*self.refs], len(self.refs))
        shared, threads = names[2:], ([], [])
        for k, seed in enumerate(seeds):
            way = data.draw(st.sampled_from(ATOMIC))
            own = names[k % 2]
            kind = self.refs[own].sharding
            read = [name for name in shared if self.refs[name].sharding == kind]
            program = programs.draw(seed, self.models, [own], read, way)
            step = prepared(program, [own, *read], way, self.refs, self.models)
            threads[k % 2].append(step)

        def runner(steps):
            return lambda: [self.compare(step, self.refs, self.models) for step in steps]

        side_by_side(*map(runner, threads))

    # -- After each step -------------------------------------------------------------------------

    @invariant()
    def all_refs_hold_what_they_must(self):
        for name, model in self.models.items():
            got = np.array(self.refs[name])
            assert same(got, model.value), (name, got, model.value)
        faulthandler.dump_traceback_later(LIMIT, exit=True)

    def teardown(self):
        faulthandler.cancel_dump_traceback_later()
        if next(histories) % 100 == 0:
            programs.forget()


histories = count(1)


def fail():
    raise OnPurpose


def fail_when_run():
    refs.io_callback(fail, None)


def mix(written, read):
    """What a callback or a lane does to arrays or refs."""
    n = np.int32(1) + sum(x[...].real.astype(np.int32).sum(dtype=np.int32) for x in read) % 5
    for w in written:
        is_bool = w.dtype == bool
        w[...] = w[...] ^ (n % 2 == 1) if is_bool else w[...] + n.astype(w.dtype)


write_together = refs.jit(mix)


if N > 1:
    TestHistories = Histories.TestCase
    TestHistories.settings = fewer(2, stateful_step_count=10)
else:

    @pytest.mark.slow
    def test_histories_on_two_devices():
        run_again_with_devices(2, __file__, "-s")  # the stacks of a step that hangs are to be seen
