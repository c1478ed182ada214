"""Streams that start together: their tokens/s, and the text of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxpool.bench.load.closed_loop import LoopFigures, summarise, times, workload
from mlxpool.bench.load.samples import Sample
from mlxpool.bench.load.workload import draw


def stream(times: Sequence[float], counts: Sequence[int]) -> Sample:
    return Sample(0.0, 0.0, times, 3, sum(counts), counts=counts)


def test_tokens_count_while_all_streams_run() -> None:
    streams = [stream((1.0, 2.0, 3.0, 4.0), (1, 1, 1, 1)), stream((2.0, 2.5, 3.5), (1, 4, 2))]
    # From 2.0, when the second stream began, to 3.5, when it ended: 1 + 4 + 2 tokens in 1.5 s.
    assert summarise(streams).rate == pytest.approx(7 / 1.5)
    assert summarise(streams).first == [1.0, 2.0]
    assert sorted(summarise(streams).gaps) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_streams_that_never_overlap_count_in_full() -> None:
    streams = [stream((1.0, 2.0), (1, 1)), stream((3.0, 4.0), (1, 1))]
    assert summarise(streams).rate == pytest.approx(4 / 4.0)


def test_answers_of_one_piece_have_no_gaps() -> None:
    whole = {"a": [LoopFigures(5.0, [0.1])], "b": [LoopFigures(5.0, [0.2], [0.3])]}
    assert [line.group for line in times(whole, 1)] == ["first token, p50", "first token, p99"]


@pytest.mark.parametrize("length", [8, 128, 1000])
def test_prompts_of_text_have_their_length_and_differ(length: int) -> None:
    texts = [request.prompt for request in draw(workload(3, length, 5, text=True), 0.0, "1 1")]
    assert [len(text) for text in texts] == [length] * 3
    assert len(set(map(str, texts))) == 3
