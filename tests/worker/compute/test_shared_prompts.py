"""The compute thread reads a prompt once for all sequences that have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.compute_harness import ComputeHarness, end_of, ids_of
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from support.model_sources import source_of  # noqa: E402

SAMPLED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
STATES = {**QWEN3_NEXT, "num_hidden_layers": 2}
LAYOUTS = [("plain", "rows"), ("plain", "slabs"), ("plain", "pool"), ("states", "rows")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    changes: dict[str, dict[str, Any]] = {"plain": {}, "states": STATES}
    return {
        name: write_checkpoint(root / name, max_position_embeddings=2048, **changed)
        for name, changed in changes.items()
    }


class Counted(ModelEngine):
    """An engine that counts how often each position of a prompt is read."""

    places: Counter[int]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        type(self).places = Counter()

    def submit(self, spans: Many[Span]) -> bool:
        for span in spans:
            size = len(span.sequence.prompt)
            self.places.update(range(span.start, min(span.end, size)))
        return super().submit(spans)


def prompt_of(size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(size).integers(0, 256, size).tolist()
    return ids


def answers(
    folder: Path, prompts: list[list[int]], shared: bool = True, **settings: Any
) -> tuple[list[list[int]], list[int]]:
    """Serves prompts that arrive together.

    Returns the ids of each answer, and the number of cached tokens of each prompt.
    """
    harness = ComputeHarness(source=source_of(folder, Counted, **settings)).ready()
    names = range(1, len(prompts) + 1)
    for name, prompt in zip(names, prompts, strict=True):
        harness.admit(name, prompt, 6, shared=shared, **SAMPLED)
    streams = harness.until_ended({*names})
    usages = [end_of(streams[name])["usage"] for name in names]
    return [ids_of(streams[name]) for name in names], [usage["cached_tokens"] for usage in usages]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
@pytest.mark.parametrize("size", [20, 256, 511, 700])
def test_a_prompt_is_read_once_by_all_that_arrive_together(
    folders: dict[str, Path], model: str, layout: str, size: int
) -> None:
    prompt = prompt_of(size)
    ids, cached = answers(folders[model], [prompt] * 6, layout=layout)
    assert cached == [0, *[size - 1] * 5]
    # Each sequence computes the last token, because its logits draw the first token.
    assert Counted.places == Counter({**dict.fromkeys(range(size - 1), 1), size - 1: 6})
    alone, _ = answers(folders[model], [prompt] * 6, layout=layout, prefix="off")
    assert set(Counted.places.values()) == {6}
    assert ids == alone and len({*map(tuple, ids)}) > 1


@pytest.mark.parametrize("layout", ["rows", "slabs", "pool"])
def test_equal_prompts_share_without_being_told(folders: dict[str, Path], layout: str) -> None:
    """Without `shared`, the common beginning of several prompts is still read only once.

    Each request reads the remaining tokens of its prompt.
    """
    common = prompt_of(400)
    prompts = [[*common, number, *prompt_of(20 + number)] for number in range(4)]
    ids, cached = answers(folders["plain"], prompts, shared=False, layout=layout)
    assert cached == [0, 400, 400, 400]
    assert {Counted.places[place] for place in range(400)} == {1}
    assert ids == answers(folders["plain"], prompts, layout=layout, prefix="off")[0]


@pytest.mark.parametrize("prefix", ["off", "single"])
def test_without_a_tree_nobody_waits(folders: dict[str, Path], prefix: str) -> None:
    ids, cached = answers(folders["plain"], [prompt_of(300)] * 3, prefix=prefix)
    assert len(ids) == 3 and cached == [0, 0, 0]
    assert set(Counted.places.values()) == {3}


@pytest.mark.parametrize("layout", ["rows", "slabs", "pool"])
@pytest.mark.parametrize("blocks", [4, 5, 6, 7, 9, 12, 14])
def test_little_memory_ends_no_sequence(folders: dict[str, Path], layout: str, blocks: int) -> None:
    """Rows that share the last block of a prompt copy the block before they write to it."""
    prompt = prompt_of(300)
    alone, _ = answers(folders["plain"], [prompt] * 6, layout=layout, prefix="off")
    ids, _ = answers(folders["plain"], [prompt] * 6, layout=layout, blocks=blocks)
    assert ids == alone
