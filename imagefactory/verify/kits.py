"""Write kits, and check their results with the same rules as runs on this machine.

A kit was on another machine. Its request is trusted because the nonce store has its digest, under the nonce.
Its result is trusted only because the owner of a key signs it: then the verdict has the evidence `kit`, or
`actions` if the GitHub Actions run that ran the kit also collects it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from imagefactory.errors import CheckFailedError, NoGpuError, StatementError, UsageError, os_problem
from imagefactory.gpu.capability import machine_of
from imagefactory.model import Outcome
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.serialize import (
    Choices,
    Constant,
    ObjectSchema,
    Pattern,
    TupleAsObject,
    format_time,
    invalid_value_error,
    parse_json,
    printable_value,
)
from imagefactory.trees import TreeLimits, read_file, remove_tree, walk_tree
from imagefactory.verify.evidence import parse_evidence
from imagefactory.verify.kit.program import EVIDENCE, EXPECTATIONS, FORMAT, KIT, RESULT, RUN, SIGNED
from imagefactory.verify.kit.start import REPORT, RUNNERS
from imagefactory.verify.nonces import (
    CI_RUN,
    LIFETIME,
    NONCE,
    IssuedNonce,
    NonceError,
    NonceStore,
    NonceSubject,
    check_open,
    check_run,
)
from imagefactory.verify.outcome import GpuRun, RawResult, outcome_of
from imagefactory.verify.report import (
    EVIDENCE_ACTIONS,
    EVIDENCE_KIT,
    GpuReport,
    VerifiedImage,
    completed_of,
    end_of,
)
from imagefactory.verify.suite_files import digest_of, read_suite, suite_digest, write_suite

LARGEST = 1 << 20
MOST_FILES = 500
SUITE_LIMITS = TreeLimits(entries=5000, depth=20)
LONGEST_RUN = 86400.0
STOPPED = (Outcome.NO_GPU, Outcome.WRONG_GPU, Outcome.PULL_FAILED, Outcome.INFRASTRUCTURE)
"""Outcomes of a kit that started no process in the image.

