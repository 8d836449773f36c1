"""Tests in processes of their own: with several devices, or another configuration."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"


def run_with(environment, *arguments):
    """What a Python says that is started with these arguments and environment variables."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-12000:]
    return done.stdout


def run_with_devices(n, *arguments):
    """What it says where there are `n` CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={n}"
    return run_with({"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, *arguments)


def run_again_with_devices(n, file, *options):
    """What pytest says of a file of tests where there are `n` CPU devices."""
    return run_with_devices(n, *PYTEST, file, *options)


def run_together(n, *arguments, timeout=300):
    """What `n` Pythons say: of each `(exit status, output, errors, seconds)`.

    They get these arguments, the address at which they meet, their number, and which one each is.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    begun = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments, address, str(n), str(k)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(n)
    ]
    found = []
    try:
        for p in processes:
            said = p.communicate(timeout=timeout)
            found.append((p.returncode, *said, time.monotonic() - begun))
    finally:
        for p in processes:
            p.kill()
    return found
