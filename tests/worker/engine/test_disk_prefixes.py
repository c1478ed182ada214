"""Tests the disk tier in an engine: a new engine continues with the prefixes of an ended one.

Tests each layout and each kind of cache: keys and values, a sliding window, a recurrent state,
latent vectors. Answers are compared with the answers of an engine without a cache.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine_steps import decode, read
from support.pool import PATIENCE, until
from support.worker_checkpoints import GLM, QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker import versions  # noqa: E402
from mlxpool.worker.engine import disk_prefixes, disk_saves  # noqa: E402
from mlxpool.worker.engine.disk_prefixes import DiskPrefixes  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.prefix.tree_cache import TreeCache  # noqa: E402
from mlxpool.worker.prefix_disk import pacing  # noqa: E402
from mlxpool.worker.prefix_disk.folder import DiskSettings  # noqa: E402
from mlxpool.worker.prefix_disk.index import FolderIndex  # noqa: E402
from mlxpool.worker.prefix_disk.records import block_key  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

LONG: dict[str, Any] = {"max_position_embeddings": 4096}
WINDOW = {"model_type": "mistral", "sliding_window": 40}
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": WINDOW,
    "recurrent": {**QWEN3_NEXT, "num_hidden_layers": 3},
    "latent": GLM,
}
CASES = [
    ("full", "rows", False),
    ("full", "slabs", False),
    ("full", "pool", False),
    ("full", "slabs", True),
    ("window", "rows", False),
    ("window", "pool", False),
    ("recurrent", "rows", False),
    ("latent", "rows", False),
    ("latent", "pool", False),
]
INT8_CASES = [
    ("full", "rows", True),
    ("full", "slabs", True),
    ("full", "pool", False),
    ("window", "rows", False),
]
SIZE = 1100  # tokens of a prompt: four blocks and a part
STEPS = 6


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    known: dict[tuple[str, bool], LoadedModel] = {}

    def get(name: str, deterministic: bool = False) -> LoadedModel:
        if (name, deterministic) not in known:
            path = tmp_path_factory.mktemp("model")
            folder = inspect(write_checkpoint(path, **LONG, **MODELS[name]))
            known[name, deterministic] = load(folder, deterministic=deterministic)
        return known[name, deterministic]

    yield get


def prompt_of(size: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(salt).integers(0, 256, size).tolist())


def sequence(prompt: Many[int], **named: Any) -> Sequence:
    return Sequence(b"", 1, tuple(prompt), Options(temperature=0.0), 11, STEPS, **named)


def opened(
    loaded: LoadedModel, path: Path, *, budget: int = 2**28, name: str = "m", **settings: Any
) -> ModelEngine:
    """Returns an engine with a disk tier in the folder `path`."""
    engine = model_engine(loaded, **{"lookahead": False, "blocks": 64, **settings})
    engine.open_disk(DiskSettings(path, name, budget), lambda: None)
    assert engine.disk is not None
    return engine


def closed(engine: ModelEngine) -> None:
    """Closes an engine when all its prefixes are on the disk, as a worker does at its end."""
    assert engine.disk is not None
    engine.disk.save_all(time.monotonic() + 60)
    assert engine.disk.counters.dropped == 0
    engine.close()


def disk_of(engine: ModelEngine) -> DiskPrefixes:
    assert engine.disk is not None
    return engine.disk


def tree_of(engine: ModelEngine) -> TreeCache[Any, Any, Any]:
    assert isinstance(engine.prefix, TreeCache)
    return engine.prefix


def reopened(model: LoadedModel, path: Path, **settings: Any) -> ModelEngine:
    """Returns an engine that has listed the files of its folder."""
    engine = opened(model, path, **settings)
    until(lambda: disk_of(engine).counters.bytes, "the folder was looked at")
    return engine


def fetch(engine: ModelEngine, seq: Sequence, *, busy: bool = False) -> None:
    """Reads a sequence's prefix from the disk, and waits until the prefix is restored."""
    disk = disk_of(engine)
    disk.begin(seq, time.monotonic())

    def ready() -> bool:
        disk.turn(time.monotonic(), busy=busy)
        return not seq.restoring

    until(ready, "the disk is read")


