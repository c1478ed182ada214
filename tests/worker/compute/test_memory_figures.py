"""Tests the memory figures of heartbeats: parts of a total, and peaks since the last heartbeat."""

from __future__ import annotations

from mlxpool.worker.compute.memory_figures import PARTS, MemoryFigures
from mlxpool.worker.engine.engine import MemoryUse

IDLE = MemoryUse(weights=1000, kv=100, kv_free=60, prefix=40, active=1250, cache=30, peak=1250)


def test_the_parts_add_up_to_the_total() -> None:
    figures = MemoryFigures()
    figures.read(IDLE, 5.0)
    assert not figures.is_due(5.09) and figures.is_due(5.11)
    beat = figures.take()
    assert (beat["weights"], beat["kv"], beat["kv_used"], beat["prefix"]) == (1000, 160, 100, 40)
    assert beat["compute"] == 80  # 50 active besides the other parts, 30 freed and cached
    assert beat["total"] == sum(beat[part] for part in PARTS) == IDLE.active + IDLE.cache


def test_encoded_images_are_a_part_of_what_is_kept_for_later_prompts() -> None:
    figures = MemoryFigures()
    figures.read(MemoryUse(weights=1000, prefix=40, images=60, active=1110, peak=1110), 5.0)
    beat = figures.take()
    assert (beat["prefix"], beat["images"], beat["compute"], beat["total"]) == (100, 60, 10, 1110)


def test_what_steps_needed_for_a_while_counts_until_the_next_heartbeat() -> None:
    figures = MemoryFigures()
    figures.read(MemoryUse(weights=1000, active=1000, peak=1700), 5.0)
    figures.read(MemoryUse(weights=1000, active=1000, peak=1200), 5.0)
    beat = figures.take()
    assert (beat["compute"], beat["total"], beat["peak"]) == (700, 1700, 1700)
    later = figures.take()  # nothing was computed since
    assert (later["compute"], later["total"], later["peak"]) == (0, 1000, 1000)
    assert later["highest"] == 1700


def test_keys_and_values_of_a_row_that_left_were_not_needed_by_a_step() -> None:
    figures = MemoryFigures()
    figures.read(MemoryUse(weights=1000, kv=500, active=1500, peak=1500), 5.0)
    figures.take()
    figures.read(MemoryUse(weights=1000, active=1000, peak=1550), 5.0)
    assert figures.take()["compute"] == 50


def test_parts_that_a_pass_in_flight_has_not_allocated_yet_make_no_negative_part() -> None:
    figures = MemoryFigures()
    figures.read(MemoryUse(weights=1000, kv=500, active=1200, peak=1200), 5.0)
    assert figures.take()["compute"] == 0


def test_while_it_loads_a_worker_holds_weights_alone() -> None:
    figures = MemoryFigures()
    assert figures.take() == {}
    figures.loaded(600)
    beat = figures.take()
    assert (beat["weights"], beat["total"], beat["active"], beat["peak"]) == (600,) * 4
