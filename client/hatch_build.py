"""Adds files of `mlxpool` from outside this folder to the distributions of the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Path in the distribution -> path in the repository. A source distribution and a wheel have the
# same paths.
SHARED = {
    "mlxpool/__init__.py": "common/package/installed_init.py",
    "mlxpool/py.typed": "common/package/py.typed",
    "mlxpool/common": "common/mlxpool/common",
}
LICENCE = "LICENSE"


class AddShared(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the files of SHARED to a distribution.

    Hatchling finds this class by its base class.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files.

        A source distribution has the licence in its root folder. If hatchling builds a wheel from
        this distribution, it reads the licence in this folder.
        """
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