def ask(engine: ModelEngine, seq: Sequence, *, busy: bool = False) -> list[int]:
    if engine.disk is not None:
        fetch(engine, seq, busy=busy)
    engine.admit(seq)
    read(engine, seq)
    decode(engine, [seq], STEPS)
    engine.release(seq)
    return seq.ids


def saved(model: LoadedModel, path: Path, *prompts: Many[int], **settings: Any) -> list[int]:
    """Answers prompts and saves their prefixes on the disk. Returns the ids of the last answer."""
    engine = opened(model, path, **settings)
    for prompt in prompts:
        answer = ask(engine, sequence(prompt))
    closed(engine)
    return answer


def plain(loaded: LoadedModel, prompt: Many[int], **settings: Any) -> list[int]:
    return ask(
        model_engine(loaded, lookahead=False, prefix="off", blocks=64, **settings), sequence(prompt)
    )


@pytest.mark.parametrize(
    ("name", "layout", "deterministic", "kv"),
    [(*case, "auto") for case in CASES] + [(*case, "int8") for case in INT8_CASES],
)
def test_a_new_engine_goes_on_with_the_same_tokens(
    loaded: Any, tmp_path: Path, name: str, layout: str, deterministic: bool, kv: str
) -> None:
    model, prompt = loaded(name, deterministic), prompt_of(SIZE)
    first = opened(model, tmp_path, layout=layout, kv=kv)
    seq = sequence(prompt, restore_at=1090)
    answer = ask(first, seq)
    assert seq.cached == 0 and answer == plain(model, prompt, layout=layout, kv=kv)
    closed(first)

    second = reopened(model, tmp_path, layout=layout, kv=kv)
    again = sequence(prompt, restore_at=1090)
    assert ask(second, again) == answer
    assert again.cached == (1090 if second.prefix.whole else SIZE - 1)
    assert disk_of(second).counters.tokens == again.cached
    turn = (*prompt, *answer, *prompt_of(30, 5))
    next_turn = sequence(turn)
    assert ask(second, next_turn) == plain(model, turn, layout=layout, kv=kv)
    assert next_turn.cached >= (1090 if second.prefix.whole else SIZE)
    branch = (*prompt[:700], *prompt_of(300, 6))
    other = sequence(branch)
    assert ask(second, other) == plain(model, branch, layout=layout, kv=kv)
    assert other.cached == (0 if second.prefix.whole else 700)
    second.close()


def test_records_of_other_rules_are_never_used(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(SIZE)
    saved(loaded("full"), tmp_path, prompt, layout="rows")

    def cached(model: LoadedModel, **settings: Any) -> int:
        other = reopened(model, tmp_path, **settings)
        seq = sequence(prompt)
        assert ask(other, seq) == plain(model, prompt, **settings)
        other.close()
        return seq.cached

    assert cached(loaded("full"), layout="rows") == SIZE - 1
    assert cached(loaded("window"), layout="rows") == 0  # other weights and caches
    assert cached(loaded("full"), layout="slabs") == 0
    assert cached(loaded("full"), layout="pool") == 0
    assert cached(loaded("full", True), layout="rows") == 0
    monkeypatch.setattr(versions, "KEPT_RULES", 2)
    assert cached(loaded("full"), layout="rows") == 0
    monkeypatch.undo()
    assert cached(loaded("full", True), layout="rows", kv="int8") == 0


def test_records_of_weights_that_were_replaced_are_never_used(tmp_path: Path) -> None:
    """The disk tier does not use a record if the time of a weight file has changed since.

    The model's digest is the same then: of a weight file it covers only header, size and both ends.
    """
    path, prompt = tmp_path / "model", prompt_of(SIZE)
    path.mkdir()
    folder = inspect(write_checkpoint(path, **LONG))
    model = load(folder)
    engine = opened(model, tmp_path / "disk")
    ask(engine, sequence(prompt))
    closed(engine)
    (shard,) = folder.shards
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ModelLoadFailed, match="changed while it was loaded"):
        opened(model, tmp_path / "disk")
    other = reopened(load(inspect(path)), tmp_path / "disk")
    assert other.digest == engine.digest
    seq = sequence(prompt)
    ask(other, seq)
    assert seq.cached == 0
    other.close()


