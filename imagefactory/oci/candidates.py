"""Candidates in a registry: their tags, the times of their pushes, and the contents of a repository.

A push writes `<version>-cu121-<12 hex of the digest>`, a tag that never moves. Only promotion moves the tags
that people use (`<version>-cu121`, `<version>-cu121-sm80`).

An image has no clock, and a registry does not report the time of a push. So a push attaches a record: an
artifact whose subject is the candidate, with the time as its annotation. Anyone who may push can attach one,
so a record counts only with a MAC by a key that pusher and reader share. The store knows its own pushes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from imagefactory.errors import RegistryError, UsageError
from imagefactory.model import Target
from imagefactory.oci.graph import (
    MOST_MANIFESTS,
    LocalArtifact,
    Manifest,
    StoreRepository,
    make_artifact,
    parse_parts,
    read_manifest,
)
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import CONFIG_TYPES, Descriptor, canonical_json
from imagefactory.oci.store import INVALID_HINT, TAG, Store
from imagefactory.oci.transfer import WORKERS

PUSHED_TYPE = "application/vnd.imagefactory.pushed.v1+json"
VERDICT_TYPE = "application/vnd.imagefactory.verdict.v1+json"
REVOCATION_TYPE = "application/vnd.imagefactory.revocation.v1+json"
APPROVAL_TYPE = "application/vnd.imagefactory.approval.v1+json"
TEST_RESULT_TYPE = "application/vnd.imagefactory.test-result.v1+json"
CYCLONEDX_TYPE = "application/vnd.cyclonedx+json"
SPDX_TYPE = "application/spdx+json"
PROVENANCE_TYPE = "application/vnd.in-toto.provenance+dsse"
"""The artifact type of an envelope in a store, from in-toto's attestation framework (spec v1, "Envelope")."""
PORTABLE_TYPE = "application/vnd.imagefactory.portable.v1+json"
MODELS_TYPE = "application/vnd.imagefactory.models.v1"
ENVELOPE_TYPE = "application/vnd.dsse.envelope.v1+json"
SOURCES_TYPE = "application/vnd.imagefactory.sources.v1"
"""The artifact type of the locked files of a target. Each layer is a file."""
SOURCES_LINK_TYPE = "application/vnd.imagefactory.sources-link.v1+json"
"""The artifact type of a referrer of an image that names the tag of its locked files."""
DEB_TYPE, FILE_TYPE = "application/vnd.debian.binary-package", "application/octet-stream"
"""The media types of layers with locked files: Debian packages, and all others."""
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
"""The artifact type of a Sigstore bundle, as cosign attaches it."""
STATEMENT_TYPES = (
    *(VERDICT_TYPE, REVOCATION_TYPE, APPROVAL_TYPE, TEST_RESULT_TYPE, PORTABLE_TYPE),
    BUNDLE_TYPE,
)
DELETED_WITH_IMAGE = (
    *(PUSHED_TYPE, VERDICT_TYPE, APPROVAL_TYPE, TEST_RESULT_TYPE),
    *(CYCLONEDX_TYPE, SPDX_TYPE, PROVENANCE_TYPE, PORTABLE_TYPE, MODELS_TYPE),
    *(BUNDLE_TYPE, SOURCES_LINK_TYPE),
)
"""Types of artifacts about a candidate that are deleted together with the candidate."""
CREATED = "org.opencontainers.image.created"
INPUTS_LABEL = "imagefactory.made-from"
"""Annotation of a record: the digest of all inputs of the image (publish.made_from)."""
RECORD_MAC = "imagefactory.mac"
"""Annotation of a record: the HMAC-SHA256 of the candidate's digest and the other two, in hex."""

CANDIDATE = re.compile(r"(?P<plain>.+)-(?P<hex>[0-9a-f]{12})(?P<suffix>\.sif)?")
CAPABILITY = re.compile(r"(?P<plain>.+)-(?:sm[0-9]{2,3}[a-z]?|gfx[0-9a-f]{3,5})")
SOURCES = re.compile(r"sources-[0-9a-f]{16}")
SOURCES_TAG = "imagefactory.sources"
"""Annotation of a link: the tag of the locked files."""
FALLBACK = re.compile(r"sha256-[0-9a-f]{64}")  # the referrers tag of a registry without the referrers API


# --- names ---------------------------------------------------------------------------------------


