"""Measures colours: contrast, and differences for people with colour vision deficiencies."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

# Matrices for linear RGB, for people without one kind of cone (Machado, Oliveira and Fernandes,
# 2009).
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)  # from linear sRGB
WHITE = XYZ.sum(axis=1)


def palettes(css: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the colour variables of a style sheet, for the light and the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks)
    return light, {**light, **dark}


def linear(colour: str) -> np.ndarray:
    """Returns the linear RGB values, 0 to 1, of a colour #rrggbb."""
    parts: Sequence[float] = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts])


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2, 1 to 21."""
    low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def difference(one: str, other: str, deficiency: str = "none") -> float:
    """Returns the distance of colours in CIELAB (1976); 2.3 is just noticeable side by side."""
    first, second = (_lab(DEFICIENCIES[deficiency] @ linear(colour)) for colour in (one, other))
    return float(np.linalg.norm(first - second))


def _lab(rgb: np.ndarray) -> np.ndarray:
    scaled = XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
