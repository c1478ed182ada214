"""Opens files of secrets: regular files alone, since a read of a FIFO or a device may never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegular(OSError):
    """The path names a directory, a FIFO, a socket or a device."""

    def __init__(self, file: Path) -> None:
        super().__init__(None, "it is not a regular file", str(file))

    def __str__(self) -> str:
        return f"{self.strerror}: {self.filename!r}"


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting. Raises OSError, of it NotRegular."""
    # Without O_NONBLOCK the open of a FIFO waits for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(file)
    return open(descriptor, "rb")