def plain_tag(target: Target) -> str:
    """Return the tag that people use: `2.3-cu121`."""
    return reference(target).partition(":")[2]


def candidate_tag(target: Target, digest: str, suffix: str = "") -> str:
    """Return `2.3-cu121-0123456789ab`: the tag names its content, so it never moves."""
    return f"{plain_tag(target)}-{digest.removeprefix('sha256:')[:12]}{suffix}"


def sources_tag(digests: Iterable[str]) -> str:
    """Return the tag of locked files, `sources-0123456789abcdef`, by the sha256 of each.

    A build computes it from its lock, in any later version of imagefactory too.
    """
    text = "".join(f"{digest}\n" for digest in sorted(set(digests)))
    return f"sources-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def tag_type(tag: str, plain: Collection[str]) -> str:
    """Return `target`, `capability`, `candidate`, `sources`, `referrers` or `other`.

    `plain` are the tags of the targets.
    """
    if tag in plain:
        return "target"
    for kind, pattern in (("capability", CAPABILITY), ("candidate", CANDIDATE)):
        match = pattern.fullmatch(tag)
        if match and match["plain"] in plain:
            return kind
    if SOURCES.fullmatch(tag):
        return "sources"
    return "referrers" if FALLBACK.fullmatch(tag) else "other"


def check_tag(tag: str, plain: Collection[str]) -> None:
    """Raise UsageError with the reason if a push must not set this further tag."""
    if not TAG.fullmatch(tag):
        raise UsageError(
            "option-invalid",
            f"'{tag}' is not a valid tag",
            hint="use letters, digits, '.', '_' and '-', at most 128 characters",
        )
    reason = {
        "target": "is the tag of a verified target: only promotion moves it",
        "capability": "is the tag of a GPU that verified it: only promotion moves it",
        "candidate": "is the tag of a candidate: push creates it from the digest",
        "sources": "is the tag of locked packages: push --with-sources creates it",
        "referrers": "is the tag in which a registry keeps referrers",
    }.get(tag_type(tag, plain))
    if reason:
        raise UsageError(
            "tag-reserved", f"--tag {tag}: '{tag}' {reason}", hint="choose another name, such as 'nightly'"
        )


# --- time of the push -----------------------------------------------------------------------------


def pushed_record(
    candidate: Descriptor, now: datetime, made_from: str = "", *, key: str = ""
) -> LocalArtifact:
    """Return the record of a push at `now`, to attach to the candidate. An empty `made_from` is omitted.

    Without a `key` the record has no MAC, and programs ignore it.
    """
    row = {CREATED: now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    if made_from:
        row[INPUTS_LABEL] = made_from
    if key:
        row[RECORD_MAC] = _mac(candidate.digest, row, key)
    return make_artifact(PUSHED_TYPE, candidate, row)


def read_records(repo: StoreRepository, digest: str, *, key: str = "") -> tuple[Mapping[str, str], ...]:
    """Return the annotations of a candidate's push records, with a `key` only those with its MAC."""
    records = repo.store.referrers(repo.repository, digest, PUSHED_TYPE)
    rows = (_annotations(repo, record) for record in records)
    return tuple(row for row in rows if not key or _has_mac(digest, row, key))


def _mac(candidate: str, row: Mapping[str, str], key: str) -> str:
    text = canonical_json(["pushed", candidate, row.get(CREATED), row.get(INPUTS_LABEL)])
    return hmac.new(key.encode(), text, "sha256").hexdigest()


def _has_mac(candidate: str, row: Mapping[str, str], key: str) -> bool:
    return hmac.compare_digest(str(row.get(RECORD_MAC, "")).encode(), _mac(candidate, row, key).encode())


def find_by_inputs(repo: StoreRepository, plain: str, made_from: str, key: str) -> Descriptor | None:
    """Return the newest candidate of a target (by its plain tag) with these inputs, or None.

    Only records with the MAC of `key` count; without a key there are none.
    """
    if not key:
        return None
    tags = [tag for tag in repo.store.tags(repo.repository) if _is_candidate(tag, plain)]

    def look(tag: str) -> tuple[datetime, str, Descriptor] | None:
        there = repo.store.manifest(repo.repository, tag)
        records = read_records(repo, there[0].digest, key=key) if there else ()
        pushed = read_pushed([row for row in records if row.get(INPUTS_LABEL) == made_from])
        return (pushed, tag, there[0]) if there and pushed else None

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="made") as pool:
        rows = [row for row in pool.map(look, tags) if row is not None]
    return max(rows, key=lambda row: row[:2])[2] if rows else None


