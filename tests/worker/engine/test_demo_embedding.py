"""The embedded embedding model is complete and small, and finds more texts than TF-IDF."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.encoders.folder import EncoderFolder, inspect_encoder
from mlxpool.worker.encoders.text import EncoderText
from mlxpool.worker.encoders.vectors import Vectors, finished
from mlxpool.worker.engine.encoding.encoder_engine import EncoderEngine
from mlxpool.worker.weights.load import load
from mlxpool.worker.weights.locate import DEMO_EMBED, FOLDERS, find_files, locate

FOLDER = FOLDERS[DEMO_EMBED]
FILES = {
    "1_Pooling/config.json",
    "LICENSE-PSF.txt",
    "README.md",
    "config.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
TEST = Path(__file__).with_name("demo_embedding_test.json")
PROGRAM = Path(__file__).parents[3] / "examples" / "train_demo_embedding.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Returns the training program's module, which has the TF-IDF baseline and the test figures."""
    spec = importlib.util.spec_from_file_location("train_demo_embedding", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def encoder() -> EncoderFolder:
    return inspect_encoder(find_files(DEMO_EMBED))


@pytest.fixture(scope="module")
def engine(encoder: EncoderFolder) -> EncoderEngine:
    return EncoderEngine(encoder, load(encoder.folder))


def embedded(encoder: EncoderFolder, engine: EncoderEngine, texts: list[str]) -> Vectors:
    inputs = EncoderText(encoder.source).encode_texts(texts, truncate=True)
    return finished(engine.encode(inputs), 0, normalise=engine.normalises)


def test_the_folder_is_complete_and_at_most_8_mb() -> None:
    assert locate(ModelConfig(path="builtin:demo-embed")) == FOLDER
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {path.relative_to(FOLDER).as_posix() for path in files} == FILES
    assert sum(path.stat().st_size for path in files) <= 8_000_000


def test_it_finds_more_than_tf_idf_in_modules_that_it_was_not_trained_on(
    program: ModuleType, encoder: EncoderFolder, engine: EncoderEngine
) -> None:
    test = json.loads(TEST.read_text(encoding="utf-8"))
    passages = embedded(encoder, engine, test["passages"])
    for name, queries in test["queries"].items():
        figures = program.rank_figures(embedded(encoder, engine, queries) @ passages.T)
        beside = program.rank_figures(program.tf_idf(queries, test["passages"]))
        assert figures["mrr"] > beside["mrr"], (name, figures, beside)


def test_a_text_is_nearer_to_what_it_describes_than_to_others(
    encoder: EncoderFolder, engine: EncoderEngine
) -> None:
    code = [
        "def reader(file): return csv.reader(file, dialect='excel')",
        "def connect(host, port): return socket.create_connection((host, port))",
        "def mean(numbers): return sum(numbers) / len(numbers)",
    ]
    queries = ["read a csv file", "open a conection to a server", "the average of some values"]
    vectors = embedded(encoder, engine, [*queries, *code])
    assert (vectors[:3] @ vectors[3:].T).argmax(1).tolist() == [0, 1, 2]


def test_its_card_has_the_figures_of_its_training() -> None:
    training: dict[str, Any] = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for side in ("model", "tf_idf"):
        for figures in training[side].values():
            for value in figures.values():
                assert f"{value:.4f}" in card
    assert all(
        training["model"][name][key] > value
        for name, figures in training["tf_idf"].items()
        for key, value in figures.items()
    )
