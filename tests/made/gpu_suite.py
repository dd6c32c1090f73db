"""The GPU suite, copied and changed, run on the stand-in for the driver: what tests of it share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.suite.gpu import table
from imagefactory.verify.suite_files import SUITE_DIRECTORY
from tests.services.libcuda import VARIABLE

Row = dict[str, Any]

# A framework of which a probe does what FAKE_<PART> says: `no-kernel`, or the name of one of these.
FAKE_FRAMEWORK = """
import os, signal, subprocess, sys, time
from ..context import CheckFailure, Finding

class NoKernel(Exception):
    pass

def prepare(context):
    if os.environ.get("FAKE_PREPARE"):
        raise ImportError(os.environ["FAKE_PREPARE"])

def act(word):
    if word == "no-kernel":
        raise NoKernel("no kernel image is available")
    if word == "load-failed":
        raise OSError("libfake.so is not there")
    if word == "wrong-numbers":
        raise CheckFailure("1 is not 2", outcome="wrong-numbers")
    if word == "abort":
        print("F1122 no kernel image is available for execution on the device", file=sys.stderr, flush=True)
        os.abort()
    if word == "too-new":
        print("the provided PTX was compiled with an unsupported toolchain.", file=sys.stderr, flush=True)
        os.abort()
    if word == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "leave":
        os._exit(0)
    if word == "end":
        sys.exit(3)
    if word == "hang":
        time.sleep(600)
    if word == "hang-with-children":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ["FAKE_CHILD"], "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if word == "die-later":
        import atexit
        atexit.register(os._exit, 7)
    if word == "nan":
        return Finding("measured", {"speed": float("nan")})
    variables = sorted(name for name in os.environ if name.startswith("CUDA_"))
    told = " ".join(f"{name}={os.environ[name]}" for name in variables)
    return Finding(f"ran with {told}", {"operations": 1})

def probe(context):
    part = "PTX" if os.environ.get("CUDA_FORCE_PTX_JIT") else "NATIVE"
    return act(os.environ.get(f"FAKE_{part}", ""))
"""

FAKE_PROBE = "def run_probe(context):\n    return context.framework.probe(context)\n"

FAKE_NUMBERS = """
import os
def __getattr__(name):
    if not name.startswith("check_"):
        raise AttributeError(name)
    word = os.environ.get("FAKE_" + name.removeprefix("check_").upper(), "")
    def check(context):
        found = context.framework.act(word)
        return type(found)(f"on {context.device.get('uuid')} {found.detail}", found.numbers)
    return check
"""


@dataclass(frozen=True)
class Ran:
    """How a run of the suite ended, and its report, empty where it wrote none."""

    code: int
    output: str
    errors: str
    report: Mapping[str, Any]

    @property
    def rows(self) -> dict[str, Row]:
        return {row["name"]: row for row in self.report["checks"]}

    def states(self) -> dict[str, tuple[str, str]]:
        return {name: (row["state"], row["outcome"]) for name, row in self.rows.items()}


Run = Callable[..., Ran]


def copy_suite(folder: Path, *, seconds: float = 60.0, changes: Mapping[str, tuple[str, str]] = {}) -> Path:
    """The suite in `folder`/suite, its parts given `seconds`; `changes` are (old, new) texts by file.

    Fakes stand in for torch and for the checks of numbers, JIT, portability and several GPUs.
    """
    suite = folder / "suite"
    shutil.copytree(SUITE_DIRECTORY, suite, ignore=shutil.ignore_patterns("__pycache__"))
    (suite / "gpu/frameworks/torch.py").write_text(FAKE_FRAMEWORK)
    (suite / "gpu/frameworks/probe.py").write_text(FAKE_PROBE)
    for name in ("numbers", "jit", "portability", "profile", "several"):
        (suite / f"gpu/checks/{name}.py").write_text(FAKE_NUMBERS)
    times = (
        "SECONDS = {QUICK: 240.0, FULL: 420.0, SEVERAL: 420.0, NODE: 40.0, NODES: 900.0}",
        f"SECONDS = dict.fromkeys(LEVELS, {seconds})",
    )
    for name, (old, new) in {"gpu/table.py": times, **changes}.items():
        text = (suite / name).read_text()
        assert text.count(old) == 1, f"{name} has not one '{old}'"
        (suite / name).write_text(text.replace(old, new))
    return suite


def make_expectations(**changes: Any) -> dict[str, Any]:
    return {
        "format": table.FORMAT,
        "nonce": "5eed",
        "target": "pytorch-2.3-cu121",
        "framework": "torch",
        "version": "2.3.1",
        "cuda": "12.1",
        "python": "3.11",
        "packages": {"torch": "2.3.1"},
        "conda": {},
        "level": "quick",
        "capability": "",
        "driver": "12.0",
        "predicted": {"8.0": {"native": True, "ptx": True, "runs": True, "reason": "sm_80 and PTX"}},
        "rehearsal": False,
        **changes,
    }


@dataclass(frozen=True)
class Ground:
    """A copy of the suite, the stand-in's folder, and a folder of its own for what a run writes."""

    suite: Path
    library: Path
    folder: Path

    def start(
        self, expectations: Mapping[str, Any], lies: str = "", part: str = "", **environment: str
    ) -> tuple[subprocess.Popen[str], Path]:
        """Starts the suite, or one part of it; where its report will be."""
        self.folder.mkdir(parents=True)
        asked, report = self.folder / "expectations.json", self.folder / "report.json"
        asked.write_text(json.dumps(expectations))
        command = [sys.executable, "-I", "-B", str(self.suite / "verify.py")]
        if part:
            command += ["--part", part]
        environ = {"LD_LIBRARY_PATH": str(self.library), VARIABLE: lies, "PATH": os.environ["PATH"]}
        process = subprocess.Popen(
            [*command, str(asked), str(report)],
            env={**environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process, report

    def run(self, expectations: Mapping[str, Any], lies: str = "", part: str = "", **environment: str) -> Ran:
        process, report = self.start(expectations, lies, part, **environment)
        output, errors = process.communicate(timeout=120)
        document = json.loads(report.read_text()) if report.exists() else {}
        return Ran(code=process.returncode, output=output, errors=errors, report=document)