They cannot be signed, and the nonce is not spent.
"""

_ACTIONS = (*CI_RUN, "GITHUB_JOB", "RUNNER_NAME")
_RUN = ObjectSchema(
    format=Annotated[int, Constant(FORMAT)],
    nonce=Annotated[str, Pattern(NONCE)],
    suite=str,
    runner=Annotated[str, Choices(("", *RUNNERS))],
    actions=Annotated[tuple[str, str, str, str, str], TupleAsObject(_ACTIONS)] | None,
    outcome=Annotated[str, Choices(("", *STOPPED))],
    reason=str,
    started=datetime,
    ended=datetime,
    **end_of(LONGEST_RUN),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedKit:
    """The files of a returned kit as bytes. `evidence` and `report` are None if missing."""

    kit: bytes
    expectations: bytes
    suite: str
    run: bytes
    evidence: bytes | None
    report: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitReport:
    """The result of a kit. The nonce is spent on `run`. `reference` is the address of the image."""

    report: GpuReport
    run: NonceSubject
    reference: str


def collect_kit(
    directory: Path,
    nonces: NonceStore,
    now: datetime,
    environ: Mapping[str, str],
    *,
    again: bool = False,
) -> KitReport:
    """Check the result in the kit in `directory`, without signing it or spending its nonce.

    `environ` identifies the GitHub Actions run whose artifacts these are. With `again`, the nonce may be
    spent or expired.

    Raises UsageError for a directory that is not a kit, or has no result. Raises NonceError for a nonce that
    cannot be spent on the result (unknown, replayed, expired, another suite, a changed kit). Raises
    NoGpuError and CheckFailedError if no process was started in the image, StatementError for a result that
    kits do not write.
    """
    files, location = read_returned_kit(directory), str(directory)
    nonce = read_nonce(directory)
    known = nonces.look(nonce)
    texts = {KIT: files.kit, EXPECTATIONS: files.expectations}
    run = replace(known.run, suite=suite_digest(), kit=digest_of(texts), pool="")
    if not again:
        check_open(known, now)
    check_run(known, run)
    if files.suite != run.suite:
        raise NonceError(
            "nonce-other-suite",
            f"the suite in {directory} changed after the kit was created",
            hint="create a new kit",
        )
    # From here on kit.json and expectations.json are as the owner of the nonce store wrote them.
    kit = json.loads(files.kit)
    actions = parse_run(files.run, f"{location}/{RESULT}/{RUN}")["actions"] or {}
    kind = EVIDENCE_ACTIONS if _same_run(actions, environ) else EVIDENCE_KIT
    report = verify_returned_kit(files, kit, location, kind)
    return KitReport(report=report, run=run, reference=kit["reference"])


def read_nonce(directory: Path) -> str:
    """Return the nonce in kit.json, which is not trusted yet."""
    data = _read(directory, KIT)
    if data is None:
        raise _not_a_kit(directory)
    try:
        kit: Any = parse_json(data)
        return str(kit["nonce"])
    except (ValueError, KeyError, TypeError) as error:
        raise _not_a_kit(directory, f": {KIT} is not valid") from error


def _not_a_kit(directory: Path, reason: str = "") -> UsageError:
    hint = "pass the directory that verify --kit wrote"
    return UsageError("kit-invalid", f"{directory} is not a kit{reason}", hint=hint)


def verify_returned_kit(files: ReturnedKit, kit: Mapping[str, Any], location: str, kind: str) -> GpuReport:
    """Return the report in a result of the trusted `kit`, with evidence of type `kind`. Pure.

    Raises like `collect_kit`.
    """
    at = f"{location}/{RESULT}/{RUN}"
    facts = parse_run(files.run, at)
    if facts["nonce"] != kit["nonce"]:
        raise invalid_value_error(f"{at}: nonce", "the result is from another kit")
    if facts["suite"] != kit["suite"]:
        raise invalid_value_error(f"{at}: suite", "the result is from another suite")
    if facts["outcome"]:
        message = f"{facts['outcome']}: {facts['reason']}"
        hint = "correct the problem, or run the same kit on another machine"
        if facts["outcome"] == Outcome.NO_GPU:
            raise NoGpuError("gpu-not-visible", message, hint=hint)
        raise CheckFailedError("kit-not-started", message, hint=hint)
    if files.evidence is None:
        problem_text = "it is missing, so there is no evidence of a GPU"
        raise invalid_value_error(f"{location}/{RESULT}/{EVIDENCE}", problem_text)
    evidence = parse_evidence(_json(files.evidence, f"{location}/{EVIDENCE}"), kind, f"{location}/{EVIDENCE}")
    expectations = json.loads(files.expectations)
    judged = GpuRun(
        subject=VerifiedImage(**kit["subject"]),
        suite=kit["suite"],
        asked=expectations,
        waive=tuple(kit["waive"]),
        runner=facts["runner"],
        # the job of GitHub Actions that ran the kit, by its own statement
        hardware=replace(evidence, notes=(*evidence.notes, *sorted((facts["actions"] or {}).items()))),
        started=facts["started"],
        ended=facts["ended"],
    )
    missing = "" if files.report is not None else "it wrote no report that can be read"
    brought = RawResult(report=files.report or b"", fault=missing, completed=facts["completed"])
    return outcome_of(judged, brought)


def _same_run(actions: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return whether the kit ran in the same attempt of the GitHub run that `environ` identifies.

    Only that run can collect with this evidence. Elsewhere, anyone could write its identifiers.
    """
    here = environ.get("GITHUB_ACTIONS") == "true"
    return here and all(environ.get(name) and actions.get(name) == environ[name] for name in CI_RUN)


def parse_run(data: bytes, location: str) -> Mapping[str, Any]:
    """Return run.json with all values checked. `completed` is how the suite ended. Raises StatementError."""
    row = _RUN.parse(_json(data, location), location)
    if not row["runner"] and not row["outcome"]:
        raise invalid_value_error(location, "it has neither a runner nor an outcome")
    actions = row["actions"] and dict(zip(_ACTIONS, row["actions"], strict=True))
    return {**row, "actions": actions, "completed": completed_of(row)}


def read_returned_kit(directory: Path) -> ReturnedKit:
    """Read a kit.

    Raises UsageError if it is not a kit or has no result. Links and large files are rejected.
    """
    kit, expectations = _read(directory, KIT), _read(directory, EXPECTATIONS)
    if kit is None or expectations is None:
        raise _not_a_kit(directory)
    run = _read(directory, f"{RESULT}/{RUN}")
    if run is None:
        raise UsageError(
            "kit-without-result",
            f"{directory} has no result yet",
            hint=f"run it on the machine with the GPU: python3 {directory}/run.py",
        )
    return ReturnedKit(
        kit=kit,
        expectations=expectations,
        suite=_suite(directory / "suite"),
        run=run,
        evidence=_read(directory, f"{RESULT}/{EVIDENCE}"),
        report=_read(directory, f"{RESULT}/{REPORT}"),
    )


def _suite(directory: Path) -> str:
    """Return the digest of a suite, "" for other directories: a link may lead to a whole disk."""
    try:
        walk = walk_tree(directory, lambda _: None, limits=SUITE_LIMITS)
        names = [name for name, _ in walk if name.endswith(".py")]
    except OSError:
        return ""
    if not 0 < len(names) <= MOST_FILES or not all(name.isascii() for name in names):
        return ""
    return digest_of({name: _read(directory, name) or b"" for name in names})