@pytest.mark.parametrize("layout", ["slabs", "pool"])
def test_damaged_segments_cost_time_and_no_token(loaded: Any, tmp_path: Path, layout: str) -> None:
    model, prompt = loaded("full"), prompt_of(SIZE)
    answer = saved(model, tmp_path, prompt, layout=layout)
    (path,) = tmp_path.rglob("*.seg")
    data, draw = path.read_bytes(), np.random.default_rng(3)
    cached = []
    for _ in range(12):
        damaged = bytearray(data)
        for at in draw.integers(0, len(data), 2):
            damaged[at] ^= 1 << int(draw.integers(0, 8))
        path.write_bytes(damaged)
        other = reopened(model, tmp_path, layout=layout)
        seq = sequence(prompt)
        assert ask(other, seq) == answer
        cached.append(seq.cached)
        other.close()
        for extra in set(tmp_path.rglob("*.seg")) - {path}:
            extra.unlink()
    assert min(cached) < SIZE - 1 and all(0 <= count < SIZE for count in cached)


def test_owners_share_nothing(loaded: Any, tmp_path: Path) -> None:
    model, prompt = loaded("full"), prompt_of(SIZE)
    engine = opened(model, tmp_path, by_owner=True)
    ask(engine, sequence(prompt, owner="alice"))
    seen = [sequence(prompt, owner=owner) for owner in ("bob", "alice", "")]
    for seq in seen:
        ask(engine, seq)
    assert [seq.cached for seq in seen] == [0, SIZE - 1, 0]
    closed(engine)
    other = reopened(model, tmp_path, by_owner=True)
    seen = [sequence(prompt, owner=owner) for owner in ("carol", "bob", "alice")]
    for seq in seen:
        ask(other, seq)
    assert [seq.cached for seq in seen] == [0, SIZE - 1, SIZE - 1]
    other.close()


def test_records_that_leave_the_memory_are_saved_while_sequences_run(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "REST", 0.0)
    model = loaded("full")
    token = 2 * 2 * 2 * 8 * 4  # bytes: layers, keys and values, heads, size, float32
    engine = opened(model, tmp_path, layout="rows", prefix_bytes=3000 * token)
    disk = disk_of(engine)
    prompts = [prompt_of(SIZE, salt) for salt in range(4)]
    for prompt in prompts:
        ask(engine, sequence(prompt))
        for _ in range(30):
            until(lambda: disk.tier.writes.pending == 0, "it is written")
            disk.turn(time.monotonic(), busy=True)
    assert engine.prefix.evictions > 0
    seq = sequence(prompts[0])
    assert ask(engine, seq, busy=True) == plain(model, prompts[0], layout="rows")
    assert seq.cached >= 1024
    engine.close()


def test_a_tree_without_space_takes_what_fits(loaded: Any, tmp_path: Path) -> None:
    model, prompt = loaded("full"), prompt_of(SIZE)
    answer = saved(model, tmp_path, prompt, layout="rows")
    token = 2 * 2 * 2 * 8 * 4
    small = reopened(model, tmp_path, layout="rows", prefix_bytes=600 * token)
    seq = sequence(prompt)
    assert ask(small, seq) == answer
    assert seq.cached == 512 and small.prefix.nbytes <= 600 * token
    small.close()


