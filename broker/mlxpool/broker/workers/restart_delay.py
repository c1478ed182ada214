"""How long a slot stays empty after failures of its workers. Pure."""

from __future__ import annotations

import hashlib

JITTER = 0.25  # of a delay


def restart_delay(failures: int, first: float, most: float, boot: int = 0) -> float:
    """Seconds to wait after `failures` workers in a row that never served: 1, 2, 4 … times `first`.

    `boot` spreads the restarts of many pools by up to JITTER; 0 does not.
    """
    if failures <= 0:
        return 0.0
    share = hashlib.blake2b(b"%d %d" % (boot, failures), digest_size=2).digest()
    spread = JITTER * int.from_bytes(share, "big") / 2**16 if boot else 0.0
    return min(most, first * 2.0 ** min(failures - 1, 32)) * (1 + spread)
