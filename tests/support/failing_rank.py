"""`python -m support.failing_rank`: rank 1 ends with an error, and all others wait for it."""

from __future__ import annotations

import sys
import time

if __name__ == "__main__":
    if "--rank=1" in sys.argv:
        sys.exit(7)
    time.sleep(10**6)
