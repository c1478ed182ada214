"""`python -m mlxpool`: the `mlxpool` command."""

from __future__ import annotations

import sys

from mlxpool.cli.main import main

sys.exit(main())
