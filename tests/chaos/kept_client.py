"""A client that is killed: submits jobs under successive keys, and reads the last job.

Prints each key after its job is accepted. Arguments: run directory, prefix of the keys, number of
jobs.
"""

from __future__ import annotations

import sys

from chaos.kept_truth import SEED, count_of
from mlxpool.client import Client


def main() -> None:
    with Client(sys.argv[1], connect_timeout=200, broker_grace=200) as client:
        for number in range(int(sys.argv[3])):
            key = f"{sys.argv[2]}-{number}"
            client.submit("m", key, key=key, max_tokens=count_of(key), seed=SEED)
            print(key, flush=True)
        client.fetch(key).read()


if __name__ == "__main__":
    main()
