#!/usr/bin/env python3
"""Trains a small network on drawn cats and dogs, by JAX on one CPU or GPU. It can be ended at any moment.

checkpoint.npz is written each --save steps, beside and renamed; started again it goes on from there, and
comes to the same result. With --leave it ends after each save with exit code 85, which asks to be started
again; so it does when it is told to end (SIGTERM). result.json is the end.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import pictures
from run import BATCH, LOOK, TESTS, options, write_result

AGAIN = 85
CHECKPOINT = Path("checkpoint.npz")


def new_network(seed: int, width: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([seed, 0])

    def some(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * (2 / np.prod(shape[:-1])) ** 0.5).astype(np.float32)

    side = pictures.SIZE // 8
    network = {
        "a": some(3, 3, 1, width),
        "b": some(3, 3, width, 2 * width),
        "c": some(3, 3, 2 * width, 2 * width),
    }
    return {**network, "d": some(side * side * 2 * width, 2), "e": np.zeros(2, np.float32)}


def save(kept: dict[str, Any]) -> None:
    """Beside and renamed: whoever is ended in the midst of it leaves the last one whole."""
    beside = CHECKPOINT.with_suffix(".new.npz")
    np.savez(beside, **kept)
    beside.replace(CHECKPOINT)


def main() -> int:
    asked = options(__doc__)
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[asked.device]  # before JAX is there
    import jax
    import jax.numpy as jnp

    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    def logits(network: dict[str, Any], images: Any) -> Any:
        for name in "abc":
            images = jax.lax.conv_general_dilated(
                images, network[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            images = jax.nn.relu(images)
        return images.reshape(len(images), -1) @ network["d"] + network["e"]

    def loss(network: dict[str, Any], images: Any, labels: Any) -> Any:
        return -jax.nn.log_softmax(logits(network, images))[jnp.arange(len(labels)), labels].mean()

    @jax.jit
    def advance(network: Any, first: Any, second: Any, count: Any, images: Any, labels: Any) -> Any:
        """One step of Adam."""
        error, slope = jax.value_and_grad(loss)(network, images, labels)
        first = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, first, slope)
        second = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, second, slope)

        def moved(value: Any, a: Any, b: Any) -> Any:
            return value - asked.lr * (a / (1 - 0.9**count)) / (jnp.sqrt(b / (1 - 0.999**count)) + 1e-8)

        return error, jax.tree.map(moved, network, first, second), first, second

    network = new_network(asked.seed, asked.width)
    first = second = {name: np.zeros_like(value) for name, value in network.items()}
    step, curve, starts = 0, [], []
    if CHECKPOINT.exists():
        with np.load(CHECKPOINT) as kept:
            step, curve, starts = json.loads(str(kept["told"]))
            network, first, second = ({name: kept[f"{part}{name}"] for name in network} for part in "nfs")
    starts.append([step, platform.node()])
    print(f"from step {step} on {jax.devices()[0].device_kind}, {platform.node()}", flush=True)
    tests, answers = pictures.draw(0, 0, TESTS)  # the same for all
    probability = jax.jit(lambda network: jax.nn.softmax(logits(network, tests))[:, 1])
    while step < asked.steps:
        step += 1
        images, labels = pictures.draw(asked.seed, step, BATCH)
        error, network, first, second = advance(network, first, second, step, images, labels)
        if step % LOOK == 0 or step == asked.steps:
            right = float(((probability(network) > 0.5) == answers).mean())
            curve.append([step, float(error), right])
            print(f"step {step}: loss {error:.3f}, {right:.1%} right", flush=True)
        if step < asked.steps and (told or step % asked.save == 0):
            parts = {"n": network, "f": first, "s": second}
            arrays = {f"{part}{name}": value for part, tree in parts.items() for name, value in tree.items()}
            save({"told": json.dumps([step, curve, starts]), **arrays})
            if told or asked.leave:
                return AGAIN
    write_result(asked, curve, starts, probability(network), answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
