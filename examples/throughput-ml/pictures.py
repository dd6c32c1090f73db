"""Cats and dogs, drawn: a cat's ears are pointed, a dog's hang. Noise and shades make it less than easy."""

from __future__ import annotations

import numpy as np

SIZE = 32


def draw(seed: int, part: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (count, SIZE, SIZE, 1) and what they show: 0 a cat, 1 a dog. Same numbers, same pictures."""
    random = np.random.default_rng([seed, part])

    def some(low: float, high: float) -> np.ndarray:
        return random.uniform(low, high, (count, 1, 1))

    dogs = random.integers(0, 2, count)
    y, x = np.mgrid[0:SIZE, 0:SIZE].astype(np.float64)
    x = x - some(13, 19)  # from the middle of the face
    y = y - some(14, 20)
    size = some(6, 9)
    face = (x / size) ** 2 + (y / size / some(0.85, 1.1)) ** 2 < 1
    side = np.abs(x) / size  # ears come in pairs
    height = -y / size
    pointed = (height > 0.5) & (height < 1.5 - 2.2 * np.abs(side - 0.6))
    hanging = ((side - 1.05) / 0.28) ** 2 + ((height - 0.1) / some(0.6, 0.8)) ** 2 < 1
    ears = np.where(dogs[:, None, None] == 1, hanging, pointed)
    eyes = (side - 0.4) ** 2 + (height - 0.2) ** 2 < 0.02
    fur, shade = some(0.3, 0.8), some(-0.25, 0.25)
    picture = some(0.0, 1.0) + (face * fur) + (ears & ~face) * (fur + shade) - eyes * 0.6
    picture = picture + random.normal(0, 0.45, picture.shape)
    return picture.astype(np.float32)[..., None], dogs.astype(np.int32)
