#!/usr/bin/env python3
"""Train a small network on drawn cats and dogs, with JAX on one CPU or GPU. It may be stopped at any time.

Every --save steps it writes checkpoint.npz under another name and renames it. When it starts again, it
continues from the checkpoint and gets the same result. With --leave it exits with 85 after each checkpoint,
which means: start me again. It does the same on SIGTERM. At the end it writes result.json.
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
from run import BATCH, EVALUATE, TESTS, parse_options, write_result

AGAIN = 85
CHECKPOINT = Path("checkpoint.npz")
Arrays = dict[str, Any]


@dataclass(kw_only=True)
class State:
    """All that the next step needs: the network, Adam's two moments, and the results so far."""

    network: Arrays
    first: Arrays
    second: Arrays
    step: int = 0
    curve: list[Any] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)

    def save(self) -> None:
        """Write the checkpoint under another name, then rename it: a kill leaves the last one intact."""
        parts = {"network": self.network, "first": self.first, "second": self.second}
        arrays = {f"{part}-{name}": value for part, tree in parts.items() for name, value in tree.items()}
        new = CHECKPOINT.with_suffix(".new.npz")
        np.savez(new, progress=json.dumps([self.step, self.curve, self.starts]), **arrays)
        new.replace(CHECKPOINT)


def initial_state(seed: int, width: int) -> State:
    """Return the state of the checkpoint, or a new one."""
    network = new_network(seed, width)
    zeros = {name: np.zeros_like(value) for name, value in network.items()}
    if not CHECKPOINT.exists():
        return State(network=network, first=zeros, second=zeros)
    with np.load(CHECKPOINT) as saved:
        step, curve, starts = json.loads(str(saved["progress"]))
        parts = {
            part: {name: saved[f"{part}-{name}"] for name in network}
            for part in ("network", "first", "second")
        }
    return State(**parts, step=step, curve=curve, starts=starts)


def new_network(seed: int, width: int) -> Arrays:
    random = np.random.default_rng([seed, 0])

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * (2 / np.prod(shape[:-1])) ** 0.5).astype(np.float32)

    network = {
        "a": normal(3, 3, 1, width),
        "b": normal(3, 3, width, 2 * width),
        "c": normal(3, 3, 2 * width, 2 * width),
    }
    side = pictures.SIZE // 8
    return {**network, "d": normal(side * side * 2 * width, 2), "e": np.zeros(2, np.float32)}


def forward(network: Arrays, images: Any) -> Any:
    for name in "abc":
        layout = ("NHWC", "HWIO", "NHWC")
        images = jax.lax.conv_general_dilated(images, network[name], (2, 2), "SAME", dimension_numbers=layout)
        images = jax.nn.relu(images)
    return images.reshape(len(images), -1) @ network["d"] + network["e"]


def loss(network: Arrays, images: Any, labels: Any) -> Any:
    return -jax.nn.log_softmax(forward(network, images))[jnp.arange(len(labels)), labels].mean()


@jax.jit
def predict(network: Arrays, images: Any) -> Any:
    """Return the probability that each picture shows a dog."""
    return jax.nn.softmax(forward(network, images))[:, 1]


@jax.jit
def adam(network: Arrays, first: Arrays, second: Arrays, numbers: Any, images: Any, labels: Any) -> Any:
    """Return the loss, the network and its moments after a step. `numbers`: the learning rate, the step."""
    rate, count = numbers
    error, gradient = jax.value_and_grad(loss)(network, images, labels)
    first = jax.tree.map(lambda mean, new: 0.9 * mean + 0.1 * new, first, gradient)
    second = jax.tree.map(lambda mean, new: 0.999 * mean + 0.001 * new * new, second, gradient)

    def update(value: Any, a: Any, b: Any) -> Any:
        return value - rate * (a / (1 - 0.9**count)) / (jnp.sqrt(b / (1 - 0.999**count)) + 1e-8)

    return error, jax.tree.map(update, network, first, second), first, second


def main() -> int:
    options = parse_options(__doc__)
    # No fallback to another device.
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[options.device])
    try:
        device = jax.devices()[0].device_kind
    except (AssertionError, RuntimeError) as error:
        print(f"JAX cannot use a {options.device}: {error}", file=sys.stderr)
        return 1
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    state = initial_state(options.seed, options.width)
    state.starts.append([state.step, platform.node()])
    print(f"from step {state.step} on {device}, {platform.node()}", flush=True)
    tests, test_labels = pictures.draw(0, 0, TESTS)  # the same for all runs
    while state.step < options.steps:
        state.step += 1
        images, labels = pictures.draw(options.seed, state.step, BATCH)
        numbers = (options.lr, float(state.step))
        error, state.network, state.first, state.second = adam(
            state.network, state.first, state.second, numbers, images, labels
        )
        if state.step % EVALUATE == 0 or state.step == options.steps:
            accuracy = float(((predict(state.network, tests) > 0.5) == test_labels).mean())
            state.curve.append([state.step, float(error), accuracy])
            print(f"step {state.step}: loss {error:.3f}, accuracy {accuracy:.1%}", flush=True)
        if state.step < options.steps and (signals or state.step % options.save == 0):
            state.save()
            if signals or options.leave:
                return AGAIN
    write_result(options, state.curve, state.starts, predict(state.network, tests), test_labels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
