"""Adds to what is built from this folder the files of `mlxpool` that are beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# In the distribution -> in the repository. A source distribution has them where a wheel does.
SHARED = {
    "mlxpool/__init__.py": "common/package/installed_init.py",
    "mlxpool/py.typed": "common/package/py.typed",
    "mlxpool/common": "common/mlxpool/common",
}
LICENCE = "LICENSE"


class AddShared(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files; a source distribution has the licence where hatchling looks for it."""
        root = Path(self.root)
        in_repository = (root.parent / "common").is_dir()
        files = {
            str(root.parent / theirs if in_repository else root / ours): ours
            for ours, theirs in SHARED.items()
        }
        if in_repository:
            licences = f"mlxpool_client-{self.metadata.version}.dist-info/licenses/"
            folder = licences if self.target_name == "wheel" else ""
            files[str(root.parent / LICENCE)] = f"{folder}{LICENCE}"
        build_data["force_include"].update(files)
