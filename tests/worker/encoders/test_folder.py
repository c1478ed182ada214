"""Tests encoder folders: the settings read from their files, and refusals that name the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.encoders.folder import inspect_encoder, is_encoder
from mlxpool.worker.encoders.text import EncoderText
from mlxpool.worker.weights.files import folder_files
from worker.encoders.checkpoints import CASES, write, write_json


@pytest.mark.parametrize(
    ("name", "task", "dimensions", "labels"),
    [
        ("bert", "embed", 32, 0),
        ("bert, all poolings", "embed", 192, 0),
        ("embeddinggemma", "embed", 32, 0),
        ("bert, rerank", "rerank", 0, 0),
        ("modernbert, classify", "classify", 0, 4),
    ],
)
def test_files_say_what_a_model_is_for(
    name: str, task: str, dimensions: int, labels: int, tmp_path: Path
) -> None:
    files = folder_files(write(tmp_path / "model", CASES[name]))
    encoder = inspect_encoder(files)
    assert is_encoder(files)
    assert (encoder.task, encoder.dimensions, len(encoder.labels)) == (task, dimensions, labels)
    assert encoder.source.context == 48


def test_another_pooling_is_another_digest(tmp_path: Path) -> None:
    first, other = (
        inspect_encoder(folder_files(write(tmp_path / str(index), CASES[name])))
        for index, name in enumerate(("bert", "bert, 16 dimensions"))
    )
    assert first.folder.digest == other.folder.digest and first.digest != other.digest


@pytest.mark.parametrize(
    ("file", "value", "problem"),
    [
        ("modules.json", [{"type": "models.LSTM", "path": "1_LSTM"}], "the step 'LSTM'"),
        ("modules.json", [{"type": "models.Transformer", "path": ""}], "lists no Pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "middle"}, r"the pooling \['middle'\]"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "mean", "include_prompt": False},
            "include_prompt false, which is not supported",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "one of its prompts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    file: str, value: object, problem: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", CASES["bert"])
    (folder / file).write_text(json.dumps(value))
    with pytest.raises(ModelLoadFailed, match=problem):
        inspect_encoder(folder_files(folder))


def test_a_decoder_without_modules_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", CASES["qwen3"])
    (folder / "modules.json").unlink()
    with pytest.raises(ModelLoadFailed, match=r"no modules\.json, which describes how a qwen3"):
        inspect_encoder(folder_files(folder))


@pytest.mark.parametrize("task", ["rerank", "classify"])
def test_a_task_without_a_head_is_refused(task: str, tmp_path: Path) -> None:
    files = folder_files(write(tmp_path / "model", CASES["bert"]))
    with pytest.raises(ModelLoadFailed, match=f"task is '{task}', but config.json has no head"):
        inspect_encoder(files, task)


def test_a_logit_score_makes_a_model_that_rates(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", CASES["qwen3, asked"])
    kinds = [("Transformer", ""), ("LogitScore", "1_LogitScore")]
    steps = [{"type": f"modules.{kind}", "path": path} for kind, path in kinds]
    write_json(folder / "modules.json", steps)
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": 7, "false_token_id": 9})
    prompts = {"prompts": {"search": "Rate it"}, "default_prompt_name": "search"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    encoder = inspect_encoder(folder_files(folder))
    assert encoder.task == "rerank" and encoder.source.asks
    text = EncoderText(encoder.source)
    assert text.encode_pairs([("a", "b")]) == text.encode_pairs([("a", "b")], prompt="Rate it")
    assert text.encode_pairs([("a", "b")]) != text.encode_pairs([("a", "b")], prompt="Rank it")
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": 7})
    with pytest.raises(ModelLoadFailed, match="has no false_token_id, must name two tokens"):
        inspect_encoder(folder_files(folder))


def test_a_score_of_one_label_is_not_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", CASES["qwen3, one label"])
    assert not inspect_encoder(folder_files(folder), "rerank").source.asks


@pytest.mark.parametrize(
    ("name", "activation"), [("linear.Identity", ""), ("activation.Sigmoid", "sigmoid")]
)
def test_an_activation_beside_the_model_counts(name: str, activation: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", CASES["bert, rerank without activation"])
    settings = {"activation_fn": f"torch.nn.modules.{name}"}
    write_json(folder / "config_sentence_transformers.json", settings)
    assert inspect_encoder(folder_files(folder)).activation == activation


def test_segments_are_those_that_the_tokenizer_gives_the_model(tmp_path: Path) -> None:
    for name, given in (("bert, rerank", True), ("bert, rerank without types", False)):
        encoder = inspect_encoder(folder_files(write(tmp_path / name, CASES[name])))
        (pair,) = EncoderText(encoder.source).encode_pairs([("a", "b")])
        assert bool(pair.types) == given
