"""The locked versions: they cover pyproject.toml, match the installation, and have licences."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

import make_licences
from make_licences import normal

ROOT = Path(__file__).parents[2]
FILE = ROOT / "requirements" / "constraints.txt"
PYTHONS = ("3.11.9", "3.12.9", "3.13.5")
SYSTEMS = ("linux", "darwin")
PINS = [
    Requirement(line) for line in FILE.read_text("utf-8").splitlines() if not line.startswith("#")
]


def environment(python: str, system: str) -> dict[str, str]:
    short = python.rpartition(".")[0]
    return {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": short,
        "python_full_version": python,
        "sys_platform": system,
        "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
        "platform_machine": {"linux": "x86_64", "darwin": "arm64"}[system],
    }


def pinned(python: str, system: str) -> dict[str, str]:
    """Returns the locked version of each package for this version of Python and this system."""
    where = environment(python, system)
    versions: dict[str, str] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(where):
            assert pin.name not in versions, f"{pin.name} is pinned twice for {python} on {system}"
            (exact,) = pin.specifier
            assert exact.operator == "=="
            versions[pin.name] = exact.version
    return versions


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8")))


def requirements() -> list[Requirement]:
    """Returns all requirements of pyproject.toml, with the packages that build the project."""
    about = project()["project"]
    extras = (each for extra in about["optional-dependencies"].values() for each in extra)
    builds = project()["build-system"]["requires"]
    return [Requirement(each) for each in (*about["dependencies"], *extras, *builds)]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_version_that_fits(python: str, system: str) -> None:
    versions, where = pinned(python, system), environment(python, system)
    for need in requirements():
        if need.marker is None or need.marker.evaluate(where):
            assert versions[normal(need.name)] in need.specifier, f"{need}: run `make lock`"


def test_the_file_names_no_host() -> None:
    text = FILE.read_text("utf-8")
    assert "make lock" in text.splitlines()[1]
    assert not re.search(r"://|--|@", text.partition("make lock")[2])


def test_what_is_installed_here_has_the_locked_versions() -> None:
    locked = {pin.name: set[str]() for pin in PINS}
    for pin in PINS:
        locked[pin.name] |= {spec.version for spec in pin.specifier}
    different = {}
    for name, versions in locked.items():
        try:
            here = version(name)
        except PackageNotFoundError:
            continue
        if here not in versions:
            different[name] = here
    assert different == {}, "remove .venv and run `make test`, or install with the constraints"


def test_make_installs_with_the_constraints() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"PIP_CONSTRAINT=\$\(CURDIR\)/\$\(CONSTRAINTS\) PIP_BUILD_CONSTRAINT=", text)
    ours = [line for line in text.splitlines() if "install --editable" in line]
    assert len(ours) == 3 and all(line.startswith("\t$(PIP) install") for line in ours)


# ---- licences ------------------------------------------------------------------------------------


def listed() -> dict[str, tuple[str, str, str]]:
    """Returns the version, licence and images of each package on the page of licences."""
    rows = re.findall(
        r"^\| ([\w.-]+) \| (\d[\w.]*) \| ([^|]+) \| ([\w, ]+) \|$",
        make_licences.PAGE.read_text("utf-8"),
        re.M,
    )
    return {name: (number, licence, images) for name, number, licence, images in rows}


def test_the_page_has_the_locked_versions_of_the_images() -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text("utf-8")
    assert f"ARG PYTHON={make_licences.PYTHON}-" in dockerfile
    versions = pinned(f"{make_licences.PYTHON}.9", "linux")
    assert {name: row[0] for name, row in listed().items()} == {
        name: versions[name] for name in listed()
    }, "run `make licences`"


def test_the_page_has_what_a_plain_install_needs() -> None:
    packages, open_ = set[str](), [Requirement("mlxpool[cpu]")]
    while open_:
        need = open_.pop()
        name = normal(need.name)
        if name in packages:
            continue
        packages.add(name)
        extras = need.extras or {""}
        for text in distribution(need.name).requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                open_.append(inner)
    in_image = {name for name, row in listed().items() if "cpu" in row[2].split(", ")}
    assert in_image == packages - {"mlxpool"}, "run `make licences`"


def test_every_licence_is_known() -> None:
    unknown = [name for name, row in listed().items() if "see its files" in row[1]]
    assert unknown == []


def test_a_licence_is_taken_from_the_first_field_that_tells() -> None:
    tell = make_licences.licence_of
    classes = ["License :: OSI Approved :: MIT License", "License :: OSI Approved", "Topic :: X"]
    assert tell({"license_expression": "MIT", "license": "other"}) == "MIT"
    assert tell({"license": "BSD-3-Clause", "classifier": classes}) == "BSD-3-Clause"
    assert tell({"license": "Copyright …\nall of it", "classifier": classes}) == "MIT License"
    assert tell({}) == "see its files"
