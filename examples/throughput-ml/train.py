#!/usr/bin/env python3
"""Trains a small network on drawn cats and dogs, by JAX on one CPU or GPU. It can be ended at any moment.

checkpoint.npz is written each --save steps, beside and renamed; started again it goes on from there, and
comes to the same result. With --leave it ends after each save with exit code 85, which asks to be started
again; so it does when it is told to end (SIGTERM). result.json is the end.
"""

from __future__ import annotations

import json
import platform
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pictures
from run import BATCH, LOOK, TESTS, options, write_result

AGAIN = 85
CHECKPOINT = Path("checkpoint.npz")
Arrays = dict[str, Any]


@dataclass(kw_only=True)
class State:
    """All that the next step needs: the network, Adam's two means of its slopes, and what was so far."""

    network: Arrays
    first: Arrays
    second: Arrays
    step: int = 0
    curve: list[Any] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)

    def save(self) -> None:
        """Beside and renamed: whoever is ended in the midst of it leaves the last one whole."""
        parts = {"network": self.network, "first": self.first, "second": self.second}
        arrays = {f"{part}-{name}": value for part, tree in parts.items() for name, value in tree.items()}
        beside = CHECKPOINT.with_suffix(".new.npz")
        np.savez(beside, told=json.dumps([self.step, self.curve, self.starts]), **arrays)
        beside.replace(CHECKPOINT)


def begin(seed: int, width: int) -> State:
    """From the checkpoint, where there is one."""
    network = new_network(seed, width)
    none = {name: np.zeros_like(value) for name, value in network.items()}
    if not CHECKPOINT.exists():
        return State(network=network, first=none, second=none)
    with np.load(CHECKPOINT) as kept:
        step, curve, starts = json.loads(str(kept["told"]))
        parts = {
            part: {name: kept[f"{part}-{name}"] for name in network}
            for part in ("network", "first", "second")
        }
    return State(**parts, step=step, curve=curve, starts=starts)


def new_network(seed: int, width: int) -> Arrays:
    random = np.random.default_rng([seed, 0])

    def some(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * (2 / np.prod(shape[:-1])) ** 0.5).astype(np.float32)

    network = {
        "a": some(3, 3, 1, width),
        "b": some(3, 3, width, 2 * width),
        "c": some(3, 3, 2 * width, 2 * width),
    }
    side = pictures.SIZE // 8
    return {**network, "d": some(side * side * 2 * width, 2), "e": np.zeros(2, np.float32)}


def answer(network: Arrays, images: Any) -> Any:
    for name in "abc":
        form = ("NHWC", "HWIO", "NHWC")
        images = jax.lax.conv_general_dilated(images, network[name], (2, 2), "SAME", dimension_numbers=form)
        images = jax.nn.relu(images)
    return images.reshape(len(images), -1) @ network["d"] + network["e"]


def loss(network: Arrays, images: Any, labels: Any) -> Any:
    return -jax.nn.log_softmax(answer(network, images))[jnp.arange(len(labels)), labels].mean()


@jax.jit
def dogs(network: Arrays, images: Any) -> Any:
    """How sure it is that each shows a dog."""
    return jax.nn.softmax(answer(network, images))[:, 1]


@jax.jit
def adam(network: Arrays, first: Arrays, second: Arrays, numbers: Any, images: Any, labels: Any) -> Any:
    """One step, of which `numbers` are its length and its count."""
    length, count = numbers
    error, slope = jax.value_and_grad(loss)(network, images, labels)
    first = jax.tree.map(lambda mean, new: 0.9 * mean + 0.1 * new, first, slope)
    second = jax.tree.map(lambda mean, new: 0.999 * mean + 0.001 * new * new, second, slope)

    def moved(value: Any, a: Any, b: Any) -> Any:
        return value - length * (a / (1 - 0.9**count)) / (jnp.sqrt(b / (1 - 0.999**count)) + 1e-8)

    return error, jax.tree.map(moved, network, first, second), first, second


def main() -> int:
    asked = options(__doc__)
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[asked.device])  # and no other instead
    try:
        device = jax.devices()[0].device_kind
    except (AssertionError, RuntimeError) as error:
        print(f"JAX finds no {asked.device} here {error}", file=sys.stderr)
        return 1
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    state = begin(asked.seed, asked.width)
    state.starts.append([state.step, platform.node()])
    print(f"from step {state.step} on {device}, {platform.node()}", flush=True)
    tests, answers = pictures.draw(0, 0, TESTS)  # the same for all
    while state.step < asked.steps:
        state.step += 1
        images, labels = pictures.draw(asked.seed, state.step, BATCH)
        numbers = (asked.lr, float(state.step))
        error, state.network, state.first, state.second = adam(
            state.network, state.first, state.second, numbers, images, labels
        )
        if state.step % LOOK == 0 or state.step == asked.steps:
            right = float(((dogs(state.network, tests) > 0.5) == answers).mean())
            state.curve.append([state.step, float(error), right])
            print(f"step {state.step}: loss {error:.3f}, {right:.1%} right", flush=True)
        if state.step < asked.steps and (told or state.step % asked.save == 0):
            state.save()
            if told or asked.leave:
                return AGAIN
    write_result(asked, state.curve, state.starts, dogs(state.network, tests), answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
