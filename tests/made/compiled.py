"""Byte code by the Python of the tests: the sandbox and a base need more than tests of layers have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from imagefactory.build import layers
from imagefactory.build.layer_plan import LayerInputs
from imagefactory.build.layers import BaseCompiler


def compile_here(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    """Workers of builds start this interpreter, as if it were a base's `python`."""

    def new_compiler(bench: LayerInputs, base: tuple[Path, ...]) -> BaseCompiler:
        def start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
            env = {"PYTHONHASHSEED": "0"}
            return subprocess.Popen((sys.executable, *argv[1:]), stdin=-1, stdout=-1, env=env)

        return BaseCompiler(start, python)

    monkeypatch.setattr(layers, "new_compiler", new_compiler)
