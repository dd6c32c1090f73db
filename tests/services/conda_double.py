"""A program that speaks as much of conda's command line as conda-lock uses, with py-rattler as its solver.

No conda, mamba or micromamba can be had from the package indexes that this project is tested with. It is run
by the wrapper that `write_double` makes, under the name it shall be taken for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "2.5.0"


def write_double(folder: Path, name: str) -> Path:
    """An executable called `name` in `folder`; it writes each of its calls to `<name>.calls` beside it."""
    path = folder / name
    call = shlex.join([sys.executable, str(Path(__file__).absolute())])
    log = shlex.quote(str(folder / f"{name}.calls"))
    path.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {call} "$@"\n')
    path.chmod(0o755)
    return path


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("create", "install", "update"):
        command = commands.add_parser(name)
        command.add_argument("--prefix", "-p", required=True)
        command.add_argument("--dry-run", action="store_true", required=True)
        command.add_argument("--json", action="store_true", required=True)
        command.add_argument("--override-channels", action="store_true", required=True)
        command.add_argument("--channel", action="append", default=[])
        command.add_argument("specs", nargs="+")
    commands.add_parser("info").add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.command == "info":
        print(json.dumps({"package cache": [os.environ["CONDA_PKGS_DIRS"]]}))
        return 0
    from rattler.exceptions import SolverError

    try:
        records = asyncio.run(_solve(arguments.channel, arguments.specs))
    except SolverError as error:
        told = {"success": False, "exception_name": "LibMambaUnsatisfiableError", "message": str(error)}
        print(json.dumps(told))
        return 1
    actions = {"FETCH": records, "LINK": [{"name": one["name"]} for one in records]}
    print(json.dumps({"success": True, "actions": actions}))
    return 0


async def _solve(channels: Sequence[str], specs: Sequence[str]) -> list[dict[str, Any]]:
    import rattler

    virtual = [("__unix", "0", "0")] if os.environ["CONDA_SUBDIR"].startswith("linux") else []
    for name, value in sorted(os.environ.items()):
        if name.startswith("CONDA_OVERRIDE_") and value:
            package = f"__{name.removeprefix('CONDA_OVERRIDE_').lower()}"
            virtual.append((package, "1", value) if package == "__archspec" else (package, value, "0"))
    strict = os.environ.get("CONDA_CHANNEL_PRIORITY") == "strict"
    records = await rattler.solve(
        # conda-lock's own channel of virtual packages says again what the overrides say
        sources=[channel for channel in channels if "conda-lock-fake-repodata" not in channel],
        specs=[rattler.MatchSpec(spec) for spec in specs],
        platforms=[os.environ["CONDA_SUBDIR"], "noarch"],  # type: ignore[list-item]
        virtual_packages=[
            rattler.GenericVirtualPackage(
                rattler.PackageName(name), rattler.Version(version), rattler.BuildString(build)
            )
            for name, version, build in virtual
        ],
        channel_priority=rattler.ChannelPriority.Strict if strict else rattler.ChannelPriority.Disabled,
    )
    return [
        {
            "name": record.name.normalized,
            "version": str(record.version),
            "build": str(record.build),
            "channel": record.channel,
            "subdir": record.subdir,
            "fn": record.file_name,
            "url": record.url,
            "md5": record.md5.hex() if record.md5 else "",
            "sha256": record.sha256.hex() if record.sha256 else None,
            "depends": record.depends,
            "constrains": record.constrains,
        }
        for record in records
    ]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of rattler may still be at work, and Python's own end would not wait for them
