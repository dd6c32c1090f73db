"""Writes a kit: the suite, what is asked of the image, a program that runs it, and the nonce to bring back.

DIR/run.py               python3 run.py [--runner docker|apptainer] [--image IMAGE] [--keep]
DIR/kit/*.py             what run.py loads: the standard library alone
DIR/suite/**.py          the suite, as its digest knows it
DIR/expectations.json    what the suite reads, with the nonce
DIR/kit.json             which image, by digest; how to start the suite, and until when
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from imagefactory.serialize import format_time
from imagefactory.errors import UsageError, os_problem
from imagefactory.gpu.platforms import machine_of
from imagefactory.oci.model import Image, Sif
from imagefactory.trees import remove_tree
from imagefactory.verify.kit.program import EXPECTATIONS, FORMAT, KIT
from imagefactory.verify.model import Subject
from imagefactory.verify.nonces import LIFETIME, AskedRun, Issued, NonceLedger
from imagefactory.verify.suite_files import digest_of, read_suite, write_suite

HERE = Path(__file__).parent / "kit"
PROGRAM = "run.py"
CARRIED = ("hardware.py", "program.py", "start.py", "trees.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class KitOrder:
    """A kit to make. `asked` is what the suite will read, with its nonce; `argv` the command in the image.

    `made` is what `subject` names, `waive` the checks that need not run, `timeout` seconds for the whole run.
    `reference` is where the image can be pulled (HOST/NAME@sha256:...), empty where it lies in no registry,
    `plain_http` says that its registry speaks no TLS. `sifs` are the digests of .sif files that this factory
    made of the image, which may stand for it where there is no network.
    """

    subject: Subject
    made: Image | Sif
    asked: Mapping[str, Any]
    argv: tuple[str, ...]
    waive: tuple[str, ...]
    timeout: float
    reference: str = ""
    plain_http: bool = False
    sifs: tuple[str, ...] = ()


def make_kit(folder: Path, order: KitOrder, ledger: NonceLedger, now: datetime) -> Issued:
    """Issues the nonce of `order.asked` and writes the kit into `folder`, new or empty.

    The folder appears whole or not at all. Raises UsageError where it holds something already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("kit-exists", f"{folder} already exists", hint="pass a new directory: --kit DIR")
    suite, level = digest_of(read_suite()), order.asked["level"]
    texts = {KIT: _text(format_kit(order, suite, now + LIFETIME)), EXPECTATIONS: _text(order.asked)}
    run = AskedRun(subject=order.subject, suite=suite, level=level, kit=digest_of(texts))
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_suite(beside, {**program_files(), **texts})
        issued = ledger.issue(order.asked["nonce"], run, now)
        beside.rename(folder)
    except OSError as error:
        raise UsageError(
            *os_problem("create", folder, error), hint="pass a new directory: --kit DIR"
        ) from error
    finally:
        remove_tree(beside)
    return issued


def program_files() -> dict[str, bytes]:
    """Return the files that every kit of this imagefactory has, by their paths in it."""
    return {
        PROGRAM: (HERE / PROGRAM).read_bytes(),
        **{f"kit/{name}": (HERE / name).read_bytes() for name in CARRIED},
        **{f"suite/{name}": data for name, data in read_suite().items()},
    }


def program_sum() -> str:
    """Return the sha256 of the lines that `sha256sum` prints of a kit's program files, sorted by path.

    A machine that knows it runs no other program, whoever could write to the kit on its way.
    """
    lines = (f"{sha256(data).hexdigest()}  ./{path}\n" for path, data in sorted(program_files().items()))
    return sha256("".join(lines).encode()).hexdigest()


def format_kit(order: KitOrder, suite: str, expires: datetime) -> dict[str, Any]:
    """kit.json. Pure."""
    layers = order.made.layers if isinstance(order.made, Image) else ()
    return {
        "format": FORMAT,
        "nonce": order.asked["nonce"],
        "subject": asdict(order.subject),
        "diff_ids": [layer.diff_id for layer in layers],
        "machine": machine_of(order.made.architecture) if isinstance(order.made, Image) else "",
        "size": order.made.size if isinstance(order.made, Image) else order.made.file.size,
        "reference": order.reference,
        "sif": isinstance(order.made, Sif),
        "sifs": list(order.sifs),
        "plain_http": order.plain_http,
        "suite": suite,
        "level": order.asked["level"],
        "capability": order.asked["capability"],
        "waive": list(order.waive),
        "argv": list(order.argv),
        "timeout": order.timeout,
        "expires": format_time(expires.replace(microsecond=0)),
    }


def _text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
