"""Streams of the counting model, whose tokens are known, through real processes and sockets."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxpool.common.errors import (
    BadRequest,
    BrokerLost,
    ContextExceeded,
    DeadlineExceeded,
    Internal,
    ModelLoadFailed,
    Poisoned,
    UnknownModel,
    WorkerLost,
)
from support.counting_checker import expected_ids, text_of
from support.pool import Pool, until

CONFIG = """
[pool]
restart_delay = 0.05
[models.small]
path = "builtin:counting"
context = 64
[models.slow]
path = "builtin:counting"
sequences = 1
counting.step_us = 20000
[models.slow_prefill]
path = "builtin:counting"
sequences = 1
context = 1000000
counting.prefill_us = 400
[models.slow_load]
path = "builtin:counting"
counting.load_ms = 2500
[models.failing]
path = "builtin:counting"
counting.fault = "raise"
counting.fault_at = 5
[models.crashing]
path = "builtin:counting"
counting.fault = "abort"
counting.fault_at = 5
[models.unloadable]
path = "builtin:counting"
counting.fault = "raise"
counting.fault_in = "load"
[models.brief]
path = "builtin:counting"
keep_alive = "200ms"
"""


def test_every_token_is_the_right_one(pool: Pool) -> None:
    with pool.client() as client, client.stream("counting", "hello", seed=7, max_tokens=200) as s:
        deltas = list(s)
        result = s.result
    assert list(result.ids) == expected_ids("hello", 7, 200)
    assert result.text == text_of(result.ids) == "".join(d.text for d in deltas)
    assert result.reason == "length" and result.seed == 7 and result.attempts == 1
    assert result.usage == {
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": 200,
        "total_tokens": 205,
    }
    assert [d.pos for d in deltas if d.ids] == [
        sum(len(d.ids) for d in deltas[:i]) for i, d in enumerate(deltas) if d.ids
    ]


def test_a_seed_is_drawn_and_reported(pool: Pool) -> None:
    with pool.client() as client:
        first, second = (client.generate("counting", "x", max_tokens=9) for _ in range(2))
    assert first.seed != second.seed
    assert list(first.ids) == expected_ids("x", first.seed, 9)


def test_many_streams_of_several_models_at_once(pool: Pool) -> None:
    with pool.client() as client:
        streams = [
            client.stream(model, f"prompt {i}", seed=i, max_tokens=50)
            for i in range(20)
            for model in ("counting", "small", "brief")
        ]
        for number, stream in enumerate(streams):
            i = number // 3
            count = 64 - len(f"prompt {i}") if number % 3 == 1 else 50
            ids = expected_ids(f"prompt {i}", i, min(50, count))
            assert list(stream.read().ids) == ids


def test_token_and_long_prompts(pool: Pool) -> None:
    long = "long " * 20_000  # 100 kB: sent as a blob
    with pool.client() as client:
        by_ids = client.generate("counting", tokens=list(b"hello"), seed=7, max_tokens=5)
        assert list(by_ids.ids) == expected_ids("hello", 7, 5)
        by_text = client.generate("counting", long, seed=1, max_tokens=5)
        assert list(by_text.ids) == expected_ids(long, 1, 5)
        said = client.generate(
            "counting", messages=[{"role": "user", "content": "hi"}], seed=1, max_tokens=3
        )
        assert list(said.ids) == expected_ids("user: hi\n", 1, 3)


def test_stop_strings_end_the_text_before_them(pool: Pool) -> None:
    ids = expected_ids("hello", 7, 30)
    stop = f"{ids[10]} "
    with pool.client() as client:
        result = client.generate("counting", "hello", seed=7, max_tokens=30, stop=[stop])
    assert result.reason == "stop"
    assert result.text == text_of(ids).split(stop)[0]


def test_logprobs_come_with_their_tokens(pool: Pool) -> None:
    with pool.client() as client:
        result = client.generate(
            "counting", "x", seed=1, max_tokens=4, logprobs=True, top_logprobs=1
        )
    assert [entry["id"] for entry in result.logprobs] == list(result.ids)
    assert result.logprobs[0]["top"][0]["id"] == result.ids[0]


def test_tokenize_and_detokenize(pool: Pool) -> None:
    with pool.client() as client:
        assert client.tokenize("counting", "abc") == [97, 98, 99]
        assert client.detokenize("counting", [1, 22]) == "1 22 "
        with pytest.raises(UnknownModel):
            client.tokenize("nope", "abc")


def test_a_prompt_of_the_context_is_an_error_with_both_numbers(pool: Pool) -> None:
    with pool.client() as client:
        before = client.generate("small", "a" * 63, seed=1)
        assert len(before.ids) == 1 and before.reason == "length"
        epoch = pool.worker("small/0")["epoch"]
        for size in (64, 65, 5000):
            with pytest.raises(ContextExceeded, match=f"{size} tokens.* 64") as caught:
                client.generate("small", "a" * size)
            assert caught.value.details == {"prompt_tokens": size, "context": 64}
        assert list(client.generate("small", "b", seed=2, max_tokens=3).ids) == expected_ids(
            "b", 2, 3
        )
    assert pool.worker("small/0")["epoch"] == epoch


def test_reaching_the_context_ends_with_length(pool: Pool) -> None:
    with pool.client() as client:
        result = client.generate("small", "abcd", seed=3)
    assert result.reason == "length" and list(result.ids) == expected_ids("abcd", 3, 60)


def test_a_stream_with_shifts_goes_on_at_a_full_context(pool: Pool) -> None:
    with pool.client() as client:
        asked: dict[str, Any] = {"seed": 3, "shift": True}
        result = client.generate("small", "abcd", max_tokens=500, **asked)
        assert list(result.ids) == expected_ids("abcd", 3, 500)
        assert result.text == text_of(result.ids) and result.reason == "length"
        assert result.usage["prompt_tokens"] == 4 and result.usage["completion_tokens"] == 500
        endless = client.generate("small", "abcd", **asked)
        assert list(endless.ids) == expected_ids("abcd", 3, 640), "ten contexts"


def test_a_long_prompt_is_truncated_and_the_facts_say_so(pool: Pool) -> None:
    prompt = "".join(chr(97 + n % 26) for n in range(5000))
    with pool.client() as client:
        stream = client.stream("small", prompt, seed=3, max_tokens=9, truncate=True, shift=True)
        assert stream.facts == {}
        result = stream.read()
        left = prompt[:4] + prompt[-59:]
        assert list(result.ids) == expected_ids(left, 3, 9)
        assert result.usage["prompt_tokens"] == stream.facts["prompt_tokens"] == 63
        assert stream.facts["truncated"] == 5000 - 63 and stream.facts["context"] == 64
        fits = client.stream("small", "abc", max_tokens=1, truncate=True)
        fits.read()
        assert "truncated" not in fits.facts


def test_a_context_of_its_own(pool: Pool) -> None:
    with pool.client() as client:
        result = client.generate("small", "abcd", seed=3, num_ctx=20)
        assert list(result.ids) == expected_ids("abcd", 3, 16) and result.reason == "length"
        with pytest.raises(ContextExceeded, match=r"20 tokens.* 20"):
            client.generate("small", "a" * 20, num_ctx=20)
        with pytest.raises(BadRequest, match=r"num_ctx is 65, the context of the model is 64"):
            client.generate("small", "a", num_ctx=65)
        with pytest.raises(ContextExceeded, match="leaves nothing"):
            client.generate("small", "a" * 99, truncate=True, num_keep=-1)
        assert len(client.generate("small", "a", max_tokens=1).ids) == 1


def test_an_async_stream_has_the_same_options(pool: Pool) -> None:
    async def read() -> tuple[list[int], Any]:
        async with pool.async_client() as client:
            options: dict[str, Any] = {"truncate": True, "shift": True, "num_keep": 2}
            stream = client.stream("small", "x" * 99, seed=1, num_ctx=10, max_tokens=50, **options)
            return list((await stream.read()).ids), stream.facts

    ids, facts = asyncio.run(read())
    assert ids == expected_ids("x" * 9, 1, 50) and facts["truncated"] == 90


def test_an_error_in_mid_stream_comes_after_its_deltas(pool: Pool) -> None:
    with pool.client() as client:
        stream = client.stream("failing", "hello", seed=7, max_tokens=50)
        ids: list[int] = []
        with pytest.raises(Internal, match="fault `raise`"):
            for delta in stream:
                ids += delta.ids
        assert ids == expected_ids("hello", 7, 5)
        epoch = pool.worker("failing/0")["epoch"]
        assert len(client.generate("failing", "again", max_tokens=5).ids) == 5
    assert pool.worker("failing/0")["epoch"] == epoch


def test_a_request_that_always_crashes_is_poisoned(pool: Pool) -> None:
    with pool.client() as client:
        with pytest.raises(Poisoned, match="SIGABRT") as caught:
            client.generate("crashing", "x", max_tokens=50)
        assert not caught.value.retryable
        assert len(client.generate("crashing", "x", max_tokens=5).ids) == 5
    row = pool.worker("crashing/0")
    assert row["restarts"] == 2 and row["last_exit"] == "killed by SIGABRT"


def test_a_killed_worker_is_noticed_and_replaced(pool: Pool) -> None:
    with pool.client() as client:
        stream = client.stream("slow", "x", seed=1, durable=False)
        deltas = iter(stream)
        next(deltas)
        pid = pool.kill_worker("slow/0")
        with pytest.raises(WorkerLost, match="SIGKILL"):
            stream.read()
        assert list(client.generate("slow", "y", seed=2, max_tokens=3).ids) == expected_ids(
            "y", 2, 3
        )
    assert pool.worker("slow/0")["pid"] != pid


def test_a_terminated_worker_is_replaced(pool: Pool) -> None:
    with pool.client() as client:
        client.generate("counting", "x", max_tokens=1)
        epoch = pool.worker("counting/0")["epoch"]
        pool.kill_worker("counting/0", signal.SIGTERM)
        until(lambda: pool.worker("counting/0")["epoch"] != epoch, "its end is noticed")
        assert len(client.generate("counting", "x", max_tokens=3).ids) == 3


def test_a_failed_load_is_reported_to_the_client(pool: Pool) -> None:
    with pool.client() as client:
        with pytest.raises(ModelLoadFailed, match="fault `raise`") as first:
            client.generate("unloadable", "x")
        with pytest.raises(ModelLoadFailed) as second:
            client.generate("unloadable", "x")
    assert str(first.value) == str(second.value)


def test_cancel_while_queued(pool: Pool) -> None:
    with pool.client() as client:
        running = client.stream("slow", "a", seed=1)
        deltas = iter(running)
        next(deltas)
        waiting = client.stream("slow", "b", seed=2)
        until(lambda: pool.ask("stats")["queued"] == 1, "the second request is queued")
        assert client.cancel(waiting.id) == {"state": "queued", "pos": 0}
        assert waiting.read().reason == "cancelled"
        running.close()


def test_cancel_in_prefill_frees_the_worker_within_a_chunk(pool: Pool) -> None:
    with pool.client() as client:
        client.generate("slow_prefill", "x", max_tokens=1)
        stream = client.stream("slow_prefill", "y" * 200_000, seed=1)  # 80 s of prefill
        pool.in_state("slow_prefill/0", phase="prefill")
        assert client.cancel(stream.id)["state"] == "assigned"
        assert stream.read().reason == "cancelled"
        assert list(client.generate("slow_prefill", "z", seed=3, max_tokens=2).ids) == expected_ids(
            "z", 3, 2
        )


def test_cancel_in_decode_and_after_the_end(pool: Pool) -> None:
    with pool.client() as client:
        stream = client.stream("slow", "c", seed=5)
        deltas = iter(stream)
        next(deltas)
        assert client.cancel(stream.id)["state"] == "streaming"
        result = stream.read()
        assert result.reason == "cancelled"
        assert list(result.ids) == expected_ids("c", 5, len(result.ids))
        fate = client.cancel(stream.id)
        assert fate == {"state": "cancelled", "pos": len(result.ids)}
        assert client.cancel(b"\1" * 16) == {"state": "unknown", "pos": 0}
        pool.in_state("slow/0", running=0)


def test_leaving_the_loop_cancels(pool: Pool) -> None:
    with pool.client() as client:
        for _ in client.stream("slow", "d"):
            break
        until(lambda: pool.ask("stats")["requests"]["live"] == 0, "the stream is cancelled")
        pool.in_state("slow/0", running=0)


def test_deadlines(pool: Pool) -> None:
    with pool.client() as client:
        stream = client.stream("slow", "e", deadline_ms=300)
        with pytest.raises(DeadlineExceeded, match="deadline_ms"):
            stream.read()
        blocker = client.stream("slow", "f")
        deltas = iter(blocker)
        next(deltas)
        with pytest.raises(DeadlineExceeded, match="queue_ms"):
            client.generate("slow", "g", queue_ms=100)
        blocker.close()


def test_heartbeats_continue_during_a_long_load_and_prefill(pool: Pool) -> None:
    with pool.client() as client:
        seen = set()

        def beat_in_load() -> bool:
            row = pool.worker("slow_load/0")
            if row.get("phase") == "load":
                seen.add(row["progress"])
                assert row["beat_age_ms"] < 30_000
            return row.get("state") == "ready"

        def progress_was_seen() -> bool:
            """Loads the model; returns whether `ps` showed two progress values meanwhile.

            If not, unloads the model.
            """
            seen.clear()
            loading = client.stream("slow_load", "x", max_tokens=1)
            until(beat_in_load, "the model is loaded")
            assert len(loading.read().ids) == 1
            if len(seen) < 2:
                pool.ask("unload", model="slow_load")
                pool.in_state("slow_load/0", state="none")
            return len(seen) >= 2

        until(progress_was_seen, "progress moved from beat to beat")
        stream = client.stream("slow_prefill", "w" * 100_000)
        first = pool.in_state("slow_prefill/0", phase="prefill")["progress"]
        until(lambda: pool.worker("slow_prefill/0")["progress"] > first + 1, "progress in prefill")
        stream.close()


def test_an_idle_model_is_unloaded_and_comes_back(pool: Pool) -> None:
    with pool.client() as client:
        client.generate("brief", "x", max_tokens=1)
        pool.in_state("brief/0", state="none", last_exit="stopped")
        assert len(client.generate("brief", "x", max_tokens=2).ids) == 2


def test_unknown_models_and_options_are_named(pool: Pool) -> None:
    with pool.client() as client:
        with pytest.raises(UnknownModel, match="did you mean 'counting'"):
            client.generate("countin", "x")
        with pytest.raises(BadRequest, match="temperature"):
            client.generate("counting", "x", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(BadRequest, match="empty"):
            client.generate("counting", "")
        with pytest.raises(BadRequest, match="50000"):
            client.generate("counting", tokens=[50_000])
        with pytest.raises(BadRequest, match="a text must be a str, got 5"):
            client.generate("counting", 5)  # type: ignore[arg-type]


async def test_the_async_client_gets_the_same_streams(pool: Pool) -> None:
    async with pool.async_client() as client:
        stream = client.stream("counting", "hello", seed=7, max_tokens=40)
        ids = [token async for delta in stream for token in delta.ids]
        assert ids == expected_ids("hello", 7, 40)
        results = await asyncio.gather(
            *(client.generate("counting", "p", seed=i, max_tokens=20) for i in range(10))
        )
        for i, result in enumerate(results):
            assert list(result.ids) == expected_ids("p", i, 20)
        task = asyncio.create_task(client.generate("slow", "q"))
        await asyncio.to_thread(pool.in_state, "slow/0", phase="decode")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(pool.in_state, "slow/0", running=0)
        assert "counting" in {m["name"] for m in await client.models()}
        assert await client.tokenize("counting", "a") == [97]


def test_the_counters_of_requests_agree(pool: Pool) -> None:
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "all streams have ended")
    stats = pool.ask("stats")
    requests = stats["requests"]
    ended = requests["done"] + requests["failed"] + requests["cancelled"]
    assert requests["accepted"] == ended + requests["live"]
    assert stats["internal_errors"] == 0 and stats["frames"]["bad"] == 0


def test_the_broker_shuts_down_in_order(tmp_path: Path) -> None:
    with Pool(tmp_path, CONFIG) as pool, pool.client() as client:
        stream = client.stream("slow", "x", durable=False)
        deltas = iter(stream)
        next(deltas)
        pid = pool.worker("slow/0")["pid"]
        assert pool.stop() == 0
        with pytest.raises(Exception, match="going down"):
            stream.read()
        assert not _alive(pid)
        assert not list(pool.run_dir.glob("*.ipc"))
        assert "Traceback" not in pool.log()


def test_workers_end_with_a_killed_broker(tmp_path: Path) -> None:
    with Pool(tmp_path, CONFIG) as pool:
        with pool.client(broker_grace=5.0) as client:
            stream = client.stream("slow", "x")
            deltas = iter(stream)
            next(deltas)
            pid = pool.worker("slow/0")["pid"]
            pool.kill()
            until(lambda: not _alive(pid), "the worker ended with its broker")
            with pytest.raises(BrokerLost):
                stream.read()
        pool.start()
        with pool.client() as client:
            assert list(client.generate("slow", "y", seed=1, max_tokens=2).ids) == expected_ids(
                "y", 1, 2
            )


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
