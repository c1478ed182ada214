"""Requests with images in the core: how they are refused and counted."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.requests.fair_queue import prompt_tokens
from mlxpool.common.protocol.images import TOKENS_PER_IMAGE
from support import core_events as make
from support.core_harness import OWNER, Story

IMAGE = b"x" * 4000
PROMPT: dict[str, Any] = {"prompt": "look: [img-0]", "images": 1, "blobs": (IMAGE,)}


def test_a_text_model_refuses_images_before_a_worker_is_started() -> None:
    story = Story()
    story.do(ev.ModelDescribed("m", {"digest": "d", "features": ["batching"]}))
    story.generate(**PROMPT)
    story.assert_refused("bad_request", "this model does not support image input: 'm'")
    assert not story.started()
    story.generate(prompt="text")
    story.assert_sent(1, "accepted")


@pytest.mark.parametrize("about", [{}, {"features": ["batching", "vision"]}])
def test_a_model_that_may_see_is_sent_images(about: dict[str, object]) -> None:
    story = Story()
    story.do(ev.ModelDescribed("m", {"digest": "d", **about}))
    request = story.generate(**PROMPT)
    story.assert_sent(1, "accepted")
    assert story.request(request).message.prompt.images == (IMAGE,)


def test_images_count_in_the_bytes_of_a_queue() -> None:
    story = Story(queue_bytes=4096)
    story.generate(**PROMPT)
    story.assert_sent(1, "accepted")
    story.generate(**PROMPT)
    story.assert_refused("queue_full", "with 4013 bytes")


def test_images_in_preparation_leave_half_of_the_places_to_texts() -> None:
    story = Story()
    worker = story.ready_worker(sequences=4)
    images = [story.generate(**PROMPT) for _ in range(4)]
    assert list(worker.runs) == images[:2]
    texts = [story.generate(prompt="text") for _ in range(3)]
    assert list(worker.runs) == [*images[:2], *texts[:2]]
    worker.end(texts[0])
    worker.credit()
    assert list(worker.runs) == [*images[:2], texts[1], texts[2]]
    worker.end(texts[1])
    worker.credit()
    assert images[2] not in worker.runs, "two are still prepared"
    run = worker.runs[images[0]]
    story.do(make.prompts(worker.epoch, (images[0], run.attempt, 5)))
    assert images[2] in worker.runs and images[3] not in worker.runs
    worker.end(images[1])
    worker.credit()
    assert images[3] in worker.runs


def test_the_only_place_of_a_worker_takes_images() -> None:
    story = Story()
    worker = story.ready_worker(sequences=1)
    request = story.generate(**PROMPT)
    assert list(worker.runs) == [request]


def test_images_count_as_tokens_of_the_prompt_and_their_bytes_do_not() -> None:
    story = Story(quota_tokens=2 * TOKENS_PER_IMAGE)
    request = story.generate(**PROMPT)
    assert prompt_tokens(story.request(request).message) == TOKENS_PER_IMAGE + 1 + 13 // 4
    story.generate(**PROMPT)
    story.assert_refused("over_quota", OWNER, "quota_tokens")
