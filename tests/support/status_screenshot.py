"""Takes screenshots of the status page of a pool with the work of a scene.

PYTHONPATH=tests python tests/support/status_screenshot.py docs/img/status.png [--scene busy]
    [--minutes 10] [--dark] [--width 400]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError
from support.chromium import Chromium
from support.pool import Pool

CONFIG = """
[pool]
metrics = "127.0.0.1:0"
[models.chat]
path = "builtin:counting"
replicas = 2
counting.step_us = 20000
counting.prefill_us = 100
[models.summaries]
path = "builtin:counting"
counting.step_us = 50000
[models.unsound]
path = "builtin:counting"
counting.fault = "raise"
counting.fault_in = "load"
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """The load of a pool in a screenshot: concurrent `readers` per model, and workers to kill."""

    readers: Mapping[str, int]
    mean_pause: float  # seconds between two requests of a reader
    kills: tuple[str, ...] = ()


SCENES = {
    "healthy": Scene({"chat": 6, "summaries": 2, "demo": 1}, 6.0),
    "failed": Scene({"chat": 10, "summaries": 3, "demo": 1, "unsound": 1}, 6.0),
    "restarts": Scene({"chat": 10, "summaries": 3}, 6.0, ("chat/0", "chat/1", "chat/1")),
    "busy": Scene({"chat": 60, "summaries": 12, "demo": 1}, 0.5),
}


async def read(client: AsyncClient, model: str, random: Random, mean_pause: float) -> None:
    """Sends requests without end, one after the other, with pauses of `mean_pause` on average."""
    while True:
        prompt = "hello " * random.randint(1, 200)
        with contextlib.suppress(PoolError):
            await client.generate(model, prompt, max_tokens=random.randint(40, 900))
        await asyncio.sleep(random.expovariate(1 / mean_pause))


async def work(run_dir: Path, scene: Scene) -> None:
    """Runs all readers without end."""
    names = [name for name, count in scene.readers.items() for _ in range(count)]
    async with AsyncClient(run_dir=run_dir) as client, asyncio.TaskGroup() as group:
        for number, name in enumerate(names):
            group.create_task(read(client, name, Random(number), scene.mean_pause))


async def kill(pool: Pool, slots: tuple[str, ...], seconds: float) -> None:
    """Kills these workers one after another, within `seconds`."""
    for slot in slots:
        await asyncio.sleep(seconds / (len(slots) + 1))
        await asyncio.to_thread(pool.in_state, slot, state="ready")
        await asyncio.to_thread(pool.kill_worker, slot, signal.SIGKILL)


async def take_screenshot(pool: Pool, options: argparse.Namespace) -> bytes:
    """Returns the status page after `options.minutes` of the scene, as PNG."""
    url, scene = pool.ask("ps")["broker"]["metrics"], SCENES[options.scene]
    seconds = options.minutes * 60
    busy = asyncio.create_task(work(pool.run_dir, scene))
    killing = asyncio.create_task(kill(pool, scene.kills, seconds))
    await asyncio.sleep(seconds)
    await killing
    with Chromium() as browser:
        browser.open(url, dark=options.dark, width=options.width, height=800)
        await asyncio.to_thread(browser.wait_for_text, "#told", "as of")
        taken = browser.screenshot()
    busy.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await busy
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--scene", choices=SCENES, default="failed")
    parser.add_argument("--minutes", type=float, default=10.0, help="of work before the picture")
    parser.add_argument("--width", type=int, default=1280, help="pixels")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), CONFIG) as pool:
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_bytes(asyncio.run(take_screenshot(pool, options)))


if __name__ == "__main__":
    main()
