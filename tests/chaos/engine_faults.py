"""Faults inside the engine of a worker process, which its interpreter's start puts there."""

from __future__ import annotations

from pathlib import Path

from support.pool import with_path

# `arm(engine)`, which the fault defines, is called with ModelEngine when its module was imported.
_WHEN_IMPORTED = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mlxpool.worker.engine.model_engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_arm(module):
            run(module)
            arm(module.ModelEngine)

        spec.loader.exec_module = run_and_arm
        return spec

sys.meta_path.insert(0, Finder())
"""


def install_fault(folder: Path, fault: str) -> dict[str, str]:
    """Writes a fault to `folder`; returns the environment in which processes have it.

    `fault` is Python that defines `arm(engine)`, which changes methods of the class ModelEngine.
    """
    (folder / "sitecustomize.py").write_text(fault + _WHEN_IMPORTED)
    return {"PYTHONPATH": with_path(folder)}
