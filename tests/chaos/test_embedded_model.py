"""A model with weights, under faults: the completion is the same as without them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chaos.harness import WEIGHTS_LIMITS
from mlxpool.client import Client, Result, Stream
from support.pool import Pool

pytest.importorskip("mlx.core")

PROMPT = "import os\n\n\ndef walk(top):\n    "
TOKENS = 60
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "repeat_penalty": 1.1},
    "logprobs": {"temperature": 0.7, "logprobs": True, "top_logprobs": 2},
}


# The prompt has 12 tokens, so the first cut is behind 20 ids.
SHIFT: dict[str, Any] = {
    "seed": 3,
    "shift": True,
    "num_ctx": 32,
    "num_keep": 3,
    "ignore_eos": True,
    "logprobs": True,  # they differ after any other context, even where the token is the same
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
    """The completions without a fault; each is computed once."""
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


def read(client: Client, options: dict[str, Any], at: int, fault: Callable[[], None]) -> Result:
    """A completion with a fault after `at` ids."""
    stream: Stream
    with client.stream("demo", PROMPT, **options) as stream:
        had, struck = 0, False
        for delta in stream:
            had += len(delta.ids)
            if had >= at and not struck:
                struck = True
                thread = threading.Thread(target=fault)
                thread.start()
                thread.join()
        assert struck
        return stream.result


FAULTS = pytest.mark.parametrize("fault", [kill, freeze, restart, kill_the_broker])


@FAULTS
def test_a_fault_does_not_change_the_completion(
    pool: Pool, client: Client, undisturbed: Callable[..., Result], fault: Callable[[Pool], None]
) -> None:
    for name, options in OPTIONS.items():
        asked = {"max_tokens": TOKENS, "seed": 3, **options}
        whole = undisturbed(client, asked)
        # The window keeps the client from having all before the fault.
        hit = read(client, {**asked, "window": 8}, 10, lambda: fault(pool))
        assert hit.ids == whole.ids, name
        assert hit.text == whole.text
        assert hit.reason == whole.reason
        assert hit.usage["completion_tokens"] == len(whole.ids)
        assert [e["id"] for e in hit.logprobs] == [e["id"] for e in whole.logprobs]


@FAULTS
def test_a_fault_does_not_change_a_completion_with_shifts(
    pool: Pool, client: Client, undisturbed: Callable[..., Result], fault: Callable[[Pool], None]
) -> None:
    for name, options in SHIFTED.items():
        for tokens in (300, 1200, 4800):  # until the worker has not finished before the fault
            asked = {**SHIFT, **options, "max_tokens": tokens}
            hit = read(client, {**asked, "window": 8}, 28, lambda: fault(pool))
            if hit.attempts > 1 or fault is kill_the_broker:
                break
        else:
            pytest.fail("every fault came too late")
        whole = undisturbed(client, asked)
        assert len(hit.ids) == tokens and hit.ids == whole.ids, name
        assert hit.text == whole.text and hit.reason == whole.reason == "length"
        found, wanted = ([entry["logprob"] for entry in one.logprobs] for one in (hit, whole))
        assert found == pytest.approx(wanted, abs=1e-3), name
        assert hit.usage["completion_tokens"] == tokens
        assert hit.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
