"""Makes the table of docs/licences.md: the Python packages of the images, and their licences.

`make licences` runs this program. Versions are from requirements/constraints.txt, for the images'
Python. Packages declare their licences; pip reads them without an installation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
PYTHON = "3.12"  # version in the images; a test compares it with the Dockerfile
PLATFORM = "x86_64-manylinux_2_36"
WHEELS = ("manylinux_2_36", "manylinux_2_35", "manylinux_2_34", "manylinux_2_31", "manylinux_2_28",
          "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014",
          "manylinux2010", "manylinux1", "linux")  # fmt: skip
IMAGES = {"broker": None, "cpu": "cpu", "cuda": "cuda12"}  # image -> extra of mlxpool

BEGIN, END = "<!-- made by docs/make_licences.py (`make licences`) -->\n", "<!-- until here -->"


def packages_of(extra: str | None) -> dict[str, str]:
    """Returns the versions of the packages that an image installs, by name."""
    source = ["--extra", extra, "pyproject.toml"] if extra else ["-"]
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet"),
            *("--python-version", PYTHON, "--python-platform", PLATFORM),
            *("--no-header", "--no-annotate", "--no-emit-index-url"),
            *("-c", "requirements/constraints.txt", *source),
        ],
        cwd=ROOT,
        input="" if extra else "\n".join(broker_packages()),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(line.split("==") for line in done.stdout.split())


def broker_packages() -> list[str]:
    """Returns the requirements that the Dockerfile installs into the image without MLX."""
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text("utf-8")
    (words,) = re.findall(r"AS build-broker\nRUN (\[.*\])\n", text)
    return list(json.loads(words)[2:])


def metadata_of(packages: Mapping[str, str]) -> dict[str, Any]:
    """Returns the metadata of each package by its name in lower case; installs nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report, python = Path(folder) / "report.json", Path(folder) / "bin" / "python"
        # The pip of an older Python leaves licence expressions out of its report.
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        platforms = [f"--platform={name}_x86_64" for name in WHEELS]
        subprocess.run(
            [
                *(python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"),
                *("--ignore-requires-python", "--report", report, "--target", folder),
                *("--implementation=cp", f"--python-version={PYTHON}", *platforms),
                *("--only-binary=:all:", *(f"{n}=={v}" for n, v in packages.items())),
            ],
            check=True,
        )
        entries = json.loads(report.read_text("utf-8"))["install"]
    return {normal(each["metadata"]["name"]): each["metadata"] for each in entries}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(metadata: Mapping[str, Any]) -> str:
    """Returns the licence expression, a short licence text, or the licences of the classifiers."""
    expression = metadata.get("license_expression")
    text = str(metadata.get("license") or "")
    classes = [
        each.rpartition(" :: ")[2]
        for each in metadata.get("classifier", [])
        if each.startswith("License :: ") and each != "License :: OSI Approved"
    ]
    short = text if text and "\n" not in text and len(text) < 60 else ""
    return str(expression or short or ", ".join(classes) or "see its files")


def rows(images: Mapping[str, Iterable[str]], metadata: Mapping[str, Any]) -> list[str]:
    """Returns a row of the table for each package."""
    return [
        f"| {name} | {about['version']} | {licence_of(about)} |"
        f" {', '.join(image for image, names in images.items() if name in names)} |"
        for name, about in sorted(metadata.items())
    ]


def main() -> None:
    images = {image: packages_of(extra) for image, extra in IMAGES.items()}
    packages = {name: version for each in images.values() for name, version in each.items()}
    table = ["| package | version | licence | in |", "|---|---|---|---|"]
    text = "\n".join([*table, *rows(images, metadata_of(packages)), ""])
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
