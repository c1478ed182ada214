"""The small distribution mlxpool-client: its contents, and a stream without other packages."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.version import VERSION
from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, Pool

ROOT = Path(__file__).parents[2]
NEEDED = ("pyzmq", "msgpack", "msgspec")
MAX_BYTES = 210_000  # bytes of the wheel


def project(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"])


def build(folder: Path, kind: str, source: Path = ROOT / "client") -> Path:
    """Builds a wheel or an sdist into an empty folder. Returns its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the packages that `pip install ./client` installs."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name in NEEDED:
        files = distribution(name).files
        assert files is not None
        for top in {file.parts[0] for file in files if not file.parts[0].startswith(".")}:
            (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


def run(packages: Path, code: str, *arguments: str) -> str:
    """Runs code that can import only the standard library and these packages."""
    begin = f"import sys; sys.path.append({str(packages)!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", begin + code, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


STREAM = """
import asyncio
import mlxpool
from mlxpool.client import AsyncClient, Client
print(mlxpool.__version__)
with Client(sys.argv[1], connect_timeout=200) as client:
    with client.stream("counting", "hello", max_tokens=5, seed=7) as stream:
        print("".join(delta.text for delta in stream))
async def main():
    async with AsyncClient(sys.argv[1], connect_timeout=200) as client:
        print((await client.generate("counting", "hello", max_tokens=5, seed=7)).text)
asyncio.run(main())
others = {"mlx", "numpy", "tokenizers", "psutil", "starlette"} & {
    name.partition(".")[0] for name in sys.modules
}
assert not others, others
"""


def test_a_stream_with_the_client_alone(packages: Path, tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        printed = run(packages, STREAM, str(pool.run_dir))
    text = text_of(expected_ids("hello", 7, 5))
    assert printed.split("\n") == [VERSION, text, text, ""]


@pytest.mark.parametrize("name", ["mlx", "numpy", "tokenizers", "mlxpool.cli", "mlxpool.worker"])
def test_nothing_else_is_there(packages: Path, name: str) -> None:
    code = (
        f"import importlib.util as u\ntry: print(u.find_spec({name!r}))\nexcept ImportError: pass"
    )
    assert run(packages, code) in ("", "None\n")


def test_the_wheel_is_small_and_has_the_client_and_what_it_shares(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {"/".join(name.split("/")[:2]) for name in names if name.endswith(".py")}
    assert code == {"mlxpool/__init__.py", "mlxpool/client", "mlxpool/common"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_a_wheel_of_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    source = build(tmp_path / "sdist", "sdist")
    subprocess.run(["tar", "-xzf", source, "-C", tmp_path], check=True, timeout=PATIENCE)
    again = build(tmp_path / "wheel", "wheel", tmp_path / source.name.removesuffix(".tar.gz"))
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(again) as other:
        assert sorted(archive.namelist()) == sorted(other.namelist())


def test_its_version_and_its_requirements_are_those_of_mlxpool() -> None:
    own, whole = project(ROOT / "client"), project(ROOT)
    assert own["version"] == VERSION
    assert own["requires-python"] == whole["requires-python"]
    assert set(own["dependencies"]) < set(whole["dependencies"])
    assert [need.partition(">")[0] for need in own["dependencies"]] == list(NEEDED)
