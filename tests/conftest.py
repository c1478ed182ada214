"""What is set once for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.slowest import PROCESSOR

# The gate depends on nobody's luck: each run tries the same cases. `make soak` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, max_examples=1000)
# On a GPU float32 means float32 here; by itself MLX multiplies with 10 bits of fraction there.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
PROFILE = os.environ.get("MLXPOOL_HYPOTHESIS", "fixed")
settings.load_profile(PROFILE)
# Nor on the settings of whoever runs the tests.
os.environ.setdefault("MLXPOOL_CONFIG", os.devnull)
PATIENT = str(Path(__file__).parent / "support" / "patient")
# Nor on how they were started: a shell's background command ignores Ctrl-C, and so do its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
STARTED = pytest.StashKey[float]()
COMPUTING = "worker"  # the folder whose files compute most of the time; the others mostly wait


def pytest_configure(config: pytest.Config) -> None:
    """Has the processes that tests start wait for a busy broker, see support/patient.

    Not the processes that run tests: there the defaults of users hold.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        given = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([PATIENT, *given])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mixes files that compute with files that wait, so that processes beside each other use all
    cores; without such processes the files stay in the order of their names.
    """
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


def pytest_collection_finish() -> None:
    """What was collected lives to the end: no search for garbage looks at its million objects."""
    gc.collect()
    gc.freeze()


def seed_mlx() -> None:
    """Each test has the same random arrays; by itself MLX takes its seed from the clock."""
    mlx = sys.modules.get("mlx.core")
    if mlx is not None and PROFILE == "fixed":
        mlx.random.seed(0)


def processor_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


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
