"""Writes checkpoints of models that only mlx-lm has, and mlx-lm's answers to prompts.

cd tests; python -m support.zoo_peer  # lines {models: {path: config}, prompts, steps} on stdin
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.mlx_lm_peer import serve, write_answers


def work(job: Any) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.utils import _get_classes

    for path, settings in job["models"].items():
        kind, arguments = _get_classes(config=settings)
        model: Any = kind(arguments.from_dict(settings))
        mx.random.seed(3)

        def noisy(array: Any) -> Any:
            return array + mx.random.normal(array.shape) * (0.7 * array.shape[-1] ** -0.5)

        model.update(tree_map(noisy, model.parameters()))
        weights: Any = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(f"{path}/model.safetensors", weights)
        write_answers(Path(path), model, job["prompts"], job["steps"])


if __name__ == "__main__":
    serve(work)
