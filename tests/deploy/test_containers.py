"""Dockerfile and compose file, parsed strictly; the files in them exist. No image is built."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from mlxpool.cli.parser import COMMAND_MODULES
from mlxpool.common.config.loading import load
from support.command_lines import parsed
from support.pool import PATIENCE

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
    "entrypoint", "environment",
}  # fmt: skip


def stages() -> dict[str, list[tuple[str, str]]]:
    """Returns the instructions of each stage, by its name."""
    by_stage: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in DockerfileParser(str(DOCKERFILE), cache_content=True).structure:
        if line["instruction"] == "FROM":
            current = by_stage.setdefault(line["value"].rpartition(" AS ")[2], [])
        current.append((line["instruction"], line["value"]))
    return by_stage


def base_of(stage: str) -> str:
    return stages()[stage][0][1].partition(" AS ")[0]


def last(stage: str, instruction: str) -> str:
    """Returns the last value of an instruction in a stage or its bases; fails if it is missing."""
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


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"])


def test_the_extras_exist() -> None:
    installed = re.findall(r'\*\.whl\)\[(\w+)\]"', DOCKERFILE.read_text("utf-8"))
    assert installed == ["cpu", "cuda12"]
    assert set(installed) <= set(project()["optional-dependencies"])


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", each)[0] for each in requirements}


def broker_packages() -> list[str]:
    """Returns the packages of the image without MLX, except our own wheel."""
    command = json.loads(next(v for name, v in stages()["build-broker"] if name == "RUN"))
    assert command[:2] == ["pip", "install"]
    return [str(word) for word in command[2:]]


def test_the_broker_has_no_mlx() -> None:
    assert set(broker_packages()) < names_of(project()["dependencies"])
    assert not any(name.startswith("mlx") for name in broker_packages())


def copied(stage: str) -> list[str]:
    """Returns the paths of the repository that a stage copies."""
    values = [v for name, v in stages()[stage] if name == "COPY" and not v.startswith("--from")]
    return [name for value in values for name in value.split()[:-1]]


def test_copied_paths_exist_and_only_the_builder_gets_sources() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert sorted([*copied("build"), *copied("base")]) == sorted(allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_every_version_is_locked() -> None:
    build = dict(v.split("=", 1) for n, v in stages()["build"] if n == "ENV" for v in v.split())
    assert build["PIP_CONSTRAINT"] == "/src/requirements/constraints.txt"
    for stage in stages():
        for name, value in stages()[stage]:
            if name == "RUN" and "pip" in value:
                assert stage.startswith("build"), "only there is PIP_CONSTRAINT set"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the images install, unpacked; built only from the copied files."""
    source = tmp_path_factory.mktemp("src")
    for name in copied("build"):
        link = source / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, link, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, link)
    packed, unpacked = (tmp_path_factory.mktemp(name) for name in ("wheel", "site"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(packed)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    (wheel,) = packed.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


def needs(name: str) -> set[str]:
    """Returns a package and all that it requires, as installed here."""
    packages, open_ = set[str](), [name]
    while open_:
        about = distribution(open_.pop())
        if about.name not in packages:
            packages.add(about.name)
            wanted = map(Requirement, about.requires or ())
            open_ += [w.name for w in wanted if w.marker is None or w.marker.evaluate()]
    return packages


@pytest.fixture(scope="module")
def broker_image(built: Path) -> Path:
    """A site-packages folder with the packages of the container image that has no MLX."""
    for package in {each for name in broker_packages() for each in needs(name)}:
        about = distribution(package)
        for top in {file.parts[0] for file in about.files or () if file.parts[0][:1] != "."}:
            if not (built / top).exists():
                (built / top).symlink_to(Path(str(about.locate_file(top))))
    return built


def run_in(image: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `mlxpool` with only the image's packages."""
    code = f"import sys; sys.path.append({str(image)!r}); from mlxpool.cli.main import main\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{code}sys.exit(main(sys.argv[1:]))", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("name", COMMAND_MODULES)
def test_every_command_is_in_the_image_without_mlx(broker_image: Path, name: str) -> None:
    done = run_in(broker_image, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: mlxpool {name}" in done.stdout


def test_the_whole_help_and_the_checks_of_settings_work_in_it(broker_image: Path) -> None:
    assert run_in(broker_image, "--help").returncode == 0
    settings = ROOT / "deploy" / "k8s" / "base" / "mlxpool.toml"
    done = run_in(broker_image, "config", "check", "--config", str(settings))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize("module", ["mlxpool.broker.edge.broker", "mlxpool.gateway.server"])
def test_its_processes_can_be_imported(broker_image: Path, module: str) -> None:
    code = f"import sys; sys.path.append({str(broker_image)!r}); import {module}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


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
    assert set(compose()) == {
        "name", "x-common", "x-broker-image", "services", "networks", "volumes",
    }  # fmt: skip
    for service in services().values():
        assert set(service) <= SERVICE


SERVICES = ("broker", "worker", "gateway")


@pytest.mark.parametrize("name", ["keys", *SERVICES])
def test_a_service_has_few_privileges(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    state = ["broker-state:/var/lib/mlxpool"] if name == "broker" else []
    assert all(
        volume in state or (name == "keys" and volume.split(":")[0] in compose()["volumes"])
        for volume in writable
    )


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_one_of_the_images(name: str) -> None:
    service = services()[name]
    build = service["build"]
    assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert build["target"] in IMAGES
    assert service["image"].endswith(f"-{build['target']}")
    parsed(service.get("command") or json.loads(last(build["target"], "CMD")))


def mounted(name: str) -> dict[str, str]:
    """Returns the named volumes of a service, by the folder in its container."""
    pairs = (volume.removesuffix(":ro").split(":") for volume in services()[name]["volumes"])
    return {inside: volume for volume, inside in pairs if volume in compose()["volumes"]}


def test_each_service_has_its_own_keys_only() -> None:
    paths = {volume: inside for inside, volume in mounted("keys").items()}
    assert {*paths, "broker-state"} == set(compose()["volumes"])
    for name in SERVICES:
        keys = [volume for volume in mounted(name).values() if volume != "broker-state"]
        assert {paths[volume] for volume in keys} == {f"/keys/{name}"}
    folders = re.findall(r"(/keys/\w+)", DOCKERFILE.read_text("utf-8"))
    assert sorted(folders) == sorted(paths.values()), "a volume gets the owner of its folder"


def test_the_broker_keeps_jobs_in_a_volume_of_its_image_and_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = services()["broker"]
    (folder,) = (inside for inside, volume in mounted("broker").items() if volume == "broker-state")
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    config = load(COMPOSE.parent / "k8s" / "base" / "mlxpool.toml")
    assert Path(config.state_dir).is_relative_to(folder)
    command = next(v for n, v in stages()["base"] if n == "RUN" and "useradd" in v)
    assert f"install -d -o 10001 -g 10001 /run/mlxpool {folder} " in " ".join(command.split()) + " "
    assert "--name-owners" in services()["gateway"]["command"], "else jobs over HTTP are refused"


def test_an_image_alone_keeps_jobs_where_its_user_may_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (text,) = (v for n, v in stages()["base"] if n == "ENV")
    for name, value in (pair.split("=", 1) for pair in text.split()):
        if name != "PATH":
            monkeypatch.setenv(name, value)
    assert load(None).state_dir == "/var/lib/mlxpool/jobs/run-mlxpool-pool"


def test_services_start_in_their_order() -> None:
    waits = {name: services()[name]["depends_on"] for name in SERVICES}
    assert waits["broker"] == {"keys": {"condition": "service_completed_successfully"}}
    for name in ("worker", "gateway"):
        assert waits[name] == {"broker": {"condition": "service_healthy"}}
    assert services()["keys"]["restart"] == "no"