@pytest.mark.parametrize("layout", ["pool", "rows", "slabs"])
def test_a_restored_prefix_takes_no_blocks_that_rows_were_given(
    loaded: Any, tmp_path: Path, layout: str
) -> None:
    model, prompt = loaded("full"), prompt_of(8 * 256 + 2)
    saved(model, tmp_path, prompt, layout=layout)
    other = reopened(model, tmp_path, layout=layout, blocks=16)
    row = sequence(prompt_of(12 * 256 - 2, 5))
    assert other.blocks.admit(row, alone=True) and other.blocks.given(row) == 13
    other.admit(row)
    seq = sequence(prompt)
    fetch(other, seq)
    assert 0 < tree_of(other).probe(prompt)[0] < len(prompt) - 1
    assert other.blocks.available >= 0
    read(other, row)
    assert row.submitted >= len(row.prompt) - 1
    other.close()


@pytest.mark.parametrize("layout", ["pool", "rows"])
def test_a_row_gets_the_memory_of_what_others_wait_for(
    loaded: Any, tmp_path: Path, layout: str
) -> None:
    model, prompts = loaded("full"), [prompt_of(6 * 256 + 2, salt) for salt in range(3)]
    saved(model, tmp_path, *prompts, layout=layout)
    other = reopened(model, tmp_path, layout=layout, blocks=16)
    waiting = [sequence(prompt) for prompt in prompts]
    for seq in waiting:
        fetch(other, seq)
    first = sequence(prompt_of(10 * 256, 7))
    assert other.blocks.admit(first, alone=True)
    assert other.blocks.available >= 0
    other.admit(first)
    read(other, first)
    other.close()


def test_a_sequence_that_leaves_holds_nothing(loaded: Any, tmp_path: Path) -> None:
    model, prompt = loaded("full"), prompt_of(SIZE)
    saved(model, tmp_path, prompt, layout="pool")
    other = reopened(model, tmp_path, layout="pool")
    seq = sequence(prompt)
    fetch(other, seq)
    assert other.prefix.nbytes > 0
    assert other.prefix.shrink(10**12) == 0  # the prefix that `seq` waits for is not evicted
    other.release(seq)
    assert other.prefix.shrink(10**12) > 0 and other.prefix.nbytes == 0
    assert other.inspect().memory.blocks_in_use() == 0
    other.close()


