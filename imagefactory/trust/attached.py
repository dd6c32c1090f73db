"""Write, read and repair the signed statements that are attached to images.

A statement is an OCI artifact: its only layer is the envelope, its subject is the manifest of a platform.
Registries without the referrers API keep the list of statements as a tag, and two writers at the same time
can overwrite it. So the store's journal records every statement before imagefactory attaches it to a
registry, only one process writes at a time, and `repair_referrers` restores entries that a list has lost.

    <store>/journal/lock                            locked by the process that attaches or moves tags
    <store>/journal/<host>/<repository>.jsonl       one row per statement, appended before the upload
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagefactory.errors import ImagefactoryError, NoImageError, RegistryError, StatementError, StoreError
from imagefactory.fs import explain_full_disk, remove_inside, replacing
from imagefactory.oci.candidates import (
    BUNDLE_TYPE,
    ENVELOPE_TYPE,
    REVOCATION_TYPE,
    STATEMENT_TYPES,
    VERDICT_TYPE,
)
from imagefactory.oci.graph import (
    EMPTY,
    EMPTY_BLOB,
    LocalArtifact,
    Manifest,
    StoreRepository,
    artifact_of,
    check_unambiguous,
    choose_platform,
    parse_parts,
    read_manifest,
)
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import (
    INDEX_TYPES,
    MALFORMED,
    Descriptor,
    artifact_type,
    canonical_json,
    digest_of,
    format_descriptor,
    images_of,
    parse_descriptor,
)
from imagefactory.oci.sif import is_sif_manifest
from imagefactory.oci.store import DIGEST
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.trust.audit import append_lines
from imagefactory.trust.envelope import LARGEST, format_bundle, parse_bundle, parse_envelope, predicate_type
from imagefactory.trust.verdict import VERDICT
from imagefactory.verify.report import VerifiedImage

CERTIFICATE_FAULT = "no key signed it, only a certificate, which imagefactory does not check"
_PREDICATE = "dev.sigstore.bundle.predicateType"

MOST = 2000  # statements about one image
MAX_REJECTED = 4  # failed uploads in a row before the rest are skipped; each was retried
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedStatement:
    """A signed statement to attach.

    `kind` is one of STATEMENT_TYPES. `subject` describes the manifest that the statement is about. `envelope`
    is the DSSE envelope. The statement can be deleted at `until`; None means never.
    """

    kind: str
    subject: Descriptor
    envelope: bytes
    until: datetime | None = None

    @property
    def artifact(self) -> LocalArtifact:
        """Return the manifest and the blobs.

        Equal statements give equal bytes, so attaching twice adds nothing.
        """
        bundle = self.kind == BUNDLE_TYPE
        data = format_bundle(self.envelope) if bundle else self.envelope
        media_type = BUNDLE_TYPE if bundle else ENVELOPE_TYPE
        layer = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        subject = Descriptor(
            media_type=self.subject.media_type, digest=self.subject.digest, size=self.subject.size
        )
        annotations = bundle_annotations(predicate_type(self.envelope)) if bundle else None
        manifest = artifact_of(self.kind, subject, (layer,), annotations)
        return LocalArtifact(manifest=manifest, blobs=((EMPTY_BLOB, EMPTY), (layer, data)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedStatement:
    """A statement in a store.

    `digest` is the digest of its artifact. `fault` is the reason if `envelope` is empty, or unsigned because
    it is from a bundle with a certificate.
    """

    digest: str
    kind: str
    envelope: bytes
    fault: str = ""


def bundle_annotations(predicate: str) -> dict[str, str]:
    """Return the annotations of a bundle's artifact, by which cosign and policies select it."""
    return {"dev.sigstore.bundle.content": "dsse-envelope", _PREDICATE: predicate}


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRows:
    """The rows in the journal of a repository. `damaged` counts incomplete lines."""

    statements: tuple[SignedStatement, ...]
    damaged: int


