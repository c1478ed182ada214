"""Streams of a model with 8-bit keys and values, whose workers die."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlxpool.client import Client, Result
from mlxpool.common.options import GenerateOptions
from support.pool import Pool, until

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

pytestmark = pytest.mark.skipif(
    mx.default_device().type == mx.DeviceType.gpu, reason="a GPU refuses `deterministic`"
)
CONFIG = """
[models.exact]
path = "builtin:demo"
deterministic = true
kv = "int8"
[models.rounded]
path = "builtin:demo"
kv = "int8"
[models.plain]
path = "builtin:demo"
"""
ASKED: GenerateOptions = {"max_tokens": 60, "seed": 5, "temperature": 0.8, "ignore_eos": True}


def test_a_stream_goes_on_with_the_same_ids(pool: Pool, client: Client) -> None:
    """After a kill the next worker reads the prompt and the ids sent so far, all in one prefill.

    The stream's further ids, which are sampled, are the same as without the kill.
    """
    prompt = "def main(arguments):\n    " * 8
    whole = client.generate("exact", prompt, **ASKED)
    ids: list[int] = []
    killed = False
    with client.stream("exact", prompt, **ASKED) as stream:
        for delta in stream:
            assert delta.pos == len(ids)
            ids += delta.ids
            if len(ids) >= 20 and not killed:
                pool.kill_worker("exact/0")
                killed = True
    assert killed and ids == list(whole.ids) and len(ids) == 60


def test_streams_that_may_go_on_with_other_ids_have_no_gap(pool: Pool, client: Client) -> None:
    """Without `deterministic` a new worker continues after the ids that the client already has.

    It might have sampled other ids for these positions. But the client gets one id for each
    position, and the text of these ids.
    """
    prompts = ["def main(arguments):\n    " * 8, "import os\n", "class Reader:\n    " * 30]

    def kill() -> None:
        pool.kill_worker("rounded/0")

    far = threading.Barrier(len(prompts), action=kill)

    def read(prompt: str) -> tuple[Result, list[int], str]:
        ids: list[int] = []
        text = ""
        asked: GenerateOptions = {**ASKED, "max_tokens": 600}
        with client.stream("rounded", prompt, **asked) as stream:
            for delta in stream:
                assert delta.pos == len(ids)
                ids += delta.ids
                text += delta.text
                # Waits until all streams have at least 20 ids.
                if len(ids) - len(delta.ids) < 20 <= len(ids):
                    far.wait(timeout=120)
            return stream.result, ids, text

    with ThreadPoolExecutor(len(prompts)) as threads:
        results = list(threads.map(read, prompts))
    # The worker computes on while the readers wait, so some streams may end before the kill.
    assert max(result.attempts for result, _, _ in results) == 2
    for result, ids, text in results:
        assert result.reason == "length"
        assert ids == list(result.ids) and len(ids) == 600 == result.usage["completion_tokens"]
        assert text == result.text == client.detokenize("rounded", ids)


def test_it_never_goes_on_with_another_kind_of_cache(pool: Pool, client: Client) -> None:
    """A stream resumes only with the same model digest, which depends on the kind of KV cache."""
    client.generate("exact", "x", max_tokens=1)
    client.generate("plain", "x", max_tokens=1)
    models = {model["name"]: model for model in pool.ask("models")["models"]}
    exact, plain = models["exact"], models["plain"]
    assert exact["digest"] != plain["digest"]
    shown = until(lambda: pool.worker("exact/0")["layout"], "a beat with its layout")
    assert shown == "slabs, int8"
