"""Tests warm-up figures that are stored on a CPU, so that a later load need not measure them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from support.engine_steps import decode, enter
from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine import measurements, warm_up  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.system import kept_files  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

pytestmark = pytest.mark.skipif(device.on_gpu(), reason="a GPU measures at each load")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(inspect(write_checkpoint(tmp_path_factory.mktemp("model"))))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "loads"


def warmed(loaded: LoadedModel, **settings: Any) -> tuple[ModelEngine, int]:
    """Warms up an engine; returns it, and the number of chunks that were measured."""
    engine, measured = model_engine(loaded, **{"keeps_measurement": True, **settings}), list[int]()
    measure = warm_up.measure_chunk

    def noted(engine: ModelEngine, size: int) -> tuple[int, int]:
        measured.append(size)
        return measure(engine, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "measure_chunk", noted)
        engine.warm_up()
    return engine, len(measured)


def test_a_second_load_takes_the_figures_and_answers_the_same(loaded: LoadedModel) -> None:
    (first, measured), (second, again) = (warmed(loaded, max_sequences=4) for _ in range(2))
    assert (measured, again) == (2, 0)
    had, has = first.inspect().budget, second.inspect().budget
    assert has.step == had.step > 0 and has.process >= had.process
    assert second.blocks.capacity <= first.blocks.capacity
    assert second.cost.observed[: len(first.cost.observed)] == first.cost.observed
    answers = []
    for engine in (first, second):
        options = Options.parse({"temperature": 0, "ignore_eos": True})
        seq = Sequence(b"1" * 16, 1, (1, 2, 3), options, 0, 8)
        enter(engine, seq)
        answers.append([drawn.token for drawn in decode(engine, [seq], 8)])
        engine.release(seq)
    assert answers[0] == answers[1]


def test_an_engine_that_is_not_told_to_keep_figures_measures(
    loaded: LoadedModel, folder: Path
) -> None:
    assert warmed(loaded, keeps_measurement=False)[1] == 2
    assert not folder.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_sequences": 3},
        {"context": 64},
        {"batch": 32},
        {"layout": "rows"},
        {"limit": 2**33},  # a share of the limit is left to the heap
    ],
)
def test_other_settings_are_measured(loaded: LoadedModel, settings: dict[str, Any]) -> None:
    warmed(loaded)
    assert warmed(loaded, **settings)[1] == 2
    assert warmed(loaded)[1] == 0


@pytest.mark.parametrize(
    ("name", "value"), [("mlx", "9.9"), ("cpu", "another"), ("cores", 99), ("code", "newer")]
)
def test_another_machine_or_version_is_measured(
    loaded: LoadedModel, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(loaded)
    changed = {**kept_files.machine(), name: value}
    monkeypatch.setattr(measurements, "machine", lambda: changed)
    assert warmed(loaded)[1] == 2


def test_other_weights_are_measured(loaded: LoadedModel, tmp_path: Path) -> None:
    warmed(loaded)
    other = write_checkpoint(tmp_path / "other", vocab_size=300)
    assert warmed(load(inspect(other)))[1] == 2


@pytest.mark.parametrize("content", [b"", b"{}", b'{"step": -1}', b'{"step": "much"}'])
def test_a_file_with_other_fields_is_logged_and_measured(
    loaded: LoadedModel, folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = warmed(loaded)
    kept = warm_up.kept_measurement(engine)
    assert kept is not None
    kept.file.write(content)
    with caplog.at_level(logging.WARNING):
        assert warmed(loaded)[1] == 2
    assert "not used" in caplog.text
    assert warmed(loaded)[1] == 0
