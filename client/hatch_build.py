"""Adds mlxpool.common and the licence, which are beside this folder, to what is built from it.

Also `mlxpool/__init__.py`: see common/package/build_hook.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMON, LICENCE = "mlxpool/common", "LICENSE"
PACKAGE = {"installed_init.py": "mlxpool/__init__.py", "py.typed": "mlxpool/py.typed"}


class AddShared(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files; a source distribution has the licence where hatchling looks for it."""
        root = Path(self.root)
        in_repository = (root.parent / "common").is_dir()
        files = {root.parent / "common" / COMMON if in_repository else root / COMMON: COMMON}
        for source, place in PACKAGE.items():
            files[root.parent / "common/package" / source if in_repository else root / place] = (
                place
            )
        if in_repository:
            licences = f"mlxpool_client-{self.metadata.version}.dist-info/licenses/"
            folder = licences if self.target_name == "wheel" else ""
            files[root.parent / LICENCE] = f"{folder}{LICENCE}"
        build_data["force_include"].update({str(path): to for path, to in files.items()})
