"""Brokers whose HTTP server waits for a loop that a busy machine delays.

A broker answers 503 where its loop has not answered for 2 s. Tests that are not about that get no
such answer.
"""

from __future__ import annotations

from pathlib import Path

from support.pool import PATIENCE
from support.process_faults import install_fault

# The module of loop_queue.py takes the number from this one, which is imported before.
_PATIENT = f"""
import sys

def arm(kind):
    sys.modules[kind.__module__].MAX_WAIT = {PATIENCE}
"""


def patient_pages(folder: Path) -> dict[str, str]:
    """Writes into `folder`; returns the environment of such a broker."""
    where = "mlxpool.broker.http.latest_snapshot", "LatestSnapshot"
    return install_fault(folder, _PATIENT, where)
