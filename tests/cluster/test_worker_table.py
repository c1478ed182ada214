"""The file of a pool's workers and their keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.cluster.worker_table import WorkerRecord, WorkerTable
from mlxpool.common.config import loading

PUBLIC, OTHER = "k" * 40, "l" * 40


def test_it_outlives_who_made_it(tmp_path: Path) -> None:
    table = WorkerTable(tmp_path)
    first, second = table.add("m", "f"), table.add("m", "f")
    table.admit(first.id, PUBLIC, "node")
    table.remove(second.id)
    again = WorkerTable(tmp_path)
    assert again.by_id == {"w1": WorkerRecord("w1", "m", "f", PUBLIC, "node")}
    assert again.add("m", "f").id == "w3"  # an id is never given twice
    again.place("w1", "g", "other")
    assert WorkerTable(tmp_path).by_id["w1"] == WorkerRecord("w1", "m", "g", "", "other")


def test_its_sections_are_settings(tmp_path: Path) -> None:
    table = WorkerTable(tmp_path)
    for public in (PUBLIC, OTHER, ""):
        table.admit(table.add("m", "f").id, public, "node")
    file = tmp_path / "pool.toml"
    file.write_text(f'[models.m]\npath = "/m"\n{table.sections()}')
    keys = {name: (key.role, key.public) for name, key in loading.load(file).keys.items()}
    assert keys == {"ray-w1": ("worker", PUBLIC), "ray-w2": ("worker", OTHER)}


def test_a_new_key_replaces_the_one_before(tmp_path: Path) -> None:
    table = WorkerTable(tmp_path)
    id = table.add("m", "f").id
    table.admit(id, PUBLIC, "node")
    table.admit(id, OTHER, "another")
    assert OTHER in table.sections() and PUBLIC not in table.sections()
    with pytest.raises(KeyError):
        table.admit("w9", PUBLIC, "node")
