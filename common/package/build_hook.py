"""A build hook of hatchling: gives an installed `mlxpool` its `__version__`.

In the checkout `mlxpool` is a namespace package over several source roots. An `__init__.py` in one
root would make the other roots invisible to type checkers, editors and the import rules. A wheel
has all packages in one folder, so its `mlxpool` gets an ordinary `__init__.py`. An editable install
has the source roots on its path. There a line in a .pth file, which Python runs when it starts,
sets `__version__`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent


class VersionHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds to a wheel the file that sets `__version__`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the file. `version` is the kind of wheel: "standard" or "editable"."""
        if version == "editable":
            # Python reads .pth files by name. The .pth file with the source roots is read first,
            # because its name begins with `_`.
            added, place = FOLDER / "editable_version.pth", "mlxpool_version.pth"
            build_data["force_include_editable"][str(added)] = place
        else:
            build_data["force_include"] |= {
                str(FOLDER / "installed_init.py"): "mlxpool/__init__.py",
                str(FOLDER / "py.typed"): "mlxpool/py.typed",
            }
