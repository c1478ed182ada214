"""The librarian finds models and has them looked at, and nothing it meets holds up the broker."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.catalogue import catalogue_news
from mlxpool.broker.catalogue.catalogue import Librarian, fingerprints
from mlxpool.broker.catalogue.catalogue_news import Library
from mlxpool.broker.edge.startup import place_of, weight_of
from mlxpool.broker.interface import events as ev
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from support.pool import until

ECHO = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    {deed}
    print(json.dumps({{"name": asked["name"], "path": asked["model"]["path"],
                      "problems": [], "model": {{"digest": "d-" + asked["name"]}}}}), flush=True)
"""


def program(deed: str = "pass") -> tuple[str, ...]:
    """A process that finds every model sound, after it did the deed."""
    return (sys.executable, "-c", ECHO.format(deed=deed))


@dataclass
class Shelf:
    """What a librarian has said."""

    found: list[tuple[Any, ...]] = field(default_factory=list)
    described: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    looked: threading.Event = field(default_factory=threading.Event)


Start = Callable[..., tuple[Librarian, Shelf]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a librarian over some models."""
    started: list[Librarian] = []

    def begin(
        models: Mapping[str, str], command: tuple[str, ...] | None = None, **settings: Any
    ) -> tuple[Librarian, Shelf]:
        shelf, limit = Shelf(), settings.pop("limit", 60.0)
        specs = {name: ModelConfig(path=path) for name, path in models.items()}
        librarian = Librarian(
            PoolConfig(run_dir=Path("/nowhere"), models=specs, **settings),
            lambda *found: shelf.found.append(found),
            lambda name, about: shelf.described.append((name, about)),
            shelf.looked.set,
            program() if command is None else command,
            limit,
        )
        started.append(librarian)
        librarian.start()
        return librarian, shelf

    yield begin
    for librarian in started:
        librarian.close()
        librarian.join(60)
        assert not librarian.is_alive()


def look(librarian: Librarian, shelf: Shelf) -> None:
    """One more look, however new the last one is."""
    librarian._done_at = -1e9
    shelf.looked.clear()
    number = librarian.look()
    assert shelf.looked.wait(60)
    assert librarian.done == number


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_each_model_is_looked_at_once_until_its_files_change(start: Start, tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two")
    librarian, shelf = start({"one": str(one), "two": str(two)})
    look(librarian, shelf)
    assert shelf.described == [
        ("one", {"digest": "d-one", "problems": []}),
        ("two", {"digest": "d-two", "problems": []}),
    ]
    look(librarian, shelf)
    assert len(shelf.described) == 2
    os.utime(two / "config.json", ns=(1, 1))
    look(librarian, shelf)
    assert [name for name, _ in shelf.described[2:]] == ["two"]


def test_a_folder_that_comes_later(start: Start, tmp_path: Path) -> None:
    folder(tmp_path / "old")
    models = {"old": str(tmp_path / "old")}
    librarian, shelf = start(models, models_dir=tmp_path)
    look(librarian, shelf)
    new = folder(tmp_path / "org" / "new")
    (new / "model.safetensors").write_bytes(bytes(100))
    look(librarian, shelf)
    config = ModelConfig(path=str(new), within=str(tmp_path))
    assert shelf.found == [("org/new", config, str(new), 100)]
    assert [name for name, _ in shelf.described] == ["old", "org/new"]


def test_a_folder_that_comes_while_others_are_looked_at(start: Start, tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder(tmp_path / name)
    wait = f"while not __import__('os').path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    models = {name: str(tmp_path / name) for name in ("a", "b")}
    librarian, shelf = start(models, program(wait), models_dir=tmp_path)
    first = librarian.look()
    until(lambda: librarian._begun == first, "the look has begun")
    folder(tmp_path / "new")
    assert librarian.look() == first + 1, "the look under way may have passed the folder"
    (tmp_path / "go").touch()
    until(lambda: librarian.done == first + 1, "the second look is done")
    assert [name for name, *_ in shelf.found] == ["new"]
    assert sorted(name for name, _ in shelf.described) == ["a", "b", "new"]


def test_a_models_folder_that_is_gone(start: Start, tmp_path: Path) -> None:
    librarian, shelf = start({}, models_dir=tmp_path / "gone")
    look(librarian, shelf)
    assert shelf.found == []


@pytest.mark.parametrize(
    "deed",
    [
        "asked['name'] == 'bad' and sys.exit(3)",
        "asked['name'] == 'bad' and print('{', flush=True)",
    ],
)
def test_a_model_that_ends_the_process_costs_no_other(
    start: Start, tmp_path: Path, deed: str
) -> None:
    models = {name: str(folder(tmp_path / name)) for name in ("first", "bad", "last")}
    librarian, shelf = start(models, program(deed))
    look(librarian, shelf)
    described = dict(shelf.described)
    assert list(described) == ["first", "bad", "last"]
    assert "ended while it did" in described["bad"]["problems"][0]
    assert described["first"]["problems"] == described["last"]["problems"] == []


def test_a_disk_that_hangs(start: Start, tmp_path: Path) -> None:
    models = {name: str(folder(tmp_path / name)) for name in ("one", "two")}
    librarian, shelf = start(models, program("__import__('time').sleep(600)"), limit=0.1)
    look(librarian, shelf)
    for _, about in shelf.described:
        assert about["problems"] == ["its files could not be read in 0.1 s"]
    assert [name for name, _ in shelf.described] == ["one", "two"]


def test_a_process_that_cannot_be_started(start: Start, tmp_path: Path) -> None:
    models = {"m": str(folder(tmp_path / "m"))}
    librarian, shelf = start(models, (str(tmp_path / "nothing"),))
    look(librarian, shelf)
    ((_, about),) = shelf.described
    assert "no process could be started" in about["problems"][0]


def test_close_ends_a_process_that_hangs(start: Start, tmp_path: Path) -> None:
    models = {"m": str(folder(tmp_path / "m"))}
    librarian, _ = start(models, program("__import__('time').sleep(600)"))
    librarian.look()
    until(lambda: librarian._process is not None, "the process was started")
    librarian.close()
    librarian.join(60)
    assert not librarian.is_alive()


def test_a_look_that_is_new_enough_is_not_made_again(start: Start) -> None:
    librarian, shelf = start({})
    look(librarian, shelf)
    librarian._done_at = time.monotonic() + 3600
    assert librarian.look() == librarian.done


def test_fingerprints(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    first = fingerprints(model)
    assert [name for name, _, _ in first] == ["config.json"]
    (model / "config.json").write_text("{ }")
    assert fingerprints(model) != first
    (model / "gone").symlink_to(tmp_path / "nothing")
    assert [name for name, _, _ in fingerprints(model)] == ["config.json"]
    assert fingerprints(tmp_path / "nothing") == ()
    assert [name for name, _, _ in fingerprints(model / "config.json")] == ["config.json"]


def test_places_and_weights(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    (tmp_path / "link").symlink_to(model)
    (model / "gone.safetensors").symlink_to(tmp_path / "nothing")
    for path in (model, tmp_path / "link"):
        assert place_of(ModelConfig(path=str(path))) == str(model.resolve())
    assert place_of(ModelConfig(path="org/name")) == "org/name"
    assert place_of(ModelConfig(path="builtin:demo")) == "builtin:demo"
    assert place_of(ModelConfig(path="builtin:counting")) == ""
    assert weight_of(ModelConfig(path=str(model))) == 0


def test_a_model_that_a_link_takes_from_elsewhere_has_a_place_of_its_own(tmp_path: Path) -> None:
    """Else a name that is refused would be served by the workers of one that is allowed."""
    border, outside = tmp_path / "models", folder(tmp_path / "outside")
    inside = folder(border / "inside")
    (border / "linked").symlink_to(outside)
    (border / "again").symlink_to(inside)
    (folder(border / "part") / "model.safetensors").symlink_to(outside / "config.json")
    names = ("linked", "part", "inside", "again")
    found = [place_of(ModelConfig(str(border / name), within=str(border))) for name in names]
    assert found == ["", "", str(inside.resolve()), str(inside.resolve())]


# ---- the broker's side ---------------------------------------------------------------------------


class Slow(Librarian):
    """Never finishes a look."""

    def look(self) -> int:
        return 1


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_news, "Librarian", Slow)
    monkeypatch.setattr(catalogue_news, "MOST", 2)
    shelf = Library(PoolConfig(run_dir=Path("/nowhere")))
    try:
        answered: list[float] = []
        for _ in range(3):
            shelf.after_look(answered.append, 100.0)
        assert answered == [100.0], "the third finds too many waiting"
        assert shelf.next_wake() == 100.0 + catalogue_news.PATIENCE
        shelf.serve(100.0 + catalogue_news.PATIENCE - 0.5)
        assert answered == [100.0]
        shelf.serve(100.0 + catalogue_news.PATIENCE)
        assert answered == [100.0, *[100.0 + catalogue_news.PATIENCE] * 2]
        assert shelf.next_wake() == float("inf")
    finally:
        shelf.close()


def test_what_was_found_is_there_before_those_are_answered_who_waited() -> None:
    shelf = Library(PoolConfig(run_dir=Path("/nowhere")))
    try:
        shelf._librarian._command = program()
        shelf._librarian._known = {"c": ModelConfig(path="builtin:counting")}
        shelf.open(look=False)
        answered: list[float] = []
        shelf.after_look(answered.append, 0.0)
        seen: list[ev.Event] = []

        def turned() -> list[float]:
            seen.extend(shelf.take())
            shelf.serve(0.0)
            return answered

        until(turned, "the answer is given")
        assert seen == [ev.ModelDescribed("c", {"digest": "d-c", "problems": []})]
    finally:
        shelf.close()