def _is_candidate(tag: str, plain: str) -> bool:
    match = CANDIDATE.fullmatch(tag)
    return match is not None and match["plain"] == plain


def read_pushed(annotations: Sequence[Mapping[str, str]]) -> datetime | None:
    """Return the latest time in the records' annotations, None without a valid one."""
    times = []
    for row in annotations:
        try:
            time = datetime.fromisoformat(row.get(CREATED, ""))
        except ValueError:
            continue
        times.append(time if time.tzinfo else time.replace(tzinfo=UTC))
    return max(times, default=None)


# --- contents of a repository ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TagTarget:
    """A tag of a repository and the root that it points to.

    `parts` are the digests of the manifests below the root (an index's platforms), missing ones too. `names`
    are the 12 hex digits that a candidate with this content may have. `size` is the bytes of the blobs of
    existing manifests. `pushed` and `verdicts` are read only for candidates.
    """

    tag: str
    kind: str
    digest: str
    parts: tuple[str, ...]
    names: tuple[str, ...]
    size: int
    pushed: datetime | None = None
    verdicts: int = 0


def read_tagged(
    repo: StoreRepository,
    plain: Collection[str],
    count: Callable[[str], int] | None = None,
    *,
    records: bool = False,
) -> tuple[TagTarget, ...]:
    """Return the tags of a repository with their roots, without tags that only list referrers.

    With `records`, also the push times of candidates and the number of their valid verdicts, which `count`
    returns for the digest of a manifest. A tag that is deleted meanwhile is skipped. A tag whose platforms
    were deleted is included, so that it can be deleted.
    """
    tags = [tag for tag in repo.store.tags(repo.repository) if not FALLBACK.fullmatch(tag)]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="tags") as pool:
        counting = (count or _any_verdict(repo)) if records else None
        targets = pool.map(lambda tag: _read_tag(repo, tag, tag_type(tag, plain), counting), tags)
        return tuple(target for target in targets if target is not None)


def _any_verdict(repo: StoreRepository) -> Callable[[str], int]:
    return lambda digest: len(repo.store.referrers(repo.repository, digest, VERDICT_TYPE))


def _read_tag(
    repo: StoreRepository, tag: str, kind: str, count: Callable[[str], int] | None
) -> TagTarget | None:
    there = repo.store.manifest(repo.repository, tag)
    if there is None:
        return None
    root = Manifest(descriptor=there[0], data=there[1])
    digest, below = root.descriptor.digest, _read_graph(repo, root)
    blobs = {blob.digest: blob for row in below.values() for blob in row}
    pushed, verdicts = None, 0
    if count and kind == "candidate":
        pushed = read_pushed(read_records(repo, digest))
        verdicts = sum(count(part) for part in below)
    # An image is named after its index or, in docker, after its config; a .sif after its file.
    configs = [blob.digest for row in below.values() for blob in row[:1] if blob.media_type in CONFIG_TYPES]
    files = [blob.digest for row in below.values() for blob in row[1:]]
    named = files if tag.endswith(".sif") else configs
    return TagTarget(
        tag=tag,
        kind=kind,
        digest=digest,
        parts=tuple(part for part in below if part != digest),
        names=tuple(dict.fromkeys(name.removeprefix("sha256:")[:12] for name in (*below, *named))),
        size=sum(blob.size for blob in blobs.values()),
        pushed=pushed,
        verdicts=verdicts,
    )


def _read_graph(repo: StoreRepository, root: Manifest) -> dict[str, tuple[Descriptor, ...]]:
    """Return the digests of `root` and of all manifests below it, each with its blobs, the config first.

    A missing manifest has no blobs. Raises RegistryError for a rejected request and an invalid manifest.
    """
    blobs: dict[str, tuple[Descriptor, ...]] = {}
    waiting = [root.descriptor]
    for descriptor in waiting:  # the list grows during the loop
        if descriptor.digest in blobs:
            continue
        if len(blobs) >= MOST_MANIFESTS:
            raise RegistryError(
                "manifest-invalid",
                f"{repo} {root.descriptor.digest} has more than {MOST_MANIFESTS} manifests",
                hint=INVALID_HINT,
            )
        there = repo.store.manifest(repo.repository, descriptor.digest) if blobs else (descriptor, root.data)
        children, blobs[descriptor.digest] = (
            parse_parts(Manifest(descriptor=there[0], data=there[1])) if there else ((), ())
        )
        waiting += children
    return blobs


