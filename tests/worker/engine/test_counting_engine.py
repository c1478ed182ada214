"""Tests the counting model: the formula of its tokens is public, for checkers in any language."""

from __future__ import annotations

import zlib

from mlxpool.common.config.schema import Counting
from mlxpool.common.options import Options
from mlxpool.worker.engine.counting_engine import CountingEngine, CountingText, splitmix64, token_at
from mlxpool.worker.scheduling.sequence import Sequence
from support import engine_steps
from support.prompts import chat_ids


def test_splitmix64_is_the_published_one() -> None:
    # The first outputs of SplitMix64 from state 0 and 1, the state being advanced by GOLDEN.
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert splitmix64(2 * 0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_the_formula_by_hand() -> None:
    root = zlib.crc32(b"a\0\0\0b\0\0\0")
    expected = splitmix64(root ^ splitmix64(7 + 3 * 0x9E3779B97F4A7C15)) % 50_000
    assert token_at([97, 98], 7, 3, 50_000) == expected


def test_a_token_depends_on_prompt_seed_and_position() -> None:
    base = token_at([1, 2], 3, 4, 2**31)
    assert len({base, token_at([1, 3], 3, 4, 2**31), token_at([1, 2], 4, 4, 2**31)}) == 3
    assert base != token_at([1, 2], 3, 5, 2**31)


def test_text_is_encoded_and_decoded() -> None:
    text = CountingText()
    assert text.encode("né") == [110, 195, 169]
    assert text.decode([1, 20]) == "1 20 "
    assert chat_ids(text, [{"role": "user", "content": "x"}]).ids == list(b"user: x\n")


def row(**options: object) -> Sequence:
    return Sequence(b"", 1, (1, 2, 3), Options.parse(options), 9, 10)


def test_the_engine_samples_the_formulas_tokens_also_after_a_resume() -> None:
    engine = CountingEngine(Counting(step_us=0), 100)
    resumed = row()
    resumed.ids += [5, 6]
    engine.admit(resumed)
    assert engine_steps.read(engine, resumed) == [4]
    assert resumed.submitted == 4
    (drawn,) = engine_steps.decode(engine, [resumed])
    assert drawn.token == resumed.ids[2] == token_at([1, 2, 3], 9, 2, 50_000)
    assert engine.memory().kv > 0
    engine.release(resumed)
    assert engine.memory().kv == 0


def test_the_memory_report_follows_the_settings() -> None:
    engine = CountingEngine(Counting(load_bytes=1005), 0)
    seen: list[tuple[int, int]] = []
    engine.load(lambda tensors, size: seen.append((tensors, size)))
    assert seen[0] == (1, 100) and seen[-1] == (10, 1005)
    assert (engine.memory().weights, engine.memory().active) == (1005, 1005)
