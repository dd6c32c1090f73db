"""Run the GPU suite inside the image of a job, with Python of the image: python -I -B inside.py

It uses the standard library of Python 3.9. Its directory has kit.json, expectations.json and suite.tar, which
contains the suite and the modules of a kit's run.py. It writes run.json and, if the suite wrote one,
report.json to `result/`. Only `result/` is returned.

Exit code 0 if the suite was started and ended, with any result; 3 if it could not be started.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import stat
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

PACKAGE = "imagefactory_kit"
SUITE = "suite.tar"
FORMAT = 1
EXIT_NOT_STARTED = 3
LARGEST_SUITE = 64 << 20
CHUNK = 1 << 20
NAME = re.compile(r"(?:suite|kit)(?:/[A-Za-z0-9_]+)*/[A-Za-z0-9_]+\.py")


class NotStarted(Exception):
    """The suite could not be started. The message is the reason."""


def main(directory: Path, environ: Mapping[str, str]) -> int:
    """Unpack the files, run the suite and write the result. `directory` is the directory of the job."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        unpack(directory / SUITE, directory)
        run(directory, environ, load(directory / "kit"))
    except NotStarted as error:
        print(f"not started: {error}", file=sys.stderr)
    except (OSError, tarfile.TarError, EOFError) as error:
        print(f"not started: {directory}: {error}", file=sys.stderr)
    else:
        return 0
    return EXIT_NOT_STARTED


def unpack(archive: Path, directory: Path) -> None:
    """Unpack regular files with names of a suite. Other entries are skipped."""
    total = 0
    with tarfile.open(archive, "r:") as tar:
        for member in tar:
            total += member.size
            if not NAME.fullmatch(member.name) or not member.isreg() or total > LARGEST_SUITE:
                raise NotStarted(f"{SUITE} has what no suite has: {member.name!r}")
            source = tar.extractfile(member)
            member_path = directory / PurePosixPath(member.name)
            member_path.parent.mkdir(parents=True, exist_ok=True)
            member_path.write_bytes(source.read() if source else b"")


def load(directory: Path) -> Any:
    """Return the module `program` of the kit, loaded as in its run.py: the search path of Python is
    unchanged.
    """
    spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(directory)]
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{PACKAGE}.program")


def run(directory: Path, environ: Mapping[str, str], program: Any) -> None:
    """Start the suite and write `result/`. Raises NotStarted and OSError."""
    try:
        kit = program.read_kit(directory)
    except program.Stop as error:
        raise NotStarted(str(error)) from error
    image = read_image(directory)
    seen, reason = read_hardware(program.hardware)
    report, result = directory / "report", directory / program.RESULT
    for output_path in (report, result):
        output_path.mkdir(exist_ok=True)
    started = program.now()
    ended = follow(suite_argv(kit.argv, directory), environ, kit.timeout)
    facts = {
        "format": FORMAT,
        "nonce": kit.nonce,
        "suite": kit.suite,
        "image": image,
        "started": started,
        "ended": program.now(),
        "returncode": ended.returncode,
        "timed_out": ended.timed_out,
        "seconds": ended.seconds,
        "said": list(ended.lines)[-program.MOST_SAID :],
        "hardware": seen,
        "no_gpu": reason,
    }
    data = program.read_report(directory, f"report/{program.REPORT}")
    if data is not None:
        (result / program.REPORT).write_bytes(data)
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    (result / program.RUN).write_text(text, encoding="utf-8")  # last: it completes the result


def follow(argv: Sequence[str], environ: Mapping[str, str], timeout: float) -> Any:
    """Run the suite in a separate process group and return how it ended."""
    start = importlib.import_module(f"{PACKAGE}.start")
    try:
        return start.follow(argv, environ, timeout)
    except OSError as error:
        raise NotStarted(f"{argv[0]} cannot be started: {error.strerror}") from error


def suite_argv(argv: Sequence[str], directory: Path) -> list[str]:
    """Return the command of the kit with the directory of the job in place of a runner's mounts."""
    start = importlib.import_module(f"{PACKAGE}.start")
    places = {
        start.SUITE_MOUNT: directory / "suite",
        start.EXPECT_MOUNT: directory,
        start.REPORT_MOUNT: directory / "report",
    }
    words = []
    for word in argv:
        mount, _, name = word.rpartition("/")
        words.append(str(places[mount] / name) if mount in places else word)
    return words


def read_image(directory: Path) -> str:
    """Return the sha256 of the .sif that HTCondor transferred, also from the OSDF.

    It is empty if no file was transferred: then the machine has the image or pulls it by digest.
    """
    for path in sorted(directory.glob("*.sif")):
        if stat.S_ISREG(path.lstat().st_mode):
            sha256 = hashlib.sha256()
            with path.open("rb") as file:
                while data := file.read(CHUNK):
                    sha256.update(data)
            return f"sha256:{sha256.hexdigest()}"
    return ""


def read_hardware(hardware: Any) -> tuple[Any, str]:
    """Return the GPUs of the host as visible inside, or None and the reason.

    The suite runs even if NVML fails.
    """
    try:
        return hardware.read_hardware(), ""
    except hardware.NoGpu as error:
        return None, str(error)
    except (OSError, AttributeError, ValueError) as error:
        return None, f"no usable GPU: {error}"


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent, os.environ))
