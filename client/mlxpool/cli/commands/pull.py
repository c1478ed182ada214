"""`mlxpool pull`: downloads a model from the Hugging Face hub. Needs no broker."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from mlxpool.cli.formatting import json_text, size
from mlxpool.common.errors import BadRequest, ModelLoadFailed


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `pull`."""
    parser = commands.add_parser(
        "pull",
        parents=[common],
        help="download a model from the Hugging Face hub",
        description="Downloads the files that a model needs into the Hugging Face cache, and checks"
        " their hashes. Files that are there already are only checked. Needs `pip install"
        " 'mlxpool[hub]'`.",
    )
    parser.add_argument(
        "model",
        metavar="ORG/NAME[:FILE.gguf]",
        help="the repository, and a GGUF file if the repository has several",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Downloads a model, and prints its path and the command that serves the model."""
    from mlxpool.cli.hub_download import download
    from mlxpool.worker.weights import hub_cache

    try:
        model = hub_cache.parse(options.model)
    except ModelLoadFailed as error:
        raise BadRequest(str(error)) from None
    loaded = download(model)
    reference = f"{hub_cache.PREFIX}{loaded.model}"
    if options.json:
        print(
            json_text(
                {
                    "model": reference,
                    "path": str(loaded.path),
                    "files": loaded.files,
                    "size": loaded.size,
                }
            )
        )
        return 0
    print(loaded.path)
    name = model.repository.rpartition("/")[2]
    files = f"{loaded.files} files, {size(loaded.size)}" if loaded.files > 1 else size(loaded.size)
    print(
        f"{files}; serve it: mlxpool serve --model {shlex.quote(f'{name}={reference}')}",
        file=sys.stderr,
    )
    return 0
