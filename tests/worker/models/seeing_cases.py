"""The test cases of models that read images, and their stored results of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support import seeing_models as seeing


@dataclass(frozen=True, slots=True)
class Case:
    """A model that reads images, and its comparison with stored results of transformers."""

    name: str  # the name of the file with the stored results
    write: Callable[..., Path]  # writes the model's folder
    slot: int  # transformers' token id for an input of an image
    feature_tolerance: float  # absolute; the features are about 1
    features: Callable[[np.ndarray], np.ndarray]  # selects the stored features of an encoded image
    layouts: tuple[str, ...] = ("rows", "slabs", "pool")
    crossed: bool = False  # an image is one input, whose features cross-attention reads

    def __str__(self) -> str:
        return self.name

    def expected(self) -> Any:
        """The stored results: features, inputs, ids and log-probabilities."""
        return np.load(seeing.EXPECTED / f"{self.name}_images.npz")


# Gemma 3 has no slabs: its images attend in both directions, and some layers have windows.
GEMMA3 = Case(
    "gemma3",
    seeing.write_gemma,
    seeing.FIRST_ID + 1,
    1e-5,
    lambda found: found[0],
    layouts=("rows", "pool"),
)
# Features of two encoder layers also go to the text part; they come after the stored features.
QWEN3_VL = Case("qwen3_vl", seeing.write_qwen, seeing.FIRST_ID + 1, 2e-5, lambda found: found[0])
MLLAMA = Case(
    "mllama", seeing.write_mllama, seeing.FIRST_ID, 2e-5, lambda found: found, crossed=True
)
CASES = (GEMMA3, QWEN3_VL, MLLAMA)
