"""The scanner finds models and has them inspected. No file and no fault delays the broker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.catalogue import Scanner, fingerprints, location, weights_bytes
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from support.model_inspection import model_folder, program
from support.pool import PATIENCE, until

ENDED = "the process that inspects models ended while it inspected this model's files"


@dataclass
class Reports:
    """Collects the reports of a scanner: the models that it has found and inspected."""

    found: list[tuple[Any, ...]] = field(default_factory=list)
    described: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    scanned: threading.Event = field(default_factory=threading.Event)


Start = Callable[..., tuple[Scanner, Reports]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a scanner over some models."""
    started: list[Scanner] = []

    def begin(
        models: Mapping[str, str], command: tuple[str, ...] | None = None, **settings: Any
    ) -> tuple[Scanner, Reports]:
        reports, fresh = Reports(), settings.pop("fresh", 0.0)
        max_seconds = settings.pop("max_seconds", 60.0)
        specs = {name: ModelConfig(path=path) for name, path in models.items()}
        scanner = Scanner(
            PoolConfig(run_dir=Path("/nowhere"), models=specs, **settings),
            lambda *found: reports.found.append(found),
            lambda name, about: reports.described.append((name, about)),
            reports.scanned.set,
            program() if command is None else command,
            max_seconds,
            fresh,
        )
        started.append(scanner)
        scanner.start()
        return scanner, reports

    yield begin
    for scanner in started:
        scanner.close()
        scanner.join(PATIENCE)
        assert not scanner.is_alive()


def scan(scanner: Scanner, reports: Reports) -> None:
    """Runs one more scan."""
    reports.scanned.clear()
    number = scanner.request_scan()
    assert reports.scanned.wait(PATIENCE)
    assert scanner.done == number


