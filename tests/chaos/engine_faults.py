"""Installs faults in a class of a worker process, when its Python interpreter starts."""

from __future__ import annotations

from pathlib import Path

from support.pool import with_path

# The fault defines `arm(kind)`, which is called with the class after its module is imported.
_WHEN_IMPORTED = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "MODULE":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_arm(module):
            run(module)
            arm(module.CLASS)

        spec.loader.exec_module = run_and_arm
        return spec

sys.meta_path.insert(0, Finder())
"""


ENGINE = "mlxpool.worker.engine.model_engine", "ModelEngine"
FOLLOWER = "mlxpool.worker.compute.follower", "Follower"


def install_fault(folder: Path, fault: str, where: tuple[str, str] = ENGINE) -> dict[str, str]:
    """Writes a fault to `folder`; returns the environment for processes with the fault.

    `fault`: Python that defines `arm(kind)`, which changes methods of the class. `where`: the
    class's module and name.
    """
    module, name = where
    hook = _WHEN_IMPORTED.replace("MODULE", module).replace("CLASS", name)
    (folder / "sitecustomize.py").write_text(fault + hook)
    return {"PYTHONPATH": with_path(folder)}
