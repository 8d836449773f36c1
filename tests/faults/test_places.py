"""Where CPython handles signals, asked of the interpreter that runs the tests."""

import ctypes
import dis
import signal
import sys
import threading
import types

import pytest

from refs._supported import NEWEST_PYTHON
from tests.faults.interruptions import LOOKOUTS


class Sig(int):
    """`s.now` makes a signal come, and looks for none itself."""

    now = property(ctypes.PyDLL(None)["raise"])


# A signal comes, and is handled after the first instruction that looks for one.
STRAIGHT = {
    "call": "s.now; len(())",
    "method": "s.now; [].append(1)",
    "keyword": "s.now; dict(a=1)",
    "star": "s.now; len(*((),))",
    "attributes": "s.now; a = s.real; v.a = a; del v.a; len(())",
    "items": "s.now; d[1] = 2; a = d[1]; del d[1]; len(())",
    "operators": "s.now; a = 1; a += 2; b = a < 3; c = not a; e = a is b; f = a in (1, 2); len(())",
    "displays": "s.now; a = [1, *d]; b = {1, *d}; c = {'a': 1, **d}; e, *f = [1, 2]; len(())",
    "import": "s.now; import sys; from sys import path; len(())",
    "function": "s.now; f = lambda: 0; len(())",
    "with": "s.now\nwith v.lock:\n len(())",
}
LOOPS = {
    "inner": "s.now; (lambda: 0)()",
    "generator": "for k in (s.now for _ in (1,)): pass",
    "for": "for k in 1, 2:\n if k == 1: s.now\n",
    "while": "a = 3\nwhile a:\n a -= 1\n if a == 2: s.now",
    "while not": "a = b = 0\nwhile not a:\n a, b = b, 1\n if not a: s.now",
    "while None": "a = b = None\nwhile a is None:\n a, b = b, 1\n if a is None: s.now",
    "while not None": "a = b = 1\nwhile a is not None:\n a, b = b, None\n if a: s.now",
}


def test_this_interpreter_was_looked_at():
    assert (3, 11) <= sys.version_info[:2] <= NEWEST_PYTHON, (
        "The proof in refs/_buffers/exchange.py stands on where CPython handles signals and "
        "switches threads, and nobody has looked at this version. Do the other tests of this file "
        "pass? Does `list += map(...)` still keep what it got before an error? Then run "
        "`REFS_FAULTS=full python -m pytest tests/faults tests/buffers` on it, and if nothing is "
        "lost or torn, raise the number in `refs/_supported.py`"
    )


def test_a_list_keeps_what_it_got_before_an_error():
    """As `exchange` takes: what `pop` gave before it found an empty cell is in the list."""
    cells, held = [[1], [2], [], [4]], []
    put_back = map(list.append, cells, held)
    with pytest.raises(IndexError):
        held += map(list.pop, cells)
    assert (held, cells) == ([1, 2], [[], [], [], [4]])
    assert [*put_back] == [None, None]
    assert cells == [[1], [2], [], [4]]


def handled(text):
    """The code, and the offset of the instruction after which a signal is first handled."""
    scope, found = {}, []
    exec("\n  ".join(["def run(s, v, d):", *text.splitlines()]), scope)
    before = signal.signal(
        signal.SIGALRM, lambda _, frame: found.append((frame.f_code, frame.f_lasti))
    )
    try:
        scope["run"](Sig(signal.SIGALRM), types.SimpleNamespace(lock=threading.Lock()), {})
    finally:
        signal.signal(signal.SIGALRM, before)
    return found[0]


@pytest.mark.parametrize("text", STRAIGHT.values(), ids=STRAIGHT)
def test_it_is_the_first_that_looks(text):
    code, place = handled(text)
    instructions = list(dis.get_instructions(code))
    came = next(i.offset for i in instructions if i.argval == "now")
    looking = [i.offset for i in instructions if i.offset > came and i.opname in LOOKOUTS]
    assert place == looking[0]


def test_these_are_all():
    places = map(handled, [*STRAIGHT.values(), *LOOPS.values()])
    names = {
        i.opname for code, place in places for i in dis.get_instructions(code) if i.offset == place
    }
    assert names == set(LOOKOUTS)
