"""How the tests compile: without XLA's optimisations, and each program once on a machine.

Most of the tests' time would be XLA's. A test of values doesn't depend on how well a program is
optimised, so its programs are compiled for a CPU with `QUICKLY`. What XLA makes of a program is
looked at by tests with the marker `as_released`: those compile as users do, and so do all tests
with `--as-released`.

Executables are kept in JAX's persistent cache, in the user's cache folder, for later runs and for
the processes that tests start. When a worker has grown to a gigabyte, it drops its programs before
the next module: it would grow to several.
"""

import ctypes
import gc
import hashlib
import importlib
import math
import os
import platform
import shutil
import threading
from pathlib import Path

import jax
import jaxlib
import pytest
from jaxlib.mlir import ir

# Options of XLA. In XLA_FLAGS they would hold for a whole process, and a user may have set others.
QUICKLY = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
LARGEST_CACHE = LARGEST_WORKER = 2**30  # bytes

# Private names of JAX that only tests use: (module, function).
OPTIONS = "jax._src.compiler", "get_compile_options"
CONTEXT = "jax._src.interpreters.mlir", "make_ir_context"


class Compiling:
    """The way in which programs are compiled now, as a pytest plugin."""

    def __init__(self, always_as_released):
        self.always_as_released = always_as_released
        self.as_released = False
        self.module = None
        self.context = None
        self.quickly = {name: x for name, x in QUICKLY.items() if is_option(name, x)}
        replace(OPTIONS, self.with_options)
        replace(CONTEXT, self.with_one_context)

    def with_options(self, get_compile_options):
        def options(*args, env_options_overrides=None, backend=None, **keywords):
            chosen = dict(env_options_overrides or {})
            if not self.as_released and getattr(backend, "platform", None) == "cpu":
                chosen = {**self.quickly, **chosen}
            return get_compile_options(
                *args, env_options_overrides=chosen, backend=backend, **keywords
            )

        return options

    def with_one_context(self, make_ir_context):
        """JAX before 0.12 makes a context for each program, which takes longer than a small one.

        A program that is compiled while another is lowered has its own: in a shared one, JAX's copy
        of it for the cache's key would be made inside of the other. So has one of another thread:
        a context doesn't survive the end of one of XLA's threads.
        """

        def context():
            if ir.Context.current or threading.current_thread() is not threading.main_thread():
                return make_ir_context()
            if self.context is None:
                self.context = make_ir_context()
            return self.context

        return context

    def pytest_collection_finish(self):
        """Modules and tests live on: no garbage collection needs to search them again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)  # a traced program is some thousands of objects

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        released = self.always_as_released or bool(item.get_closest_marker("as_released"))
        if released != self.as_released:
            self.as_released = released
            jax.clear_caches()
        if item.path != self.module:
            self.module = item.path
            self.context = None
            if resident() > LARGEST_WORKER:
                start_anew()


def is_option(name, x):
    """Whether the jaxlib here knows XLA's option."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: x})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def resident():
    """The bytes of memory that this process has, where the system says so."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.inf


def start_anew():
    """Drop what is compiled, and give the memory back."""
    jax.clear_caches()
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def replace(name, wrapped):
    """Replace JAX's function by `wrapped` of it; tests are only slower where JAX has it no more."""
    module, function = importlib.import_module(name[0]), name[1]
    if hasattr(module, function):
        setattr(module, function, wrapped(getattr(module, function)))


def keep_executables():
    """In JAX's persistent cache, here and in the processes that are started from here."""
    folder = caches() / name_of_this_machine()
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def caches():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax-refs-tests"


def name_of_this_machine():
    """Of jaxlib and what the CPU can do: another CPU may not run what was compiled for this one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        able = sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    except OSError:
        able = [platform.processor()]
    cpu = hashlib.sha256("\n".join([platform.machine(), *able]).encode()).hexdigest()
    return f"{jaxlib.__version__}-{cpu[:12]}"


def trim_cache():
    """Begin with an empty cache when it has grown too large: programs change with each version."""
    entries = [x.stat().st_size for x in caches().rglob("*") if x.is_file()]
    if sum(entries) > LARGEST_CACHE:
        shutil.rmtree(caches(), ignore_errors=True)
