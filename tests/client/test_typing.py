"""mypy --strict checks a user's program against the installed wheel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import msgspec
import pytest

from mlxpool.common.version import VERSION
from support.pool import PATIENCE

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "broker", "cli", "client", "common", "gateway", "worker")

SOUND = """\
import asyncio
from mlxpool.client import AsyncClient, Choices, Client, Delta, Job, Pace, PoolError, Result
from mlxpool.common.options import GenerateOptions

defaults: GenerateOptions = {"max_tokens": 16, "temperature": 0, "stop": ["."]}

def complete(seed: int | None) -> str:
    with Client(pace=Pace(ping=2.0)) as client:
        result: Result = client.generate("demo", "def main():", **defaults)
        messages = [{"role": "user", "content": "Hi"}]
        for delta in client.stream("demo", messages=messages, think=True, seed=seed):
            piece: Delta = delta
            print(piece.text, piece.ids, delta.pos)
        choices: Choices = client.choices("demo", "x", n=4, echo=True, prompt_logprobs=2)
        print([one.text for one in choices], choices.usage["total_tokens"], choices[0].prompt)
        with client.stream_choices("demo", "x", n=2, seed=seed) as every:
            print([(delta.index, delta.text) for delta in every], every.result.seed)
        try:
            client.tokenize("demo", "text")
        except PoolError as error:
            print(error.code, error.retryable)
        return result.text

async def main() -> int:
    async with AsyncClient() as client:
        async with client.stream("demo", tokens=[1, 2], logit_bias={5: -1.0}) as stream:
            async for delta in stream:
                print(delta.text)
        job: Job = await client.submit("demo", "x", key="k", keep=60, note=b"mine", max_tokens=3)
        await client.submit_call("embed", "e", inputs=["a"], dimensions=8, notify="https://h/")
        await client.submit_batch(["{}"], "demo", deadline=60, on_sent=print, temperature=0)
        return (await client.generate("demo", "x", durable=False)).usage["completion_tokens"]

asyncio.run(main())
"""
WRONG = """\
import asyncio
from mlxpool.client import AsyncClient, Client

client, later = Client(), AsyncClient()
client.generate("demo", "x", temprature=0.5)
client.stream("demo", "x", max_tokens="many")
later.stream("demo", "x", stop=1)
print(client.generate("demo", "x").texts)
client.detokenize("demo", "x")
client.submit("demo", "x", notfy="https://h/")
asyncio.run(later.submit_call("embed", "e", dimensions="8"))
client.submit_call("embed", "e", max_tokens=8)
client.submit_batch(["{}"], "demo", kep=60)
"""
FOUND = {  # line of WRONG: the error that mypy reports
    5: 'Unexpected keyword argument "temprature" for "generate" of "Client"; did you mean',
    6: 'Argument "max_tokens" to "stream" of "Client" has incompatible type "str"',
    7: 'Argument "stop" to "stream" of "AsyncClient" has incompatible type "int"',
    8: '"Result" has no attribute "texts"',
    9: 'Argument 2 to "detokenize" of "Client" has incompatible type "str"',
    10: 'Unexpected keyword argument "notfy" for "submit" of "JobMethods"',
    11: 'Argument "dimensions" to "submit_call" of "AsyncJobMethods" has incompatible type "str"',
    12: 'Unexpected keyword argument "max_tokens" for "submit_call" of "JobMethods"',
    13: 'Unexpected keyword argument "kep" for "submit_batch" of "JobMethods"',
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python interpreter of a new environment with our wheel and msgspec.

    mypy needs msgspec to know the types of the client's records.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=2 * PATIENCE)
    (wheel,) = folder.glob("mlxpool-*.whl")
    venv.create(folder / "venv", symlinks=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder / "venv")})
    zipfile.ZipFile(wheel).extractall(paths["purelib"])
    Path(paths["purelib"], "msgspec").symlink_to(Path(msgspec.__file__).parent)
    return Path(paths["scripts"]) / "python"


def checked(python: Path, program: str, folder: Path) -> list[str]:
    """Returns the output of `mypy --strict` for a program outside our tree."""
    (folder / "program.py").write_text(program)
    flags = ["--strict", "--no-error-summary", "--config-file=", "--cache-dir=/dev/null"]
    mypy = [sys.executable, "-m", "mypy", *flags, f"--python-executable={python}", "program.py"]
    done = subprocess.run(mypy, cwd=folder, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_every_package_is_marked_as_typed(installed: Path) -> None:
    (folder,) = installed.parents[1].glob("lib/python*/site-packages/mlxpool")
    assert sorted(path.parent.name for path in folder.glob("*/py.typed")) == list(PACKAGES)
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def test_the_package_has_its_version_and_runs(installed: Path) -> None:
    """The wheel's `mlxpool` is an ordinary package; in the checkout it is a namespace."""
    code = "import mlxpool; print(mlxpool.__version__)"
    done = subprocess.run([installed, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{VERSION}\n"


def test_programs_of_users_are_checked(installed: Path, tmp_path: Path) -> None:
    assert checked(installed, SOUND, tmp_path) == []
    errors: dict[int, str] = {}  # the first error of each line
    for line in checked(installed, WRONG, tmp_path):
        if ": error: " in line:
            errors.setdefault(int(line.split(":")[1]), line)
    assert list(errors) == list(FOUND)
    for number, words in FOUND.items():
        assert words in errors[number]
