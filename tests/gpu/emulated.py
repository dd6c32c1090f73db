"""Steps of training as the GPU here takes them, and emulated by the profile recorded of it just before.

Outside of any image: by the torch of the machine's own Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from imagefactory.extras.emulate.run import PROFILE, SINGLE, recorded_curves, without_units
from imagefactory.suite.gpu.part import DEVICE_VARIABLE

STEPS = """
import importlib, json, runpy, sys
runpy.run_path(sys.argv[1] + "/smoke.py")["load_suite"](sys.argv[1])
steps = importlib.import_module("imagefactory_suite.gpu.checks.profile")
print(json.dumps(steps.record_steps("cuda", tuple(sys.argv[3:]), few=sys.argv[2] == "few")))
"""


def record(python: str, suite: Path, expectations: Path, device: Mapping[str, Any], limit: float) -> Any:
    """The row of the check `profile`, its numbers without their units. Raises subprocess.TimeoutExpired."""
    report = expectations.with_name("profile.json")
    command = [python, "-I", "-B", suite / "verify.py", "--part", PROFILE, expectations, report]
    environ = {**os.environ, DEVICE_VARIABLE: json.dumps(device)}
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, timeout=limit)
    (row,) = json.loads(report.read_text())["checks"]
    return {**row, "numbers": without_units(row["numbers"])}


def emulate(
    python: str,
    suite: Path,
    numbers: Mapping[str, float],
    device: Mapping[str, Any],
    folder: Path,
    limit: float,
) -> dict[str, float]:
    """The numbers of the same steps, emulated by `numbers`. Raises subprocess.SubprocessError."""
    shown, told = folder / "shown", folder / "told"
    told.mkdir()
    shutil.copytree(suite.with_name("emulate"), shown / "imagefactory_emulate")
    (shown / "imagefactory_emulate/sitecustomize.py").rename(shown / "sitecustomize.py")
    curves = recorded_curves(numbers)
    pageable = {f"{way}-pinned": curves[f"{way}-pageable"] for way in ("up", "down")}
    profile = {
        **dict.fromkeys(SINGLE, 0.0),
        **{name: numbers[name] for name in SINGLE if name in numbers},
        **{key: device[key] for key in ("capability", "memory")},
        "name": device["name"],
        "device": device["name"],
        "curves": {**pageable, "peer": [[1e9, 1.0]], **curves},
        "basis": "recorded",
    }
    asked = shown / "asked.json"
    asked.write_text(json.dumps({"gpus": 1, "folder": str(told), "profile": profile}))
    steps = [name.split("-") for name in numbers if name.startswith("step-")]
    few = "many" if any(words[-1] == "peak" for words in steps) else "few"
    command = [python, "-B", "-c", STEPS, suite, few, *sorted({words[2] for words in steps})]
    environ = {**os.environ, "PYTHONPATH": str(shown), "IMAGEFACTORY_EMULATE": str(asked)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=limit)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(
    recorded: Mapping[str, float], emulated: Mapping[str, float]
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """By network, type and batch: a line, and the emulated part of what was recorded."""
    for name in recorded:
        if name.startswith("step-") and name.endswith("-whole"):
            whose = name.removesuffix("-whole")
            parts = {
                key.removeprefix(f"{whose}-"): emulated[key] / value
                for key, value in recorded.items()
                if key.startswith(f"{whose}-") and value
            }
            said = ", ".join(f"{part} {ratio:.0%}" for part, ratio in parts.items())
            yield whose.removeprefix("step-"), f"of {recorded[name] * 1e3:.3g} ms a step: {said}", parts