def _annotations(repo: StoreRepository, record: Descriptor) -> Mapping[str, str]:
    """Return the annotations of a record; a registry may omit them in the list of referrers."""
    listed = dict(record.annotations)
    if CREATED in listed:
        return listed
    value = json.loads(read_manifest(repo, record.digest).data)
    annotations = value.get("annotations") if isinstance(value, dict) else None
    return annotations if isinstance(annotations, dict) else {}


# --- Removable candidates of a registry, and their removal with their artifacts


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneDecision:
    """The decision of `prune` about a candidate, and the reason. `parts` are its manifests to delete."""

    candidate: TagTarget
    remove: bool
    why: str
    parts: tuple[str, ...] = ()


def plan_prune(tagged: Sequence[TagTarget], before: datetime) -> tuple[PruneDecision, ...]:
    """Return the removable candidates of a repository: pushed before `before`, and not needed.

    A candidate is needed if another tag points to it or to one of its platforms, if it has a valid verdict,
    if the time of its push is unknown, or if its tag does not match its content.
    """
    candidates = [image for image in tagged if image.kind == "candidate"]
    reason = {candidate.tag: _keep_reason(candidate, tagged, before) for candidate in candidates}
    others = [image for image in tagged if reason.get(image.tag, "not one")]
    needed = {digest for image in others for digest in (image.digest, *image.parts)}
    return tuple(
        PruneDecision(
            candidate=candidate,
            remove=not reason[candidate.tag],
            why=reason[candidate.tag] or f"pushed {_day(candidate.pushed)}",
            parts=tuple(part for part in candidate.parts if part not in needed),
        )
        for candidate in candidates
    )


def _keep_reason(candidate: TagTarget, tagged: Sequence[TagTarget], before: datetime) -> str:
    mine = {candidate.digest, *candidate.parts}
    for other in tagged:
        if other.tag == candidate.tag:
            continue
        same = other.digest == candidate.digest
        if same or (other.kind != "candidate" and mine & {other.digest, *other.parts}):
            return f"{other.tag} points to it"
    match = CANDIDATE.fullmatch(candidate.tag)
    if match is None or match["hex"] not in candidate.names:
        return "its name does not match its content, so another program pushed it"
    if candidate.verdicts:
        return "it has a verdict"
    if candidate.pushed is None:
        return "the time of its push is unknown"
    if candidate.pushed >= before:
        return f"pushed {_day(candidate.pushed)}"
    return ""


def _day(time: datetime | None) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if time else "?"


class DeletableStore(Store, Protocol):
    """A store whose manifests can be deleted: a registry."""

    def delete_manifest(self, repository: str, digest: str) -> None:
        """Delete a manifest and the tags that name it; no error if there is none."""


def remove_candidate(store: DeletableStore, repository: str, decision: PruneDecision) -> str:
    """Delete a candidate, its own platforms, and artifacts about them. Revocations stay.

    The same lock gives the same digest again, and another machine may still have the revoked verdict.
    docker-registry 2.8 cannot delete only a tag, so manifests are deleted by digest. If another tag points
    to the candidate meanwhile, nothing is deleted and that tag is returned, else "".
    """
    digest = decision.candidate.digest
    for tag in store.tags(repository):
        if tag != decision.candidate.tag and not CANDIDATE.fullmatch(tag) and not FALLBACK.fullmatch(tag):
            manifest = store.manifest(repository, tag)
            if manifest and manifest[0].digest == digest:
                return tag
    gone = [digest, *decision.parts]
    referrers = [
        referrer.digest
        for subject in gone
        for kind in DELETED_WITH_IMAGE
        for referrer in store.referrers(repository, subject, kind)
    ]
    lists = [
        store.manifest(repository, subject.replace(":", "-"))
        for subject in gone
        if not store.referrers(repository, subject, REVOCATION_TYPE)
    ]
    for unwanted in (*gone, *referrers, *(manifest[0].digest for manifest in lists if manifest)):
        store.delete_manifest(repository, unwanted)
    return ""
