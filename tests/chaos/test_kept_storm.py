"""Storms over jobs, background responses and batches that the pool stores, also over HTTP.

The short storm takes about 12 seconds of a processor, most of it for starting the brokers, workers
and gateways that it kills.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.kept_storm import KeptStorm, Plan
from support.postgres_server import PostgresServer


def check(storm: KeptStorm) -> None:
    figures = storm.run()
    print(figures)
    assert not storm.truth.wrong, (storm.truth.wrong[:10], figures)
    assert figures["counts"]["accepted job"] and figures["counts"]["ids"], figures


def test_a_storm_of_what_is_kept(tmp_path: Path) -> None:
    check(KeptStorm(Plan(actions=120, faults=6, pause=0.2), tmp_path))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_larger_storm_of_what_is_kept(tmp_path: Path, seed: int) -> None:
    check(KeptStorm(Plan(actions=3000, faults=150, seed=seed, threads=2, lines=300), tmp_path))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_larger_storm_with_postgres(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="missing package: psycopg")
    with PostgresServer() as server:
        check(KeptStorm(Plan(actions=2000, faults=100, seed=4, lines=300), tmp_path, server))
