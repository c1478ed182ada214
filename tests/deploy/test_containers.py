"""Dockerfile and compose file, parsed strictly; what they name exists. No image is built."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from support.command_lines import parsed

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose.yaml"
IMAGES = ("broker", "cuda", "cpu")
USER = "10001:10001"
KNOWN = {
    "ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD", "USER", "EXPOSE",
    "COMMENT",
}  # fmt: skip
SERVICE = {
    "restart", "read_only", "tmpfs", "cap_drop", "security_opt", "networks", "logging", "image",
    "build", "ports", "volumes", "healthcheck", "stop_grace_period", "command", "depends_on",
}  # fmt: skip


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in DockerfileParser(str(DOCKERFILE), cache_content=True).structure:
        if line["instruction"] == "FROM":
            current = found.setdefault(line["value"].rpartition(" AS ")[2], [])
        current.append((line["instruction"], line["value"]))
    return found


def base_of(stage: str) -> str:
    return stages()[stage][0][1].partition(" AS ")[0]


def last(stage: str, instruction: str) -> str:
    """The last value of an instruction in a stage or its bases; fails if there is none."""
    while stage in stages():
        values = [value for name, value in stages()[stage] if name == instruction]
        if values:
            return values[-1]
        stage = base_of(stage)
    raise AssertionError(f"no {instruction}")


def test_every_instruction_is_known() -> None:
    assert {name for lines in stages().values() for name, _ in lines} <= KNOWN


def test_the_images_are_those_of_the_docs() -> None:
    assert set(IMAGES) <= set(stages())
    assert list(stages())[-1] == "cpu", "the one that is built when none is named"


def test_every_base_has_a_version() -> None:
    given = dict(re.findall(r"^ARG (\w+)=(.+)$", DOCKERFILE.read_text("utf-8"), re.MULTILINE))
    for stage in stages():
        base = base_of(stage)
        for name, value in given.items():
            base = base.replace(f"${{{name}}}", value)
        assert base in stages() or re.fullmatch(r"\w+:\d[\w.-]+", base), base


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_unprivileged_and_receives_signals(image: str) -> None:
    assert [value for name, value in stages()[image] if name == "USER"][-1] == USER
    assert json.loads(last(image, "ENTRYPOINT")) == ["tini", "--", "mlxpool"]
    parsed(json.loads(last(image, "CMD")))


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_contains_its_build(image: str) -> None:
    copied = [value for name, value in stages()[image] if name == "COPY"]
    assert copied == [f"--from=build-{image} /opt/mlxpool /opt/mlxpool"]
    assert base_of(image) == "base" and base_of(f"build-{image}") == "build"


def test_the_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    installed = re.findall(r'"\.\[(\w+)\]"', DOCKERFILE.read_text("utf-8"))
    assert installed == ["cpu", "cuda12"]
    assert set(installed) <= set(project["optional-dependencies"])


def test_the_broker_has_what_it_imports_and_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    runs = [json.loads(value) for name, value in stages()["build-broker"] if name == "RUN"]
    assert runs[0][:2] == ["pip", "install"]
    assert set(runs[0][2:]) < set(project["dependencies"])
    assert not any(name.startswith("mlx") for name in runs[0][2:])


def test_copied_paths_exist_and_only_the_builder_gets_sources() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    copied = [v for name, v in stages()["build"] if name == "COPY"]
    names = [name for value in copied for name in value.split()[:-1]]
    assert sorted(names) == sorted(allowed)
    assert all((ROOT / name).exists() for name in names)


def test_nothing_is_downloaded_by_other_means() -> None:
    text = DOCKERFILE.read_text("utf-8")
    assert not re.search(r"\b(ADD|curl|wget|sudo)\b|:latest|https?://", text)
    for name, value in (line for lines in stages().values() for line in lines):
        if name == "RUN" and "apt-get install" in value:
            assert "--no-install-recommends" in value and "rm -rf /var/lib/apt/lists" in value


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text("utf-8")))


def services() -> dict[str, dict[str, Any]]:
    return dict(compose()["services"])


def test_the_compose_files_keys() -> None:
    assert set(compose()) == {"name", "x-common", "services", "networks"}
    for service in services().values():
        assert set(service) <= SERVICE


@pytest.mark.parametrize("name", ["broker", "worker"])
def test_a_service_has_few_privileges(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert all(volume.endswith(":ro") for volume in service["volumes"])


@pytest.mark.parametrize("name", ["broker", "worker"])
def test_a_service_is_one_of_the_images(name: str) -> None:
    service = services()[name]
    build = service["build"]
    assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert build["target"] in IMAGES
    assert service["image"].endswith(f"-{build['target']}")
    parsed(service.get("command") or json.loads(last(build["target"], "CMD")))


def test_the_worker_dials_the_brokers_port() -> None:
    settings = COMPOSE.parent / services()["broker"]["volumes"][0].partition(":")[0]
    (back,) = tomllib.loads(settings.read_text("utf-8"))["pool"]["back"]
    command = services()["worker"]["command"]
    assert command[command.index("--endpoint") + 1] == f"tcp://broker:{back.rpartition(':')[2]}"
    assert services()["worker"]["depends_on"] == {"broker": {"condition": "service_healthy"}}


def test_keys_are_mounted_where_they_are_read() -> None:
    for name in ("broker", "worker"):
        inside = {volume.split(":")[1] for volume in services()[name]["volumes"]}
        named = {word for word in services()[name].get("command", ()) if word.startswith("/keys/")}
        assert named <= inside
