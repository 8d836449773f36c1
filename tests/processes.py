"""Tests of several devices: they run again in a process that has so many."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_with_devices(n, *arguments):
    """What a Python says that is started with these arguments and has `n` CPU devices."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-12000:]
    return done.stdout


def run_again_with_devices(n, file, *options):
    """What pytest says of a file of tests where there are `n` CPU devices."""
    pytest = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"
    return run_with_devices(n, *pytest, file, *options)
