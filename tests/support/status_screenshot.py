"""Takes the screenshot of the status page for the documentation, from a pool under load.

python tests/support/status_screenshot.py docs/img/status.png [--minutes 10] [--dark] [--width 390]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
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
READERS = {"chat": 18, "summaries": 5, "demo": 1, "unsound": 1}  # concurrent readers of each model
MEAN_PAUSE = 6.0  # seconds between two requests of a reader


async def read(client: AsyncClient, model: str, random: Random) -> None:
    """Send one request after the other without end."""
    while True:
        prompt = "hello " * random.randint(1, 200)
        with contextlib.suppress(PoolError):
            await client.generate(model, prompt, max_tokens=random.randint(40, 900))
        await asyncio.sleep(random.expovariate(1 / MEAN_PAUSE))


async def work(run_dir: Path, seconds: float) -> None:
    """Run all readers for `seconds`."""
    names = [name for name, count in READERS.items() for _ in range(count)]
    async with AsyncClient(run_dir=run_dir) as client, asyncio.TaskGroup() as group:
        readers = [group.create_task(read(client, n, Random(i))) for i, n in enumerate(names)]
        await asyncio.sleep(seconds)
        for reader in readers:
            reader.cancel()


async def take_screenshot(pool: Pool, options: argparse.Namespace) -> bytes:
    """The page after `options.minutes` of load, as PNG."""
    url = pool.ask("ps")["broker"]["metrics"]
    busy = asyncio.create_task(work(pool.run_dir, options.minutes * 60 + 30))
    await asyncio.sleep(options.minutes * 60)
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
    parser.add_argument("--minutes", type=float, default=10.0, help="of work before the picture")
    parser.add_argument("--width", type=int, default=1280, help="pixels")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), CONFIG) as pool:
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_bytes(asyncio.run(take_screenshot(pool, options)))


if __name__ == "__main__":
    main()
