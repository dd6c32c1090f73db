"""An environment as the suite finds it in an image."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from imagefactory.suite.context import Context, Expected

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def make_context(site: Path, module: Any = None, **changes: Any) -> Context:
    values: dict[str, Any] = {
        "nonce": "n",
        "target": "pytorch-1.13-cu117",
        "framework": "torch",
        "distribution": "torch",
        "version": "1.13.1",
        "cuda": "11.7",
        "python": PYTHON,
        "packages": {},
        "checks": (),
        "uid": None,
        **changes,
    }
    return Context(expected=Expected(**values), framework=module, site=str(site), prefix=str(site))


def add_package(site: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """Installs as pip would: files, METADATA and a RECORD with hashes and sizes."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
    }
    rows = []
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    rows.append(f"{info}/RECORD,,")
    (site / info / "RECORD").write_text("\n".join(rows) + "\n")


def library(path: Path, *needs: Path, runpath: str = "", soname: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ["-Wl,--no-as-needed", *map(str, needs)]
    options += [f"-Wl,-soname,{soname or path.name}"]
    options += [f"-Wl,-rpath,{runpath}"] if runpath else []
    nothing = ("-x", "assembler", "/dev/null", "-x", "none")
    subprocess.run(["gcc", "-shared", "-o", path, *nothing, *options], check=True)
    return path


def fake_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