def _read(directory: Path, path: str) -> bytes | None:
    """Return the bytes of a file, None if missing. Raises UsageError for a link, a FIFO or a large file."""
    try:
        return read_file(directory, path, LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            *os_problem("read", printable_value(str(directory / path)), error),
            hint="a kit has only regular files: copy it back unchanged",
        ) from error


def _json(data: bytes, location: str) -> object:
    try:
        return parse_json(data)
    except ValueError as error:
        raise StatementError(
            "kit-result-invalid", f"{printable_value(location)} is not JSON", hint="run the kit again"
        ) from error


# --- Writing a kit
# DIR/run.py               python3 run.py [--runner docker|podman|apptainer] [--image IMAGE] [--keep]
# DIR/kit/*.py             modules of run.py: only the standard library
# DIR/suite/**.py          the suite's files, the same as in its digest
# DIR/expectations.json    the suite's input, with the nonce
# DIR/kit.json             the image's digest, the command that starts the suite, and the expiry
# DIR/signed.json          only in a kit for a node: numbers of the image's verdicts


KIT_PROGRAMS = Path(__file__).parent / "kit"
PROGRAM = "run.py"
CARRIED = ("forward.py", "hardware.py", "program.py", "start.py", "trees.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class KitRequest:
    """A kit to write. `asked` is the input of the suite with its nonce, `argv` the command in the image.

    `made` is the artifact of `subject`, `waive` the checks that need not run, `timeout` the time limit of the
    run in seconds. `reference` is the address of the image (HOST/NAME@sha256:...), empty if it is in no
    registry, and `plain_http` means that this registry has no TLS. `sifs` are the digests of .sif files that
    this project built from the image. Without a network, such a file can be used in place of the image.
    `signed` is signed.json of a kit for a node (kit/program.py), None for other kits.
    """

    subject: VerifiedImage
    made: Image | SifArtifact
    asked: Mapping[str, Any]
    argv: tuple[str, ...]
    waive: tuple[str, ...]
    timeout: float
    reference: str = ""
    plain_http: bool = False
    sifs: tuple[str, ...] = ()
    signed: Mapping[str, Any] | None = None


def make_kit(directory: Path, order: KitRequest, nonces: NonceStore, now: datetime) -> IssuedNonce:
    """Issue the nonce in `order.asked` and write the kit into `directory` (new or empty) atomically.

    Raises UsageError if the directory is not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(
            "kit-exists",
            f"{directory} already exists and is not empty",
            hint="pass a new directory: --kit DIR",
        )
    suite, level = digest_of(read_suite()), order.asked["level"]
    texts = {KIT: _text(format_kit(order, suite, now + LIFETIME)), EXPECTATIONS: _text(order.asked)}
    run = NonceSubject(subject=order.subject, suite=suite, level=level, kit=digest_of(texts))
    if order.signed is not None:
        texts[SIGNED] = _text(order.signed)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write_suite(temporary, {**program_files(), **texts})
        issued = nonces.issue(order.asked["nonce"], run, now)
        temporary.rename(directory)
    except OSError as error:
        hint = "pass a new directory: --kit DIR"
        raise UsageError(*os_problem("create", directory, error), hint=hint) from error
    finally:
        remove_tree(temporary)
    return issued


def program_files() -> dict[str, bytes]:
    """Return the program files of kits from this imagefactory, by their paths in a kit."""
    return {
        PROGRAM: (KIT_PROGRAMS / PROGRAM).read_bytes(),
        **{f"kit/{name}": (KIT_PROGRAMS / name).read_bytes() for name in CARRIED},
        **{f"suite/{name}": data for name, data in read_suite().items()},
    }


def program_checksum() -> str:
    """Return the sha256 of the `sha256sum` output for the program files of a kit, sorted by path.

    A machine that checks it runs no other program, even if someone could write to the kit in transit.
    """
    lines = (f"{sha256(data).hexdigest()}  ./{path}\n" for path, data in sorted(program_files().items()))
    return sha256("".join(lines).encode()).hexdigest()


def format_kit(order: KitRequest, suite: str, expires: datetime) -> dict[str, Any]:
    """Return kit.json. Pure."""
    image = order.made if isinstance(order.made, Image) else None
    return {
        "format": FORMAT,
        "nonce": order.asked["nonce"],
        "subject": asdict(order.subject),
        "diff_ids": [layer.diff_id for layer in image.layers] if image else [],
        "machine": machine_of(image.architecture) if image else "",
        "size": order.made.size if isinstance(order.made, Image) else order.made.file.size,
        "reference": order.reference,
        "sif": isinstance(order.made, SifArtifact),
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