def test_a_disk_that_does_not_answer_is_given_up(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = loaded("full"), prompt_of(SIZE)
    answer = saved(model, tmp_path, prompt)
    other = reopened(model, tmp_path)
    disk = disk_of(other)
    asked, may_end = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        asked.set()
        may_end.wait()

    monkeypatch.setattr(disk.tier.reader, "_read_chosen", stuck)
    seq, began = sequence(prompt), time.monotonic()
    disk.begin(seq, began)
    assert asked.wait(PATIENCE) and seq.restoring
    now = time.monotonic()
    disk.turn(began + disk_prefixes.READ_LIMIT - 0.1, busy=False)
    assert seq.restoring
    disk.turn(now + disk_prefixes.READ_LIMIT + 0.1, busy=False)
    assert not seq.restoring
    may_end.set()
    later = sequence(prompt)
    disk.begin(later, now + disk_prefixes.READ_LIMIT + 1)
    assert not later.restoring  # no sequence waits for the disk for a while
    other.admit(seq)
    read(other, seq)
    decode(other, [seq], STEPS)
    assert seq.ids == answer and seq.cached == 0
    other.close()


def test_a_disk_that_serves_others_is_not_given_up(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_prefixes, "READ_LIMIT", 1e6)  # seconds; more than the machine's uptime
    model, prompts = loaded("full"), [prompt_of(SIZE, salt) for salt in range(2)]
    saved(model, tmp_path, *prompts)
    other = reopened(model, tmp_path)
    disk = disk_of(other)
    disk.tier.reader.room.limit = 1  # reads one record at a time
    first, second = map(sequence, prompts)
    began = time.monotonic() - 2 * disk_prefixes.READ_LIMIT
    disk.begin(first, began)
    disk.begin(second, began)
    reader = disk.tier.reader

    def waits() -> bool:
        """Returns whether the reader waits: its last progress is then the current time."""
        now = time.monotonic()
        return reader.last_progress >= now

    until(waits, "the disk waits for the compute thread")

    def ready() -> bool:
        disk.turn(time.monotonic(), busy=True)
        return not first.restoring and not second.restoring

    until(ready, "both are read")
    for seq in (first, second):
        before = disk.counters.tokens
        disk.leave(seq)
        assert disk.counters.tokens - before == SIZE - 1
    other.close()


def test_a_prefix_is_read_once_for_all_that_begin_with_it(loaded: Any, tmp_path: Path) -> None:
    model, prompt = loaded("full"), prompt_of(SIZE)
    saved(model, tmp_path, prompt)
    other = reopened(model, tmp_path)
    disk = disk_of(other)
    sequences = [sequence(prompt) for _ in range(4)]

    def ready() -> bool:
        for seq in sequences:
            disk.begin(seq, time.monotonic())
        disk.turn(time.monotonic(), busy=True)
        return not any(seq.restoring or not seq.looked_up for seq in sequences)

    until(ready, "the disk is read")
    for seq in sequences:
        other.admit(seq)
    assert [seq.cached for seq in sequences] == [SIZE - 1] * 4
    assert (disk.counters.hits, disk.counters.tokens) == (1, SIZE - 1)
    assert disk.counters.read_bytes < 2 * SIZE * 2 * 2 * 2 * 8 * 4
    other.close()


def test_a_sequence_goes_on_when_the_one_that_reads_for_it_leaves(
    loaded: Any, tmp_path: Path
) -> None:
    model, prompt = loaded("full"), prompt_of(SIZE)
    answer = saved(model, tmp_path, prompt)
    other = reopened(model, tmp_path)
    disk = disk_of(other)
    first, second = sequence(prompt), sequence(prompt)
    disk.begin(first, time.monotonic())
    disk.begin(second, time.monotonic())
    assert second.restoring and not second.looked_up
    other.release(first)
    assert ask(other, second) == answer and second.cached == SIZE - 1
    other.close()


def test_saving_that_fails_costs_a_record_and_pauses(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(loaded("full"), tmp_path)
    disk = disk_of(engine)
    ask(engine, sequence(prompt_of(SIZE)))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.inspect().layout.store, "stored", fail)
    disk.save_all(time.monotonic() + 600)  # ends at once
    assert disk.counters.dropped == 1 and disk.counters.written_bytes == 0
    monkeypatch.undo()
    disk.save_all(time.monotonic() + 600)
    assert disk.counters.dropped == 1 and disk.counters.written_bytes == 0
    later = disk_prefixes.SAVE_PAUSE + 1
    monkeypatch.setattr(disk_prefixes, "monotonic", lambda: time.monotonic() + later)
    disk.save_all(time.monotonic() + later + 60)
    assert disk.counters.written_bytes > 0
    engine.close()


def test_a_request_waits_for_the_first_look_at_the_folder(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes before all segments have been scanned waits for the scan."""
    model, prompt = loaded("full"), prompt_of(SIZE)
    answer = saved(model, tmp_path, prompt)
    scan, may_scan = FolderIndex.refresh, threading.Event()

    def refresh(one: FolderIndex, now: float) -> None:
        may_scan.wait()
        scan(one, now)

    monkeypatch.setattr(FolderIndex, "refresh", refresh)
    other = opened(model, tmp_path)
    disk, seq = disk_of(other), sequence(prompt)
    disk.begin(seq, time.monotonic())
    disk.turn(time.monotonic(), busy=False)
    assert seq.restoring
    may_scan.set()
    assert ask(other, seq) == answer and seq.cached == SIZE - 1
    other.close()


def test_what_is_saved_is_not_looked_at_again(loaded: Any, tmp_path: Path) -> None:
    engine = opened(loaded("full"), tmp_path)
    disk = disk_of(engine)
    ask(engine, sequence(prompt_of(SIZE)))
    until(lambda: not disk.save_some() and not disk.may_save, "all is given away")
    until(lambda: disk.tier.writes.pending == 0, "all is written")
    assert disk.counters.written_bytes > 0
    written = disk.counters.written_bytes
    assert len(list(tmp_path.rglob("*.seg"))) == 1
    closed(engine)
    assert disk.counters.written_bytes == written


def test_engines_without_a_tree_are_refused(loaded: Any, tmp_path: Path) -> None:
    for mode in ("off", "single"):
        engine = model_engine(loaded("full"), prefix=mode)
        with pytest.raises(
            ModelLoadFailed, match="the prefix cache of this model cannot be kept on disk"
        ):
            engine.open_disk(DiskSettings(tmp_path, "m", 2**26), lambda: None)


def test_a_folder_of_others_is_refused(loaded: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    engine = model_engine(loaded("full"))
    with pytest.raises(ModelLoadFailed, match=r"prefix_disk: .* has the mode 0777"):
        engine.open_disk(DiskSettings(tmp_path, "m", 2**26), lambda: None)


def test_the_memory_of_records_on_their_way_is_reserved(loaded: Any, tmp_path: Path) -> None:
    engine = model_engine(loaded("full"), limit=2**32)
    before = engine.inspect().budget.free_blocks
    engine.open_disk(DiskSettings(tmp_path, "m", 2**26), lambda: None)
    assert (
        engine.inspect().budget.free_blocks <= before - 2 * 2**26 // engine.inspect().budget.block
    )
    engine.close()


def test_a_part_that_saves_little_is_not_written(loaded: Any, tmp_path: Path) -> None:
    engine = opened(loaded("full"), tmp_path)
    ask(engine, sequence(prompt_of(512 + disk_saves.MIN_PART - STEPS - 1)))
    closed(engine)
    other = opened(loaded("full"), tmp_path)
    until(lambda: len(disk_of(other).tier.index.records) == 2, "two blocks are found")
    other.close()


def test_a_step_of_saving_is_bounded(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a larger tree and longer paths, saving takes more steps, but not longer steps."""
    monkeypatch.setattr(disk_saves, "STEP_BLOCKS", 2)
    monkeypatch.setattr(disk_saves, "STEP_NODES", 3)
    model, begin = loaded("full"), prompt_of(600)
    prompts = [(*begin, *prompt_of(SIZE - 600, salt)) for salt in range(3)]
    prompts += [prompt_of(SIZE, salt) for salt in range(3, 6)]
    engine = opened(model, tmp_path)
    for prompt in prompts:
        ask(engine, sequence(prompt))
    disk, tree = disk_of(engine), tree_of(engine).tree
    walk = tree.walk
    nodes = hashed = 0

    def counted_walk(*of: Any) -> Iterator[Any]:
        nonlocal nodes
        for node in walk(*of):
            nodes += 1
            yield node

    def counted_key(*of: Any) -> bytes:
        nonlocal hashed
        hashed += 1
        return block_key(*of)

    monkeypatch.setattr(tree, "walk", counted_walk)
    monkeypatch.setattr(disk_saves, "block_key", counted_key)
    most = [0, 0]
    while disk.may_save:
        before = nodes, hashed
        disk.save_some()
        most = [max(most[0], nodes - before[0]), max(most[1], hashed - before[1])]
        until(lambda: disk.tier.writes.pending == 0, "it is written")
    assert most == [3, 2] and nodes > 6 and hashed >= 5 * len(prompts)
    engine.close()
    other = reopened(model, tmp_path)
    for prompt in prompts:
        seq = sequence(prompt)
        ask(other, seq)
        assert seq.cached == SIZE - 1
    other.close()
