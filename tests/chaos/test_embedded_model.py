"""Faults in streams of a model with weights: the completions are those of an undisturbed run."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from chaos.harness import WEIGHTS_LIMITS
from mlxpool.client import Client, Pace, Result
from support.pool import Pool

pytest.importorskip("mlx.core")

PROMPT = "import os\n\n\ndef walk(top):\n    "
TOKENS = 60
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "repeat_penalty": 1.1},
    "logprobs": {"temperature": 0.7, "logprobs": True, "top_logprobs": 2},
}


# The prompt has 12 tokens, so the first cut is after 20 ids.
SHIFT: dict[str, Any] = {
    "seed": 3,
    "shift": True,
    "num_ctx": 32,
    "num_keep": 3,
    "ignore_eos": True,
    "logprobs": True,  # these differ after any other context, even if the token is the same
}
SHIFTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "repeat_penalty": 1.2, "repeat_last_n": 50},
    "truncated": {"temperature": 0.7, "truncate": True, "num_ctx": 10},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), WEIGHTS_LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed() -> Callable[..., Result]:
    """Returns a function that returns the completions without a fault, each computed once."""
    known: dict[str, Result] = {}

    def whole(client: Client, options: dict[str, Any]) -> Result:
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            known[key] = client.generate("demo", PROMPT, **options)
        return known[key]

    return whole


def kill(pool: Pool) -> None:
    pool.kill_worker("demo/0", signal.SIGKILL)


def freeze(pool: Pool) -> None:
    pool.kill_worker("demo/0", signal.SIGSTOP)


def restart(pool: Pool) -> None:
    pool.ask("restart", slot="demo/0")


def kill_the_broker(pool: Pool) -> None:
    pool.kill()
    pool.start()


def read(
    client: Client, asked: Sequence[dict[str, Any]], at: int, fault: Callable[[], None]
) -> list[Result]:
    """Reads concurrent completions; causes the fault once the first stream has `at` ids.

    Every stream has at least one id by then. Its small flow-control window prevents its end before
    the fault.
    """
    with ExitStack() as stack:
        streams = [
            stack.enter_context(client.stream("demo", PROMPT, **request, window=8))
            for request in asked
        ]
        readers = [iter(stream) for stream in streams]
        had = [len(next(deltas).ids) for deltas in readers]
        while had[0] < at:
            had[0] += len(next(readers[0]).ids)
        thread = threading.Thread(target=fault)
        thread.start()
        thread.join()
        return [stream.read() for stream in streams]


@pytest.fixture(scope="module")
def client(pool: Pool) -> Iterator[Client]:
    """A client that acknowledges deltas often.

    Otherwise small flow-control windows would stop its streams.
    """
    with pool.client(pace=Pace(ping=0.05)) as connected:
        yield connected


FAULTS = pytest.mark.parametrize("fault", [kill, freeze, restart, kill_the_broker])


@FAULTS
def test_a_fault_does_not_change_the_completion(
    pool: Pool, client: Client, undisturbed: Callable[..., Result], fault: Callable[[Pool], None]
) -> None:
    asked = [{"max_tokens": TOKENS, "seed": 3, **options} for options in OPTIONS.values()]
    wholes = [undisturbed(client, request) for request in asked]
    for name, hit, whole in zip(
        OPTIONS, read(client, asked, 10, partial(fault, pool)), wholes, strict=True
    ):
        assert hit.ids == whole.ids, name
        assert hit.text == whole.text
        assert hit.reason == whole.reason
        assert hit.usage["completion_tokens"] == len(whole.ids)
        assert [e["id"] for e in hit.logprobs] == [e["id"] for e in whole.logprobs]


@FAULTS
def test_a_fault_does_not_change_a_completion_with_shifts(
    pool: Pool, client: Client, undisturbed: Callable[..., Result], fault: Callable[[Pool], None]
) -> None:
    for tokens in (300, 1200, 4800):  # longer answers until the fault comes before their end
        asked = [{**SHIFT, **options, "max_tokens": tokens} for options in SHIFTED.values()]
        hits = read(client, asked, 28, partial(fault, pool))
        if fault is kill_the_broker or all(hit.attempts > 1 for hit in hits):
            break
    else:
        pytest.fail("every fault came too late")
    wholes = [undisturbed(client, request) for request in asked]
    for name, hit, whole in zip(SHIFTED, hits, wholes, strict=True):
        assert len(hit.ids) == tokens and hit.ids == whole.ids, name
        assert hit.text == whole.text and hit.reason == whole.reason == "length"
        actual, wanted = (
            [entry["logprob"] for entry in result.logprobs] for result in (hit, whole)
        )
        assert actual == pytest.approx(wanted, abs=1e-3), name
        assert hit.usage["completion_tokens"] == tokens
        assert hit.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
