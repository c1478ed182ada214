"""docs/make_kill_picture.py measures a stream whose worker is killed, and draws the result."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

import make_kill_picture
from make_kill_picture import Measured, Token, Worker, draw, faults, measure

SVG = "{http://www.w3.org/2000/svg}"
TOKENS = tuple(Token(at, n, 100 + n, f"<{n}") for n, at in enumerate([0.1, 0.2, 0.3, 1.5, 1.6]))
MEASURED = Measured(
    *("demo", TOKENS, 0.31), Worker(7, 0.0, 0.0), Worker(8, 0.4, 1.2), [t.id for t in TOKENS]
)


def test_a_stream_whose_worker_is_killed_is_whole() -> None:
    measured = measure("counting", "hello", 60, 20)
    assert faults(measured) == [] and len(measured.tokens) == 60
    assert measured.before.pid != measured.after.pid
    assert measured.after.began > measured.killed_at
    assert all(earlier.at <= later.at for earlier, later in pairwise(measured.tokens))


def test_each_token_is_a_dot_and_each_text_is_escaped() -> None:
    picture = ElementTree.fromstring(draw(MEASURED))
    assert len(picture.findall(f"{SVG}circle")) == len(TOKENS)
    texts = [element.text or "" for element in picture.findall(f"{SVG}text")]
    assert {"<0", "100", "SIGKILL, process 7", "1.19 s"} <= set(texts)
    assert any("All ids are those of a run without a kill" in text for text in texts)
    assert all(len(text) * 8 < make_kill_picture.WIDTH - 40 for text in texts), (
        "cut off at the edge"
    )


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (TOKENS[:2] + TOKENS[3:], "lost, doubled or out of order"),
        ((*TOKENS[:4], replace(TOKENS[4], id=5)), "not those of the request without a kill"),
    ],
)
def test_faults_are_named(tokens: tuple[Token, ...], words: str) -> None:
    measured = replace(MEASURED, tokens=tokens)
    assert any(words in fault for fault in faults(measured))
    assert "All ids" not in draw(measured)


def test_the_picture_in_the_pages_is_one_of_a_whole_stream() -> None:
    text = make_kill_picture.PICTURE.read_text("utf-8")
    ElementTree.fromstring(text)
    assert "All ids are those of a run without a kill." in text
    dots, (count,) = text.count("<circle"), re.findall(r"One stream of (\d+) tokens", text)
    assert dots == int(count)
