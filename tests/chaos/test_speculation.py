"""A worker is killed in a step that checks drafts: the stream is the same as without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos.engine_faults import install_fault
from chaos.harness import WEIGHTS_LIMITS
from mlxpool.client import Result
from support.draft_models import write_draft
from support.pool import Pool, until
from support.predicting_models import write_predicting

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

MODEL = '\n[models.demo]\npath = "{}"\nspeculation = "{}"\ndraft = "{}"\n'
PROMPT = "rows = [\n    (1, 'one'),\n    (2, 'two'),\n    (1, 'one'),\n    (2, 'two'),\n    (1, '"
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "logprobs": True},
    {"temperature": 0.0, "format": {"type": "regex", "pattern": "[12](, [12]){20,30}; end"}},
]
PLACES = (3, 11, 19)  # number of ids before the fault, for each of OPTIONS
# Drafts are checked even if they do not pay. Ends the process once for each request, in a step that
# checks drafts after the number of ids in PLACES; `max_tokens` identifies the request. The folder
# MARKS has a file for each request that had its fault.
FAULT = f"""\
import os, signal

def arm(engine):
    from mlxpool.worker.speculation import row_search, speculator

    row_search.TIME_SHARE = 1.0  # a busy machine searches too
    speculator.Speculator.pause = lambda self: None
    speculator.choose_depths = lambda chances, *others, **more: [len(some) for some in chances]
    collect = engine.collect

    def collect_or_end(self):
        for span in self.pipeline.flights[0].checks:
            row = span.sequence
            place = {dict(zip((60, 61, 90), PLACES, strict=True))!r}.get(row.max_tokens)
            if place is not None and len(row.ids) >= place:  # the warm-up checks drafts too
                try:
                    mark = os.path.join(os.environ["MARKS"], str(row.max_tokens))
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return collect(self)

    engine.collect = collect_or_end
"""


ASKED = list(zip((60, 61, 90), OPTIONS, strict=True))


def without_drafts(tmp_path: Path, path: str, asked: list[Any]) -> list[Result]:
    """Returns the answers of a model without drafts."""
    with (
        Pool(tmp_path, WEIGHTS_LIMITS + MODEL.format(path, "off", "")) as pool,
        pool.client() as client,
    ):
        results = [
            client.generate("demo", PROMPT, max_tokens=count, **options) for count, options in asked
        ]
        (row,) = pool.ask("ps")["workers"]
        assert row["speculation"] == {}
    return results


@pytest.fixture(scope="module")
def of_demo(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Returns the answers of the demo model."""
    return without_drafts(tmp_path_factory.mktemp("plain"), "builtin:demo", ASKED)


@pytest.mark.parametrize("setting", ["ngram", "mtp", "draft", "auto"])
def test_a_kill_in_a_step_with_drafts_changes_nothing(
    tmp_path: Path, of_demo: list[Result], setting: str
) -> None:
    """With "mtp" the model has recurrent layers, and an MTP head whose drafts are mostly right.

    With "auto" the drafts come from n-grams and from the draft model.
    """
    asked, wanted, path = ASKED, of_demo, "builtin:demo"
    draft = str(write_draft(tmp_path / "draft")) if setting in ("draft", "auto") else ""
    if setting == "mtp":
        path = str(write_predicting(tmp_path / "model", "qwen3_next", right=True))
        endless = [(count, {**options, "ignore_eos": True}) for count, options in asked[:2]]
        asked = [*endless, *asked[2:]]
        wanted = without_drafts(tmp_path, path, asked)
    with_drafts = MODEL.format(path, setting, draft)
    environment = {**install_fault(tmp_path, FAULT), "MARKS": str(tmp_path)}
    with (
        Pool(tmp_path, WEIGHTS_LIMITS + with_drafts, environment=environment) as pool,
        pool.client() as client,
    ):
        for (count, options), plain in zip(asked, wanted, strict=True):
            hit = client.generate("demo", PROMPT, max_tokens=count, **options)
            assert hit.attempts == 2 and (tmp_path / str(count)).exists()
            assert (hit.ids, hit.text, hit.reason) == (plain.ids, plain.text, plain.reason)
        count, options = asked[0]  # most of its drafts are right; no fault is left
        again = client.generate("demo", PROMPT, max_tokens=count, **options)
        assert (again.ids, again.attempts) == (wanted[0].ids, 1)

        def counted() -> bool:
            (row,) = pool.ask("ps")["workers"]
            counts = row["speculation"]
            return bool(counts) and counts["drafted"] >= counts["accepted"] > 0 < counts["checks"]

        until(counted, "the worker says how many drafts were right")
