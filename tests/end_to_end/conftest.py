"""Fixtures that several end-to-end tests share: pools, clients and gateways."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from mlxpool.client import Client
from support.gateway_thread import GatewayThread
from support.http_owners import http_client, openai_client
from support.pool import Pool
from support.scripted_gateway import Served


@pytest.fixture(scope="module")
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    """A pool with the CONFIG of the module, if any; it keeps jobs if KEEPS_JOBS is set."""
    folder = tmp_path_factory.mktemp("pool")
    keeps_jobs = getattr(request.module, "KEEPS_JOBS", False)
    flags = ("--state-dir", str(folder / "jobs")) if keeps_jobs else ()
    with Pool(folder, getattr(request.module, "CONFIG", ""), arguments=flags) as running:
        yield running


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    """A client of the module's pool."""
    with pool.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def gateway(pool: Pool) -> Iterator[GatewayThread]:
    """A gateway without keys for the module's pool."""
    with GatewayThread(pool.run_dir) as running:
        yield running


@pytest.fixture(scope="module")
def url(gateway: GatewayThread) -> str:
    """The URL of the module's gateway."""
    return gateway.url


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the module's gateway."""
    with openai_client(url) as new_client:
        yield new_client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """A plain client of the module's gateway."""
    with http_client(url) as new_client:
        yield new_client


@pytest.fixture
def served() -> Iterator[Served]:
    """Scripted brokers behind gateways; they end with the test."""
    brokers = Served()
    yield brokers
    brokers.close()
