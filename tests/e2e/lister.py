"""Runs inside an image, by the image's own Python: prints as JSON what the environment is made of."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

EVERYBODY_READS = 0o004
ANYBODY_EXECUTES = 0o111


def look(path):
    """What decides how a file is used: its kind, whether it can be executed, its content."""
    if path.is_symlink():
        return ["link", False, str(path.readlink())]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ["file", bool(path.stat().st_mode & ANYBODY_EXECUTES), digest]


def main():
    prefix = Path(sys.prefix)
    paths = sorted(path for path in prefix.rglob("*") if path.is_symlink() or path.is_file())
    scripts = importlib.metadata.entry_points(group="console_scripts")
    wanted = ("LANG", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")
    environment = {
        name: value for name, value in os.environ.items() if name in wanted or name.startswith("NVIDIA_")
    }
    own = sorted(path for path in Path("/app").rglob("*") if path.is_file())
    seen = {
        "prefix": sys.prefix,
        "python": sys.version,
        "packages": {p.metadata["Name"]: p.version for p in importlib.metadata.distributions()},
        "debian": look(Path("/var/lib/dpkg/status"))[2],
        "environment": environment,
        "path": os.environ["PATH"].split(":")[0],
        "console_scripts": sorted({f"bin/{script.name}" for script in scripts}),
        "unreadable": [str(p) for p in paths if not p.lstat().st_mode & EVERYBODY_READS],
        "jq": subprocess.run(["jq", "--version"], capture_output=True, text=True).stdout.strip()
        if Path("/usr/bin/jq").exists()
        else "",
        "own": {str(path): [*look(path), oct(path.stat().st_mode)] for path in own},
        "files": {str(path.relative_to(prefix)): look(path) for path in paths},
    }
    json.dump(seen, sys.stdout, sort_keys=True)


if __name__ == "__main__":
    main()
