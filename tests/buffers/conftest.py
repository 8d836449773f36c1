"""What holds after every test of the room where buffers change hands."""

import pytest

from refs._buffers.records import mine, readers


@pytest.fixture(autouse=True)
def nothing_is_left():
    """However an exchange ends, nobody is noted for it."""
    yield
    assert not mine.records
    assert not readers
