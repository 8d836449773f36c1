"""A block of memory that one process writes and others read, without locks (a "seqlock").

A counter is odd while the writer writes. A reader copies the whole block, and throws the copy away
if the counter was odd before, or has changed after.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

import numpy as np

HEADER = np.dtype([("sequence", "i8"), ("step", "i8"), ("loss", "f8"), ("crc", "i8"), ("end", "?")])


class Snapshot(NamedTuple):
    step: int
    loss: float
    crc: int
    values: np.ndarray  # the reader's own copy


class Block:
    """A header and `size` floats, in shared memory.

    Attributes:
      torn: how many copies were thrown away because the counter was odd or had changed.
      corrupt: how many were thrown away because of a wrong checksum, with an unchanged counter.
    """

    def __init__(self, size: int, name: str | None = None):
        """Makes a block, or opens the one of that name."""
        n_bytes = HEADER.itemsize + 4 * size
        self._memory = SharedMemory(name, create=name is None, size=n_bytes)
        self._header = np.ndarray((), HEADER, self._memory.buf)
        self._values = np.ndarray(size, np.float32, self._memory.buf, HEADER.itemsize)
        self._seen = 0
        self.torn = self.corrupt = 0

    @property
    def name(self) -> str:
        return self._memory.name

    @property
    def is_finished(self) -> bool:
        return bool(self._header["end"])

    def write(self, step: int, loss: float, parts: Iterable[np.ndarray]) -> int:
        """Copies the parts into the block, one behind the other; returns their checksum."""
        header, start, crc = self._header, 0, 0
        header["sequence"] += 1
        for part in parts:
            np.copyto(self._values[start : start + part.size].reshape(part.shape), part)
            crc = zlib.crc32(part, crc)
            start += part.size
        header["step"], header["loss"], header["crc"] = step, loss, crc
        header["sequence"] += 1
        return crc

    def finish(self) -> None:
        """Tells the readers that nothing more will be written."""
        self._header["end"] = True

    def read(self) -> Snapshot | None:
        """The last values written; None if they were read before, or are just being written."""
        before = int(self._header["sequence"])
        if before == self._seen:
            return None
        header, values = self._header.copy(), self._values.copy()
        if before % 2 or int(self._header["sequence"]) != before:
            self.torn += 1
            return None
        # An x86 stores in the program's order. An ARM need not, and Python has no memory barrier:
        # there the counter alone proves nothing, but the checksum still does.
        if zlib.crc32(values) != header["crc"]:
            self.corrupt += 1
            return None
        self._seen = before
        return Snapshot(int(header["step"]), float(header["loss"]), int(header["crc"]), values)

    def close(self) -> None:
        del self._header, self._values  # else the memory couldn't be unmapped
        self._memory.close()

    def unlink(self) -> None:
        self._memory.unlink()
