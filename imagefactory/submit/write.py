"""Looks at what jobs take along, and writes a submit file and what belongs to it into this folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.fs import replace_all
from imagefactory.schedulers.pool import ImageKind
from imagefactory.progress import Progress
from imagefactory.jobs.make import SubmitMade
from imagefactory.jobs.kubernetes import FILES_MOST
from imagefactory.jobs.htcondor import SubmitRun, folder_of

_CHUNK = 1 << 20


def check_files(made: SubmitMade, progress: Progress) -> None:
    """Looks whether what the job takes along is there, and is what it must be. Raises UsageError."""
    for option, program in (("--executable", made.run.executable), ("--gather", made.run.gather)):
        if program and not made.run.in_image:
            _check_program(option, Path(program), runs_here=made.request is not None)
    for path in made.run.inputs:
        if "://" not in path and not Path(path).exists():
            raise UsageError(
                "input-not-found",
                f"input file {path} does not exist",
                hint="pass its path relative to this directory: --input PATH",
            )
    image = made.taken.form.image
    if image.kind is ImageKind.SIF:
        _check_sif(Path(image.address), made, progress)


def read_files(run: SubmitRun) -> Mapping[str, bytes]:
    """The program and its inputs by name, for a Job that carries them. Raises UsageError."""
    paths = [("--executable", run.executable)] if run.executable and not run.in_image else []
    files: dict[str, bytes] = {}
    for option, path in [*paths, *(("--input", one) for one in run.inputs)]:
        name = Path(path).name
        if "://" in path:
            raise UsageError(
                "option-conflict",
                f"{option} {path} does not work on Kubernetes, which does not download files",
                hint="download it in the program",
            )
        if name in files:
            raise UsageError(
                "file-name-duplicate",
                f"two input files have the name {name}",
                hint="rename one: the job has one directory",
            )
        try:
            with Path(path).open("rb") as file:
                files[name] = file.read(FILES_MOST + 1)
        except OSError as error:
            raise UsageError(
                *os_problem("read", path, error),
                hint=f"pass a file with {option}; put directories into a volume and add it to the manifest",
            ) from error
    return files


def write_made(made: SubmitMade, *, force: bool) -> tuple[str, ...]:
    """Writes the files into the current folder; their names. Raises UsageError where they are here."""
    name = made.run.name
    if made.dag and (rescues := sorted(Path().glob(f"{name}.dag.rescue*"))):
        raise UsageError(
            "sweep-rescue-exists",
            f"{rescues[0]} exists: DAGMan would continue that sweep and skip its finished runs",
            hint=f"rm {rescues[0]}, or use another name: -o NAME.sub",
        )
    texts = {made.file: made.text} | ({made.gather_file: made.gather} if made.gather else {})
    texts |= {f"{name}.dag": made.dag} if made.dag else {}
    folders = [folder_of(number) for number in range(1, made.dag.count("\nVARS ") + 1)]
    if not force:
        there = [path for path in texts if os.path.lexists(path)]
        there += [folder for folder in folders if os.path.lexists(folder) and not _is_empty(Path(folder))]
        if there:
            raise UsageError(
                "file-exists",
                f"{there[0]} already exists",
                hint="use --force to overwrite it, "
                + (
                    "or change to another directory"
                    if there[0] in folders
                    else "or another name: -o NAME" + Path(made.file).suffix
                ),
            )
    for folder in folders:
        Path(folder).mkdir(exist_ok=True)
    replace_all({Path(path): text.encode("ascii") for path, text in texts.items()})
    return tuple(texts)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _check_program(option: str, path: Path, *, runs_here: bool) -> None:
    """The machine that runs it knows not what is installed here; HTCondor sends the file and lets it run."""
    try:
        with path.open("rb") as file:
            line = file.readline(256)
    except OSError as error:
        raise UsageError(
            *os_problem("read", path, error), hint=f"pass a program in this directory: {option} train.sh"
        ) from error
    if line.startswith(b"#!") and line.rstrip(b"\n").endswith(b"\r"):
        raise UsageError(
            "program-line-endings",
            f"{path} has Windows line endings, so its interpreter is not found",
            hint=f"sed -i 's/\\r$//' {path}",
        )
    if not line.startswith((b"#!", b"\x7fELF")):
        raise UsageError(
            "program-no-interpreter",
            f"{path} does not name its interpreter",
            hint="start it with #!/bin/sh, #!/bin/bash or #!/usr/bin/env python3",
        )
    if runs_here and not os.access(path, os.X_OK):
        raise UsageError(
            "program-not-executable", f"{option} {path} is not executable", hint=f"chmod +x {path}"
        )


def _check_sif(path: Path, made: SubmitMade, progress: Progress) -> None:
    """That the file is the one that was verified. A folder that this machine does not see is passed over."""
    image, name = made.taken.form.image, path.name
    if not path.parent.is_dir():
        return
    if not path.is_file():
        into = "" if path.parent == Path() else f"  (in {path.parent})"
        raise UsageError("sif-missing", f"{path} does not exist", hint=f"{made.fetch}{into}")
    sha256 = hashlib.sha256()
    with path.open("rb") as file, progress.task(f"checking {name}", total=path.stat().st_size) as task:
        while data := file.read(_CHUNK):
            sha256.update(data)
            task.advance(len(data))
    if sha256.hexdigest() != image.sha256.removeprefix("sha256:"):
        raise UsageError("sif-mismatch", f"{path} is not the offered file", hint=f"rm {path}; {made.fetch}")
