"""Pytest hooks and settings for all tests: environment, collection, random seeds."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mlxpool.common.process import private_temp
from support import tiers
from support.closing_lines import LEFT_OUT, ClosingLines
from support.slowest import PROCESSOR

# Results do not depend on luck: each run tries the same cases. `make soak` tries new cases.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, max_examples=1000)
# On a GPU float32 means float32 here; by itself MLX multiplies with 10 bits of fraction there.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
PROFILE = os.environ.get("MLXPOOL_HYPOTHESIS", "fixed")
settings.load_profile(PROFILE)
# Results do not depend on the settings of the user who runs the tests.
os.environ.setdefault("MLXPOOL_CONFIG", os.devnull)
os.environ["HF_TOKEN_PATH"] = os.devnull
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # else huggingface_hub asks its server who calls it
# Pool processes and test processes share the kernels that MLX compiles. Files of tests stay in the
# temporary folder, whose name is short enough for sockets.
tempfile.tempdir = os.environ.setdefault("MLXPOOL_TESTS_TMPDIR", tempfile.gettempdir())
private_temp.use()
PATIENT = str(Path(__file__).parent / "support" / "patient")
# Results do not depend on how the tests were started: a shell's background command ignores Ctrl-C,
# and so do its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
STARTED = pytest.StashKey[float]()
COMPUTING = "worker"  # the folder whose files compute most of the time; the others mostly wait


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run all tests, as `make test-all` does (tests/tiers.toml)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips a file if `make test` runs none of its tests and nobody requested the whole file."""
    left_out = tiers.tiers().leaves_out(tiers.relative(collection_path))
    return True if left_out and not runs_whole(collection_path, config) else None


def runs_whole(path: Path, config: pytest.Config) -> bool:
    """Returns whether all tests of a file run: with --full, or if the command line names it."""
    named = (Path(str(argument).partition("::")[0]) for argument in config.args)
    return bool(config.getoption("full")) or any(
        config.invocation_params.dir / file == path for file in named
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets the environment of the processes that run tests, and of the processes that tests start.

    Processes that tests start wait longer for a busy broker, see support/patient; the processes
    that run tests keep the usual limits. Pools that keep jobs by default do so in a temporary
    folder, which all processes of the run share.
    """
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ClosingLines(tiers.tiers()))
        states = tempfile.TemporaryDirectory(prefix="mlxpool-states-")
        config.add_cleanup(states.cleanup)
        os.environ["XDG_STATE_HOME"] = states.name
    if config.getoption("full"):
        os.environ[tiers.EVERYTHING] = "1"
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        given = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([PATIENT, *given])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tests of `make test`, see tests/tiers.toml, and orders them for parallel runs.

    In a parallel run, files that compute alternate with files that wait, so that all cores are
    used. Otherwise the files stay in the order of their names.
    """
    select(config, items)
    if not hasattr(config, "workerinput"):
        return
    files = list(dict.fromkeys(item.path for item in items))
    computing = [path for path in files if COMPUTING in path.parts]
    waiting = [path for path in files if COMPUTING not in path.parts]
    place = {
        path: number / len(group)
        for group in (computing, waiting)
        for number, path in enumerate(group)
    }
    items.sort(key=lambda item: (place[item.path], str(item.path)))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the cases that only `make test-all` runs."""
    kept = tiers.tiers().kept([(tiers.relative(item.path), item.name) for item in items])
    kept = [run or runs_whole(item.path, config) for run, item in zip(kept, items, strict=True)]
    left = [item for run, item in zip(kept, items, strict=True) if not run]
    if (output := getattr(config, "workeroutput", None)) is not None:
        output[LEFT_OUT] = len(left)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for run, item in zip(kept, items, strict=True) if run]


def pytest_collection_finish() -> None:
    """Takes the collected tests, a million objects, out of garbage collection."""
    gc.collect()
    gc.freeze()


def seed_mlx() -> None:
    """Gives each test the same random arrays in every run.

    By itself MLX takes its seed from the clock.
    """
    mlx = sys.modules.get("mlx.core")
    if mlx is not None and PROFILE == "fixed":
        mlx.random.seed(0)


def processor_seconds() -> float:
    """Returns the CPU time of this process and its ended children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[STARTED] = processor_seconds()
    seed_mlx()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Notes the processor time of each test, for `make slowest`."""
    yield
    spent = processor_seconds() - item.stash[STARTED]
    item.user_properties.append((PROCESSOR, f"{spent:.3f}"))