class AttachJournal:
    """The journal of the store in `path`: statements attached to registries. Methods may raise StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path / "journal"

    @contextmanager
    def alone(self, progress: Progress) -> Iterator[None]:
        """Lock the journal for this process, which may then attach statements and move tags.

        Wait for other processes.

        The kernel releases the lock when a process dies.
        """
        with explain_full_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.note("waiting for another promotion to finish ...")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def append(self, repository: StoreRepository, *statements: SignedStatement) -> None:
        """Append a row for each statement and flush the file to the disk.

        The caller must be inside `alone`.
        """
        path = self._file(repository)
        with explain_full_disk(self.path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                append_lines(file, map(format_row, statements))

    def read(self, place: StoreRepository) -> JournalRows:
        """Return every statement that this store attached to `place`, without duplicates."""
        return self._read(self._file(place))

    def read_all(self) -> tuple[SignedStatement, ...]:
        """Return every statement that this store attached to any registry."""
        return tuple(statement for path in self._files() for statement in self._read(path).statements)

    def damaged(self) -> tuple[tuple[Path, int], ...]:
        """Return the files with unreadable lines, and the number of such lines."""
        return tuple((path, count) for path in self._files() if (count := self._read(path).damaged))

    def _read(self, path: Path) -> JournalRows:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return JournalRows(statements=(), damaged=0)
        statements, damaged = {}, 0
        for line in filter(None, lines):
            try:
                statement = parse_row(line)
            except MALFORMED:
                damaged += 1
                continue
            statements[statement.artifact.manifest.descriptor.digest] = statement
        return JournalRows(statements=tuple(statements.values()), damaged=damaged)

    def keep(self, repository: StoreRepository, statements: Iterable[SignedStatement]) -> None:
        """Replace the journal of `repository` with these statements. The caller must be inside `alone`."""
        path = self._file(repository)
        rows = b"".join(format_row(statement) + b"\n" for statement in statements)
        if not rows:
            remove_inside(self.path, path)
            return
        with explain_full_disk(self.path), replacing(path, durable=True) as file:
            file.write(rows)

    def places(self) -> tuple[tuple[str, str], ...]:
        """Return the host and the repository of each journal file."""
        names = (path.relative_to(self.path).with_suffix("").as_posix() for path in self._files())
        return tuple(sorted((host, repository) for host, _, repository in (n.partition("/") for n in names)))

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("*/**/*.jsonl"))

    def _file(self, repository: StoreRepository) -> Path:
        return self.path / repository.store.name / f"{repository.repository}.jsonl"


def format_row(statement: SignedStatement) -> bytes:
    """Return a line of the journal without its line end."""
    return canonical_json(
        {
            "format": FORMAT,
            "kind": statement.kind,
            "subject": format_descriptor(statement.subject),
            "envelope": base64.b64encode(statement.envelope).decode(),
            "until": statement.until.astimezone(UTC).isoformat() if statement.until else None,
        }
    )


def parse_row(line: bytes) -> SignedStatement:
    """Parse a line of the journal.

    Raises ValueError, KeyError or TypeError for a corrupt line, StoreError for one of a newer version.
    """
    row = json.loads(line)
    if row["format"] != FORMAT:
        raise StoreError(
            "journal-too-new",
            f"the journal has a row of format {row['format']!r}, this version reads format {FORMAT}",
            hint="use the version of imagefactory that wrote it, or a newer one",
        )
    return SignedStatement(
        kind=str(row["kind"]),
        subject=parse_descriptor(row["subject"]),
        envelope=base64.b64decode(row["envelope"], validate=True),
        until=datetime.fromisoformat(row["until"]) if row["until"] else None,
    )


def attach(place: StoreRepository, statement: SignedStatement, journal: AttachJournal | None = None) -> str:
    """Attach a statement to its subject and return the digest of the artifact.

    Repeating the call changes nothing.

    `journal` is the journal of this machine's store, required if `place` is a registry. The caller must be
    inside `alone` of the journal, or inside `in_use` of a store on disk. Raises StoreError or RegistryError,
    also if `place` does not have the subject.
    """
    if place.store.manifest(place.repository, statement.subject.digest) is None:
        raise RegistryError(
            "subject-not-in-registry",
            f"{place} does not have the image {statement.subject.digest}",
            hint="push the image to that registry first: imagefactory push",
        )
    if journal:
        journal.append(place, statement)
    return put_statement(place, statement)


def put_statement(repository: StoreRepository, statement: SignedStatement) -> str:
    """Attach a statement like `attach`, but allow that the store does not have the subject."""
    artifact = statement.artifact
    for blob, data in artifact.blobs:
        repository.store.write(repository.repository, blob, lambda offset, data=data: iter((data[offset:],)))  # type: ignore[misc]
    manifest = artifact.manifest
    put = repository.store.put_manifest(repository.repository, manifest.data, manifest.descriptor.media_type)
    if put.digest != manifest.descriptor.digest:
        raise RegistryError(
            "registry-changed-digest",
            f"{repository}: imagefactory pushed {manifest.descriptor.digest}, but the registry stored "
            f"{put.digest}",
            hint="use a registry that stores manifests unchanged: push to another HOST/PATH",
        )
    return put.digest


def put_all(
    repository: StoreRepository, statements: Sequence[SignedStatement], *, workers: int
) -> tuple[ImagefactoryError | None, ...]:
    """Attach statements like `put_statement` with `workers` threads.

    Return the error of each statement, or None.

    After MAX_REJECTED errors in a row, the remaining statements are skipped and get the last error.
    """
    refused: list[ImagefactoryError] = []

    def put(statement: SignedStatement) -> ImagefactoryError | None:
        known = tuple(refused)
        if len(known) >= MAX_REJECTED:
            return known[-1]
        try:
            put_statement(repository, statement)
        except ImagefactoryError as error:
            refused.append(error)
            return error
        refused.clear()
        return None

    if workers == 1:
        return tuple(map(put, statements))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="statements")
    try:
        faults = tuple(pool.map(put, statements))
    except BaseException as error:
        # Ctrl-C does not wait for a registry that hangs inside a request.
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()
    return faults


def read_statements(repository: StoreRepository, subject: str, kind: str) -> tuple[AttachedStatement, ...]:
    """Return the statements of type `kind` about the manifest `subject`, sorted by digest, not verified.

    A verdict in a Sigstore bundle counts like its own artifact, and once if there are both.

    If there are more than MOST verdicts, only the last ones in the list are read, which are the newest in
    most registries. An extra row reports this. More than MOST revocations raise RegistryError, because a
    revocation that is not read would have no effect.
    """
    kinds = (kind, BUNDLE_TYPE) if kind == VERDICT_TYPE else (kind,)
    referrers = repository.store.referrers(repository.repository, subject, *kinds)
    digests = tuple(dict.fromkeys(referrer.digest for referrer in referrers))
    excess = len(digests) - MOST
    if excess > 0 and kind == REVOCATION_TYPE:
        raise RegistryError(
            "revocations-too-many",
            f"{repository} has {len(digests)} revocations of {subject}, the limit is {MOST}",
            hint="delete the revocations that you did not push, and limit who can push there",
        )
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="statements") as pool:
        read = pool.map(lambda digest: _read_statement(repository, digest, kind), sorted(digests[-MOST:]))
        every = [statement for statement in read if statement is not None]
    by_digest = {statement.digest: statement for statement in every}
    statements = tuple(by_digest[digest] for digest in sorted(by_digest))
    if excess <= 0:
        return statements
    fault = f"{excess} more that {repository} lists first were not read: the list has more than {MOST}"
    return (*statements, AttachedStatement(digest="", kind=kind, envelope=b"", fault=fault))


def read_verdicts(repository: StoreRepository, subject: str) -> tuple[AttachedStatement, ...]:
    """Return the verdicts about the manifest `subject`, sorted by the digests of their artifacts, not
    verified.
    """
    return read_statements(repository, subject, VERDICT_TYPE)


def read_revocations(repository: StoreRepository, subject: str) -> tuple[AttachedStatement, ...]:
    """Return the revocations about the manifest `subject`, not verified."""
    return read_statements(repository, subject, REVOCATION_TYPE)


def _read_statement(repository: StoreRepository, digest: str, kind: str) -> AttachedStatement | None:
    there = repository.store.manifest(repository.repository, digest)
    if there is None:
        return None  # deleted in the meantime
    try:
        value = json.loads(there[1])
        bundle = kind == VERDICT_TYPE and artifact_type(value) == BUNDLE_TYPE
        if bundle and dict(value.get("annotations") or {}).get(_PREDICATE) != VERDICT:
            return None  # a signature or another statement
        if artifact_type(value) != kind and not bundle:
            raise ValueError(f"its type is {artifact_type(value)[:80]!r}")
        (layer,) = map(parse_descriptor, value["layers"])
        if not DIGEST.fullmatch(layer.digest) or not 0 < layer.size <= LARGEST:
            raise ValueError(f"its envelope has {layer.size} bytes, the limit is {LARGEST}")
    except MALFORMED as error:
        fault = f"not an artifact of imagefactory: {error}"
        return AttachedStatement(digest=digest, kind=kind, envelope=b"", fault=fault)
    if not repository.store.has(repository.repository, layer):
        fault = "its envelope is missing there"
        return AttachedStatement(digest=digest, kind=kind, envelope=b"", fault=fault)
    data = b"".join(repository.store.read(repository.repository, layer))
    if bundle:
        try:
            data = parse_bundle(data, "a bundle")
            if not parse_envelope(data, "a bundle").signature:
                return AttachedStatement(digest=digest, kind=kind, envelope=data, fault=CERTIFICATE_FAULT)
            subject = parse_descriptor(value["subject"])
        except (*MALFORMED, StatementError) as error:
            return AttachedStatement(digest=digest, kind=kind, envelope=b"", fault=str(error))
        # The name of the verdict is that of its own artifact, by which it can be revoked.
        statement = SignedStatement(kind=kind, subject=subject, envelope=data)
        digest = statement.artifact.manifest.descriptor.digest
    return AttachedStatement(digest=digest, kind=kind, envelope=data)


# --- Repair: a registry lists again every statement about its images that this store knows
# Registries without the referrers API keep lists that two writers at once can overwrite: the artifact then
# exists but is not listed. The journal and the store on disk know what was attached.

TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """The result of repairing the lists of a registry.

    `listed` counts the statements that were in a list. `repaired` has the digests of artifacts that were
    added again. `gone` counts statements about deleted images, `expired` those that are no longer needed;
    both are removed from the journal. `damaged` counts unreadable lines of the journal.
    """

    place: str
    listed: int
    repaired: tuple[str, ...]
    gone: int
    expired: int
    damaged: int


def repair_referrers(
    repository: StoreRepository, journal: AttachJournal, local: Sequence[SignedStatement], now: datetime
) -> RepairResult:
    """Add every statement that is in the journal or in `local` to the lists of a registry, if it is missing
    there.

    `local` are the statements of the store on disk (`stored_statements`). The caller must be inside `alone`.
    Raises RegistryError if other writers keep overwriting the lists.
    """
    rows = journal.read(repository)
    expired = [statement for statement in rows.statements if statement.until and statement.until <= now]
    current = [statement for statement in rows.statements if statement not in expired]
    by_subject: dict[str, dict[str, SignedStatement]] = {}
    for statement in (*current, *(other for other in local if not (other.until and other.until <= now))):
        digest = statement.artifact.manifest.descriptor.digest
        by_subject.setdefault(statement.subject.digest, {})[digest] = statement
    there = {subject for subject in by_subject if repository.store.manifest(repository.repository, subject)}
    repaired = [
        digest for subject in sorted(there) for digest in _relist(repository, subject, by_subject[subject])
    ]
    live = [statement for statement in current if statement.subject.digest in there]
    if len(live) < len(rows.statements) or rows.damaged:
        journal.keep(repository, live)
    return RepairResult(
        place=str(repository),
        listed=sum(len(by_subject[subject]) for subject in there) - len(repaired),
        repaired=tuple(repaired),
        gone=len(current) - len(live),
        expired=len(expired),
        damaged=rows.damaged,
    )


def _relist(repository: StoreRepository, subject: str, statements: dict[str, SignedStatement]) -> list[str]:
    """List missing artifacts again and return their digests."""
    first: list[str] = []
    for _ in range(TRIES):
        listed = {row.digest for row in repository.store.referrers(repository.repository, subject)}
        missing = [digest for digest in statements if digest not in listed]
        if not missing:
            return first
        first = first or missing
        for digest in missing:
            put_statement(repository, statements[digest])
    raise RegistryError(
        "referrers-contended",
        f"{repository}: other writers keep overwriting the list of {subject}",
        hint="run it again when no other job pushes verdicts of this image",
    )


def stored_statements(layout: Layout) -> tuple[SignedStatement, ...]:
    """Return the statements in the store on disk. Corrupt ones are skipped."""
    store = LayoutStore(layout)
    rows = (row for subject in layout.subjects() for row in layout.referrers(subject))
    statements = [_read_known(store, descriptor) for descriptor, kind in rows if kind in STATEMENT_TYPES]
    return tuple(statement for statement in statements if statement is not None)


def _read_known(store: LayoutStore, descriptor: Descriptor) -> SignedStatement | None:
    there = store.layout.manifest(descriptor.digest)
    if there is None:
        return None
    try:
        value: dict[str, Any] = json.loads(there[1])
        (layer,) = map(parse_descriptor, value["layers"])
        subject = parse_descriptor(value["subject"])
        data = b"".join(store.read("", layer))
        kind = artifact_type(value)
        envelope = parse_bundle(data, "a bundle") if kind == BUNDLE_TYPE else data
        statement = SignedStatement(kind=kind, subject=subject, envelope=envelope)
        digest = statement.artifact.manifest.descriptor.digest  # not that of bundles by other tools
    except (*MALFORMED, StoreError, StatementError):
        return None
    return statement if digest == descriptor.digest else None


def read_subject(repository: StoreRepository, digest: str, platform: str = "") -> VerifiedImage:
    """Return the subject of verdicts on an image: its .sif file, or its manifest for `platform` with its
    config.

    Without a platform, the only one is used, or else linux/amd64. Raises RegistryError or StoreError if
    `repository` does not have the image. Raises NoImageError if it is not an image, or if it is an index in
    which other tools may choose another image.
    """
    root = read_manifest(repository, digest)
    with _image_errors(root):
        check_unambiguous(root)
        chosen = choose_platform(root, platform).digest
    manifest = read_manifest(repository, chosen)
    if manifest.descriptor.media_type in INDEX_TYPES:  # one image and its attestations
        with _image_errors(root):
            check_unambiguous(manifest)
            entries = json.loads(manifest.data)["manifests"]
            (image,) = images_of(entries)
        manifest = read_manifest(repository, str(image["digest"]))
    with _image_errors(root):
        blobs = parse_parts(manifest)[1]
        config = blobs[1] if is_sif_manifest(json.loads(manifest.data)) else blobs[0]
    return VerifiedImage(
        target="", index=root.descriptor.digest, manifest=manifest.descriptor.digest, config=config.digest
    )


@contextmanager
def _image_errors(root: Manifest) -> Iterator[None]:
    """Convert parse errors of complete data into NoImageError."""
    try:
        yield
    except RegistryError as error:
        raise NoImageError("image-malformed", error.message, hint=error.hint) from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise NoImageError(
            "image-malformed", f"{root.descriptor.digest} is not a valid image", hint="push the image again"
        ) from error
