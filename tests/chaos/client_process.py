"""A client in its own process, for tests that stop or kill it: `client_process.py RUN_DIR JSON`.

JSON: {model, prompt, seed, count, streams, read}. If `read` is false, the client reads only the
first delta of each stream. It prints `begun` when all streams have had a delta, and their outcomes
when all have ended.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from mlxpool.client import Client
from mlxpool.common.errors import PoolError


def main() -> int:
    run_dir, work = sys.argv[1], json.loads(sys.argv[2])
    client = Client(run_dir, connect_timeout=200)
    begun = threading.Barrier(work["streams"] + 1)
    outcomes: list[str] = []
    threads = [
        threading.Thread(target=read_stream, args=(client, work, n, begun, outcomes))
        for n in range(work["streams"])
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    print("begun", flush=True)
    for thread in threads:
        thread.join()
    client.close()
    print(json.dumps(sorted(outcomes)), flush=True)
    return 0


def read_stream(
    client: Client,
    work: dict[str, object],
    number: int,
    begun: threading.Barrier,
    outcomes: list[str],
) -> None:
    seed, count = int(str(work["seed"])) + number, int(str(work["count"]))
    prompt = f"{work['prompt']} {number}"
    try:
        with client.stream(str(work["model"]), prompt, max_tokens=count, seed=seed) as stream:
            deltas = iter(stream)
            ids = list(next(deltas).ids)
            begun.wait()
            while not work["read"]:
                time.sleep(1)
            for delta in deltas:
                ids += delta.ids
            outcomes.append(f"{stream.result.reason} {len(ids)} {sum(ids)}")
    except PoolError as error:
        outcomes.append(error.code)


if __name__ == "__main__":
    sys.exit(main())