def test_each_model_is_inspected_once_until_its_files_change(start: Start, tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one"), model_folder(tmp_path / "two")
    scanner, reports = start({"one": str(one), "two": str(two)})
    scan(scanner, reports)
    assert reports.described == [
        ("one", {"digest": "d-one", "problems": []}),
        ("two", {"digest": "d-two", "problems": []}),
    ]
    scan(scanner, reports)
    assert len(reports.described) == 2
    os.utime(two / "config.json", ns=(1, 1))
    scan(scanner, reports)
    assert [name for name, _ in reports.described[2:]] == ["two"]


def test_a_reference_is_inspected_again_when_it_can_be_found(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing model is inspected again once a file exists at one of its searched paths."""
    places = [str(tmp_path / folder / "manifest") for folder in "ab"]
    deed = f"print(json.dumps({{'problems': ['gone'], 'places': {places}}}), flush=True); continue"
    scanner, reports = start({"one": "store:one"}, program(deed))
    for _ in range(2):
        scan(scanner, reports)
        assert reports.described == [("one", {"problems": ["gone"]})]
    logged = [(vars(record)["model"], vars(record)["why"]) for record in caplog.records]
    assert logged == [("one", "gone")], "it is logged once"
    Path(places[1]).parent.mkdir()
    Path(places[1]).touch()
    scan(scanner, reports)
    assert len(reports.described) == 2


def test_a_folder_that_appears_later_is_found(start: Start, tmp_path: Path) -> None:
    model_folder(tmp_path / "old")
    models = {"old": str(tmp_path / "old")}
    scanner, reports = start(models, models_dir=tmp_path)
    scan(scanner, reports)
    new = model_folder(tmp_path / "org" / "new")
    (new / "model.safetensors").write_bytes(bytes(100))
    scan(scanner, reports)
    config = ModelConfig(path=str(new), within=str(tmp_path))
    assert reports.found == [("org/new", config, str(new), 100)]
    assert [name for name, _ in reports.described] == ["old", "org/new"]


def test_a_folder_that_appears_during_an_inspection_is_found(start: Start, tmp_path: Path) -> None:
    for name in ("a", "b"):
        model_folder(tmp_path / name)
    wait = f"while not __import__('os').path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    models = {name: str(tmp_path / name) for name in ("a", "b")}
    scanner, reports = start(models, program(wait), models_dir=tmp_path)
    first = scanner.request_scan()
    until(lambda: scanner.begun == first, "the scan has begun")
    model_folder(tmp_path / "new")
    assert scanner.request_scan() == first + 1, "the scan under way may have passed the folder"
    (tmp_path / "go").touch()
    until(lambda: scanner.done == first + 1, "the second scan is done")
    assert [name for name, *_ in reports.found] == ["new"]
    assert sorted(name for name, _ in reports.described) == ["a", "b", "new"]


def test_a_missing_models_folder_has_no_models(start: Start, tmp_path: Path) -> None:
    scanner, reports = start({}, models_dir=tmp_path / "gone")
    scan(scanner, reports)
    assert reports.found == []


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
    models = {name: str(model_folder(tmp_path / name)) for name in ("first", "bad", "last")}
    scanner, reports = start(models, program(deed))
    scan(scanner, reports)
    described = dict(reports.described)
    assert list(described) == ["first", "bad", "last"]
    assert "ended while it inspected" in described["bad"]["problems"][0]
    assert described["first"]["problems"] == described["last"]["problems"] == []


def test_what_is_known_early_is_told_before_the_rest(start: Start, tmp_path: Path) -> None:
    early = 'print(json.dumps({"early": {"type": "llama"}}), flush=True)'
    ends = "asked['name'] == 'two' and sys.exit(3)"
    models = {name: str(model_folder(tmp_path / name)) for name in ("one", "two")}
    scanner, reports = start(models, program(f"{early}; {ends}"))
    scan(scanner, reports)
    known = {"type": "llama", "problems": [], "partial": True}
    assert reports.described == [
        ("one", known),
        ("one", {"digest": "d-one", "problems": []}),
        ("two", known),
        ("two", {"problems": [ENDED], "unread": True}),
    ]


def test_a_disk_that_hangs_is_reported_as_a_problem_of_the_model(
    start: Start, tmp_path: Path
) -> None:
    models = {name: str(model_folder(tmp_path / name)) for name in ("one", "two")}
    scanner, reports = start(models, program("__import__('time').sleep(600)"), max_seconds=0.1)
    scan(scanner, reports)
    for _, about in reports.described:
        assert about == {"problems": ["its files could not be read in 0.1 s"], "unread": True}
    assert [name for name, _ in reports.described] == ["one", "two"]


def test_an_inspector_that_cannot_be_started_is_reported(start: Start, tmp_path: Path) -> None:
    models = {"m": str(model_folder(tmp_path / "m"))}
    scanner, reports = start(models, (str(tmp_path / "nothing"),))
    scan(scanner, reports)
    ((_, about),) = reports.described
    assert "no process could be started" in about["problems"][0] and about["unread"]


def test_close_ends_a_process_that_hangs(start: Start, tmp_path: Path) -> None:
    models = {"m": str(model_folder(tmp_path / "m"))}
    scanner, _ = start(models, program("__import__('time').sleep(600)"))
    scanner.request_scan()
    until(lambda: scanner.inspecting, "the process was started")
    scanner.close()
    scanner.join(PATIENCE)
    assert not scanner.is_alive()


def test_a_fresh_scan_is_not_repeated(start: Start) -> None:
    scanner, reports = start({}, fresh=3600.0)
    scan(scanner, reports)
    assert scanner.request_scan() == scanner.done


# ---- files ---------------------------------------------------------------------------------------
# Locations, sizes and fingerprints of model files that were not read.


def test_fingerprints_change_with_files_and_skip_broken_links(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    first = fingerprints(model)
    assert [name for name, _, _ in first] == ["config.json"]
    (model / "config.json").write_text("{ }")
    assert fingerprints(model) != first
    (model / "gone").symlink_to(tmp_path / "nothing")
    assert [name for name, _, _ in fingerprints(model)] == ["config.json"]
    assert fingerprints(tmp_path / "nothing") == ()
    assert [name for name, _, _ in fingerprints(model / "config.json")] == ["config.json"]


def test_locations_follow_links_and_broken_links_weigh_nothing(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    (tmp_path / "link").symlink_to(model)
    (model / "gone.safetensors").symlink_to(tmp_path / "nothing")
    for path in (model, tmp_path / "link"):
        assert location(ModelConfig(path=str(path))) == str(model.resolve())
    assert location(ModelConfig(path="org/name")) == "org/name"
    assert location(ModelConfig(path="builtin:demo")) == "builtin:demo"
    assert location(ModelConfig(path="builtin:counting")) == ""
    assert weights_bytes(ModelConfig(path=str(model))) == 0


def test_gguf_weighs_what_its_files_do(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(bytes(100))
    assert weights_bytes(ModelConfig(path=str(tmp_path / "m.gguf"))) == 100
    assert weights_bytes(ModelConfig(path=str(tmp_path))) == 100
    (tmp_path / "model.safetensors").write_bytes(bytes(7))  # the folder means this file
    assert weights_bytes(ModelConfig(path=str(tmp_path))) == 7


def test_a_worker_needs_the_weights_of_its_draft_model_as_well(tmp_path: Path) -> None:
    model, draft = model_folder(tmp_path / "m"), model_folder(tmp_path / "d")
    (model / "model.safetensors").write_bytes(bytes(100))
    (draft / "model.safetensors").write_bytes(bytes(7))
    paths = {str(draft): 107, "": 100, "builtin:demo": 100, str(tmp_path / "none"): 100}
    for path, size in paths.items():
        config = ModelConfig(path=str(model), draft=path, speculation="auto")
        assert weights_bytes(config) == size
    assert weights_bytes(ModelConfig(path="org/name", draft=str(draft))) == 0  # no local files


def test_copies_and_adapters_beside_the_weights_need_no_memory(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    for name in ("consolidated", "adapters", "._model-1", "model-1", "model-2"):
        (model / f"{name}.safetensors").write_bytes(bytes(100))
    assert weights_bytes(ModelConfig(path=str(model))) == 200
    (model / "model.safetensors").write_bytes(bytes(150))
    assert weights_bytes(ModelConfig(path=str(model))) == 150


def test_a_model_that_a_link_takes_from_elsewhere_has_its_own_location(tmp_path: Path) -> None:
    """If a model folder links to files outside of `within`, its location is "".

    Models of one location share workers: an allowed name would otherwise serve a refused model.
    """
    border, outside = tmp_path / "models", model_folder(tmp_path / "outside")
    inside = model_folder(border / "inside")
    (border / "linked").symlink_to(outside)
    (border / "again").symlink_to(inside)
    (model_folder(border / "part") / "model.safetensors").symlink_to(outside / "config.json")
    names = ("linked", "part", "inside", "again")
    locations = [location(ModelConfig(str(border / name), within=str(border))) for name in names]
    assert locations == ["", "", str(inside.resolve()), str(inside.resolve())]
