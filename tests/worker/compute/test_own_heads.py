"""The models that may draft with their own head (MTP); errors for other models name a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.predicting_models import FAMILIES, settings, write_predicting
from support.worker_checkpoints import random_weights, write_checkpoint

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.compute import model_source
from mlxpool.worker.compute.model_source import ModelSource, open_source
from mlxpool.worker.diagnose.check import check


def without_head(path: Path, family: str) -> Path:
    """Makes a model like most conversions: config.json describes a head that the weights lack."""
    return write_checkpoint(path, weights=random_weights(settings(family)), **FAMILIES[family])


def asking(path: Path, speculation: str = "mtp", **changes: Any) -> ModelConfig:
    return ModelConfig(path=str(path), speculation=speculation, **changes)


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "no head in the weights": (
        lambda path: without_head(path, "glm4_moe_lite"),
        {},
        r"no tensors 'model\.layers\.2\.\*' of a head.*most conversions leave them out",
    ),
    "no head in a conversion of Qwen": (
        lambda path: without_head(path, "qwen3_5"),
        {},
        r"no tensors 'mtp\.\*' of a head",
    ),
    "another family": (write_checkpoint, {}, "'llama' has no head that predicts further tokens"),
    "a group": (
        lambda path: write_predicting(path, "glm4_moe_lite"),
        {"devices": 2},
        "devices is 2, and a group of devices checks no drafts",
    ),
}


BOTH = 'set speculation to "ngram" or "auto"'
AUTO_ALONE = 'leave speculation out, or set it to "auto"'
# Cases in which n-grams can draft, too; models of the other cases check no drafts.
NGRAMS_TOO = ("no head in the weights", "another family")


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_draft_with_a_head_is_refused(name: str, tmp_path: Path) -> None:
    """The worker reports the error before it reads the weights; `mlxpool check` reports it, too."""
    write, changes, words = CASES[name]
    path = write(tmp_path / "model")
    with pytest.raises(ModelLoadFailed, match=f"speculation is 'mtp', but .*{words}") as caught:
        open_source(asking(path, **changes))
    assert str(caught.value).endswith(BOTH if name in NGRAMS_TOO else AUTO_ALONE)
    problems = check("some", asking(path, **changes))["problems"]
    assert any(words.split("'")[0].replace("\\", "") in problem for problem in problems), problems


@pytest.mark.parametrize("speculation", ["off", "ngram", "auto", "mtp"])
def test_weights_of_a_head_are_read_where_it_may_draft(speculation: str, tmp_path: Path) -> None:
    path = write_predicting(tmp_path, "glm4_moe_lite")
    source = open_source(asking(path, speculation))
    assert isinstance(source, ModelSource)
    plain = open_source(asking(path, "off"))
    assert isinstance(plain, ModelSource)
    assert (source.weight_bytes > plain.weight_bytes) == (speculation in ("auto", "mtp"))
    # A stream may continue with either setting.
    assert source.opened.digest == plain.opened.digest


def test_auto_leaves_a_head_out_that_cannot_draft(tmp_path: Path) -> None:
    path = write_predicting(tmp_path, "glm4_moe_lite")
    plain, auto = (open_source(asking(path, setting, devices=2)) for setting in ("off", "auto"))
    assert isinstance(plain, ModelSource) and isinstance(auto, ModelSource)
    assert auto.weight_bytes == plain.weight_bytes


RECURRENT = "recurrent states, and rows with these cannot give up wrong drafts"


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_next", {"speculation": "ngram"}, f"speculation is 'ngram', but .*{RECURRENT}"),
        (
            "qwen3_5",
            {"speculation": "draft", "draft": "some"},
            f"draft is 'some', but .*{RECURRENT}",
        ),
        ("", {"speculation": "ngram", "deterministic": True}, "'ngram', but deterministic is true"),
        ("", {"speculation": "ngram", "devices": 2}, "'ngram', but devices is 2"),
    ],
)
def test_a_model_that_checks_no_drafts_is_refused_before_its_weights_are_read(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """`mlxpool check` reports the same error."""
    path = write_predicting(tmp_path, family) if family else write_checkpoint(tmp_path)
    with pytest.raises(ModelLoadFailed, match=words):
        open_source(asking(path, **changes))
    problems = check("some", asking(path, **changes))["problems"]
    assert any(re.search(words, problem) for problem in problems), problems


def test_a_vocabulary_that_n_grams_cannot_have_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "MAX_TOKENS", 100)
    path = write_checkpoint(tmp_path)
    words = "speculation is 'ngram', but the vocabulary has .* tokens, above the 100 of n-grams;"
    with pytest.raises(ModelLoadFailed, match=words):
        open_source(asking(path, "ngram"))
    assert any(
        re.search(words, problem) for problem in check("some", asking(path, "ngram"))["problems"]
    )
    open_source(asking(path, "auto"))


def test_n_grams_draft_where_the_files_do_not_forbid_it(tmp_path: Path) -> None:
    path = write_predicting(tmp_path, "glm4_moe_lite")
    open_source(asking(path, "ngram"))
    assert check("some", asking(path, "ngram"))["problems"] == []
