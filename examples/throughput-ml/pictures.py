"""Draw cats with pointed ears and dogs with hanging ears. Noise and shades make the task harder."""

from __future__ import annotations

import numpy as np

SIZE = 32


def draw(seed: int, part: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures (count, SIZE, SIZE, 1) and labels (count,): 0 for a cat, 1 for a dog.

    The same arguments give the same pictures.
    """
    random = np.random.default_rng([seed, part])

    def uniform(low: float, high: float) -> np.ndarray:
        return random.uniform(low, high, (count, 1, 1))

    dogs = random.integers(0, 2, count)
    y, x = np.mgrid[0:SIZE, 0:SIZE].astype(np.float64)
    x = x - uniform(13, 19)  # relative to the center of the face
    y = y - uniform(14, 20)
    size = uniform(6, 9)
    face = (x / size) ** 2 + (y / size / uniform(0.85, 1.1)) ** 2 < 1
    side = np.abs(x) / size  # symmetric: two ears, two eyes
    height = -y / size
    pointed = (height > 0.5) & (height < 1.5 - 2.2 * np.abs(side - 0.6))
    hanging = ((side - 1.05) / 0.28) ** 2 + ((height - 0.1) / uniform(0.6, 0.8)) ** 2 < 1
    ears = np.where(dogs[:, None, None] == 1, hanging, pointed)
    eyes = (side - 0.4) ** 2 + (height - 0.2) ** 2 < 0.02
    fur, shade = uniform(0.3, 0.8), uniform(-0.25, 0.25)
    picture = uniform(0.0, 1.0) + (face * fur) + (ears & ~face) * (fur + shade) - eyes * 0.6
    picture = picture + random.normal(0, 0.45, picture.shape)
    return picture.astype(np.float32)[..., None], dogs.astype(np.int32)
