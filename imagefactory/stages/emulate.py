"""A command in an image that has no GPU, and sees one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from imagefactory import emulate
from imagefactory.access import Access
from imagefactory.errors import UsageError
from imagefactory.files import replacing
from imagefactory.gpu.knowledge import DataSheet
from imagefactory.model import Mount, RunSpec
from imagefactory.oci.model import Image, Sif
from imagefactory.stages.verdicts import Judge
from imagefactory.submit.emulated import ESTIMATED, RECORDED, EmulatedRun, main_run, parse_emulated
from imagefactory.verdicts.model import Judged
from imagefactory.verdicts.recorded import COPIES, Recorded, find_recorded

SOURCE = Path(emulate.__file__).parent
PACKAGE, START = "imagefactory_emulate", "sitecustomize.py"
"""What the room is called inside, and the file of it that Python finds by itself."""
INSIDE, TOLD = "/imagefactory/emulate", "/imagefactory/emulated"
ASKED = "asked.json"
CONTEXT = 512 << 20
"""What CUDA and its libraries take of a GPU before the first tensor; by driver and GPU 300 to 700 MiB."""
KERNEL, LAUNCH = 2e-6, 5e-6
"""Seconds that the smallest kernel takes, and the program's for handing one to the driver."""
LONGEST, MOST = 1 << 20, 256
"""Bytes of what a process tells, and processes that are listened to."""


def recorded_profile(
    access: Access, made: Image | Sif, sheet: DataSheet, now: datetime, offered: Sequence[Judged] = ()
) -> Recorded | None:
    """What a verdict of this very image holds of such a GPU, of the store or `offered` by a catalogue; None
    without one that counts.
    """
    return find_recorded((*offered, *Judge(access, now).stored(made)), sheet.device)


@contextmanager
def emulating(
    sheet: DataSheet, count: int, spec: RunSpec, recorded: Recorded | None = None
) -> Iterator[tuple[RunSpec, Path]]:
    """The run as it sees `count` of such GPUs, and the folder in which its processes tell what they did.

    Times are those of `recorded`, without it those of the data sheet. Raises UsageError where real GPUs were
    asked for as well.
    """
    if spec.gpus:
        raise UsageError("--emulate is for a machine without a GPU, --nv for one with", hint="leave one out")
    with tempfile.TemporaryDirectory(prefix="imagefactory-emulate-") as name:
        folder = Path(name)
        shown, told = folder / "shown", folder / "told"
        (shown / PACKAGE).mkdir(parents=True)
        told.mkdir()
        for path in sorted(SOURCE.glob("*.py")):
            place = shown if path.name == START else shown / PACKAGE
            (place / path.name).write_bytes(path.read_bytes())
        (shown / ASKED).write_text(json.dumps(asked_of(sheet, count, recorded)), encoding="utf-8")
        for path in (shown, *shown.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        told.chmod(0o777)  # the image's user writes here, whoever that is on the host
        own = dict(spec.environment).get("PYTHONPATH", "")
        yield (
            replace(
                spec,
                environment=(
                    *((key, value) for key, value in spec.environment if key != "PYTHONPATH"),
                    ("IMAGEFACTORY_EMULATE", f"{INSIDE}/{ASKED}"),
                    ("PYTHONPATH", f"{INSIDE}:{own}" if own else INSIDE),
                ),
                mounts=(
                    *spec.mounts,
                    Mount(source=shown, target=INSIDE, bind=True),
                    Mount(source=told, target=TOLD, writable=True),
                ),
            ),
            told,
        )


def asked_of(sheet: DataSheet, count: int, recorded: Recorded | None = None) -> dict[str, object]:
    """What the program inside is told of its GPUs, as `emulate/start.py` reads it."""
    told = recorded or sheet
    return {
        "gpus": count,
        "folder": TOLD,
        "profile": {
            "name": sheet.name,
            "device": sheet.device,
            "capability": str(sheet.capability),
            "processors": told.processors,
            "memory": told.memory,
            "context": recorded.context if recorded else CONTEXT,
            "kernel": recorded.kernel if recorded else KERNEL,
            "launch": recorded.launch if recorded else LAUNCH,
            "curves": {**curves_of(sheet), **(recorded.curves if recorded else {})},
            "basis": RECORDED if recorded else ESTIMATED,
        },
    }


def curves_of(sheet: DataSheet) -> dict[str, tuple[tuple[float, float], ...]]:
    """What a data sheet lets one expect: of each what it does in a second."""
    rates = {
        "move": sheet.bandwidth,
        "peer": sheet.peer,
        **dict.fromkeys(COPIES, sheet.link),
        **{
            f"{what}-{kind}": rate
            for what in ("product", "convolution", "backward")
            for kind, rate in sheet.flops.items()
        },
    }
    return {name: ((rate, 1.0),) for name, rate in rates.items()}


def read_told(folder: Path) -> tuple[EmulatedRun, ...]:
    """What each process of the run told. Raises StatementError for what no process of ours writes."""
    told = (path for path in sorted(folder.glob("*.json")) if path.is_file() and not path.is_symlink())
    return tuple(parse_emulated(_read(path), path.name) for path in islice(told, MOST))


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(LONGEST).decode("utf-8", "replace")


def keep_told(folder: Path, runs: tuple[EmulatedRun, ...], output: Path) -> None:
    """Writes what the main process told to a file, for `submit --emulated`."""
    main = main_run(runs)
    texts = (_read(path) for path in sorted(folder.glob("*.json")))
    text = next((text for text in texts if main is not None and parse_emulated(text, "") == main), None)
    if text is None:
        raise UsageError("no GPU was used, so there is nothing to write", hint="leave --summary out")
    try:
        with replacing(output) as file:
            file.write(text.encode() + b"\n")
    except OSError as error:
        raise UsageError(f"--summary {output}: {error.strerror}", hint="name a file of yours") from error
