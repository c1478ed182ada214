"""Stack dumps of a running process, to find where it hangs."""

from __future__ import annotations

import faulthandler
import signal
import sys


def dump_on_signal(descriptor: int) -> None:
    """Makes SIGUSR1 write all threads' stacks, even while native code holds the GIL.

    A negative `descriptor` means standard error. A crash writes the stacks there, too.
    """
    file = descriptor if descriptor >= 0 else sys.stderr
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    faulthandler.enable(file=file, all_threads=True)
