"""Publish a catalog, or an earlier one again. Never silently replace a catalog of another key.

    read_current(place) -> check_signer() -> prepare_catalog() or roll_back() -> publish()

The next catalog includes the revocations of the last one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from imagefactory.access import open_registry, registry_place
from imagefactory.actions.catalog import (
    CatalogRequest,
    CatalogResult,
    build_catalog,
    lacks_approvals,
    readable_envelopes,
    stored_revocations,
)
from imagefactory.actions.read_catalog import cache_published, read_registry
from imagefactory.actions.verdicts import (
    ANY,
    check_key_trusted,
    local_place,
    log_acts,
    place_of,
    read_verification_policy,
    signing_key,
)
from imagefactory.errors import (
    CheckFailedError,
    NothingSelectedError,
    RegistryError,
    StatementError,
    UsageError,
    os_problem,
)
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.store import DIGEST, parse_reference
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.serialize import format_time
from imagefactory.trust.attached import read_revocations
from imagefactory.trust.audit import PUBLISH, ROLLBACK, AuditEntry
from imagefactory.trust.catalog import (
    FORM,
    LIFE,
    Catalog,
    CatalogImage,
    CatalogSif,
    Envelopes,
    open_catalog,
    parse_catalog,
    sign_catalog,
    verify_catalog,
)
from imagefactory.trust.catalog_package import CATALOG_ARTIFACT, CURRENT, catalog_repository, parse_layer
from imagefactory.trust.judgement import (
    VerificationPolicy,
    merge_revoked,
    period_problem,
    revoked_cells,
    verify_envelope,
    verify_revocations,
    verify_verdicts,
)
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.offers import publish_catalog, write_catalog
from imagefactory.trust.policy import TrustRules, read_trust
from imagefactory.trust.verdict import RevokedCell, VerdictStatus

JOIN_AGAIN = "--yes-everybody-must-join-again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCatalog:
    """The current catalog of a place. `keyid` is empty if the catalog names no key.

    `catalog` is None if no trusted key signed it.
    """

    where: str
    keyid: str
    catalog: Catalog | None


def current_place(project: Project, registry: str) -> StoreRepository:
    """Return the repository of the catalog, in `registry` or in the registry of the settings."""
    host, path = registry_place(project, registry)
    reference = catalog_repository(f"{host}/{path}" if path else host)
    return StoreRepository(store=open_registry(project, host), repository=reference.repository)


def read_current(
    location: StoreRepository | Path, trust: TrustRules, now: datetime
) -> PublishedCatalog | None:
    """Return the current catalog, None if there is none.

    Raises RegistryError if a registry does not answer, UsageError for an unreadable file.
    """
    name = str(location) if isinstance(location, Path) else f"{location}:{CURRENT}"
    data = _read(location)
    return None if data is None else _open(data, name, trust, now)[0]


def _open(data: bytes, name: str, trust: TrustRules, now: datetime) -> tuple[PublishedCatalog, str]:
    """Return a catalog that a trusted key signed, even if it expired, or the reason to reject it."""
    try:
        file = open_catalog(data, name)
        opened = verify_envelope(file.envelope, trust, FORM)
    except StatementError as error:
        return PublishedCatalog(where=name, keyid="", catalog=None), error.message
    keyid = opened.envelope.keyid if opened.envelope and opened.envelope.signature else ""
    catalog: Catalog | None = None
    reason = f"{opened.standing}, {opened.why}"
    if opened.envelope and opened.key and opened.standing is VerdictStatus.GOOD:
        late = period_problem(opened.key, now)
        try:
            if not late:
                read = parse_catalog(opened.envelope.payload, name, keyid, file)
                catalog = replace(read, images=tuple(read.images))  # a corrupt image is found now
            reason = f"{late[0]}, {late[1]}" if late else ""
        except StatementError as error:  # of another version
            reason = error.message
    return PublishedCatalog(where=name, keyid=keyid, catalog=catalog), reason


def _read(location: StoreRepository | Path) -> bytes | None:
    if isinstance(location, Path):
        try:
            with location.open("rb") as file:
                return file.read(CATALOG_ARTIFACT.largest)
        except FileNotFoundError:
            return None
        except OSError as error:  # its signer is unknown
            raise UsageError(
                *os_problem("read", location, error),
                hint="make this file readable, or write the catalog to another file",
            ) from error
    manifest = location.store.manifest(location.repository, CURRENT)
    if manifest is None:
        return None
    try:
        layer = parse_layer(manifest[1], str(location))
    except RegistryError:  # not a catalog
        return b""
    return b"".join(location.store.read(location.repository, layer))


def check_signer(current: PublishedCatalog | None, key: SigningKey, trust: TrustRules, now: datetime) -> None:
    """Raise CheckFailedError if another key signed the current catalog and is not retired here."""
    if current is None or current.keyid in ("", key.keyid):
        return
    other = trust.key(current.keyid)
    if other and other.until <= now:
        return
    whose = f"'{other.name}'" if other else f"a key that is not trusted here, {current.keyid[:16]}"
    raise CheckFailedError(
        "catalog-other-key",
        f"{current.where} is signed by {whose}, and people who joined may trust only that key",
        hint="sign with that key, or retire it (imagefactory key rotate). To replace this catalog: "
        f"{JOIN_AGAIN}, then imagefactory site invite --push",
    )


def publishing_key(project: Project, now: datetime) -> SigningKey:
    """Return the signing key. Raises CheckFailedError if this project trusts none of the local keys."""
    key = signing_key(project, now)
    if key is None:
        raise CheckFailedError(
            "signing-key-missing",
            "no key to sign the catalog",
            hint="create one: imagefactory key create NAME; or set IMAGEFACTORY_SIGNING_KEY",
        )
    check_key_trusted(key, read_trust(project.settings.files), now)
    return key


def prepare_catalog(
    project: Project, request: CatalogRequest, current: PublishedCatalog | None, progress: Progress
) -> CatalogResult:
    """Return the next catalog, with the revocations of the current one. Raises as `build_catalog`."""
    result = build_catalog(project, request, progress)
    if project.faults and not request.named and (request.registry or project.settings.registry.value):
        result = with_former_families(project, result, request.registry, request.now)
    former = current.catalog if current else None
    return _with_previous_revocations(result, former, [name for name, _ in result.skipped])


def with_former_families(
    project: Project, result: CatalogResult, registry: str, now: datetime
) -> CatalogResult:
    """Add images of the last catalog for families whose recipes have errors now.

    These images have valid verdicts and users: an error in a recipe must not remove them.
    """
    host, path = registry_place(project, registry)
    reference = catalog_repository(f"{host}/{path}" if path else host)
    try:
        file = read_registry(project, reference)
        former = verify_catalog(file, read_trust(project.settings.files), now, str(reference))
        known = {target.family for target in project.targets}
        images = tuple(
            former.images[number] for number, entry in enumerate(former.entries) if entry.family not in known
        )
    except (RegistryError, StatementError):  # there is none, or no valid one
        return result
    catalog = replace(result.catalog, images=(*result.catalog.images, *images))
    return replace(result, catalog=catalog, kept=tuple(image.target for image in images))


def _with_previous_revocations(
    result: CatalogResult, former: Catalog | None, dropped: Iterable[str]
) -> CatalogResult:
    """Add the revocations of the last catalog, also those of `dropped` targets.

    A dropped image without any tag stays in the catalog without verdicts, so that its users see the reason.
    """
    before = {image.target: image for image in former.images} if former else {}
    images = [
        replace(image, revoked=merge_revoked(image.revoked, before[image.target].revoked))
        if image.target in before
        else image
        for image in result.catalog.images
    ]
    for image in (before[name] for name in dropped if name in before):
        revoked = merge_revoked(image.revoked, result.revoked.get(image.target, ()))
        if any(row.subject.manifest == image.subject.manifest for row in revoked):
            images.append(replace(image, envelopes=(), sifs=(), revoked=revoked))
    return replace(result, catalog=replace(result.catalog, images=tuple(images)))


def publish(
    project: Project,
    catalog: Catalog,
    key: SigningKey,
    registry: str = "",
    *,
    output: Path | None = None,
    rollback: str = "",
) -> tuple[Catalog, tuple[str, ...]]:
    """Sign a catalog, and write it to `output` or a registry. Return the signed catalog and its places.

    It expires with its key at the latest. `rollback` is the name of the earlier catalog that is published
    again.
    """
    trusted = read_trust(project.settings.files).key(key.keyid)
    if trusted:
        catalog = replace(catalog, expires=min(catalog.expires, trusted.until))
    envelope = sign_catalog(catalog, key)
    if output is not None:
        write_catalog(output, envelope)
        written: tuple[str, ...] = (str(output),)
    else:
        repo = current_place(project, registry)
        written = tuple(map(str, publish_catalog(repo, envelope, catalog.created)))
        cache_published(project.settings, str(repo), envelope, catalog.created)
    act = AuditEntry(
        action=ROLLBACK if rollback else PUBLISH,
        what=f"catalog of {len(catalog.images)} images",
        where=written[-1],
        key=key.keyid,
        why=rollback,
    )
    log_acts(project, (act,))
    return catalog, written


def publish_again(
    project: Project,
    key: SigningKey,
    now: datetime,
    registry: str,
    progress: Progress,
    before: PublishedCatalog | None = None,
    *,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Sign the catalog again in its place. Return the places, none if there never was a catalog.

    `before` is the current catalog, if the caller has read it. With `dry_run` nothing is signed. Raises as
    `publish`.
    """
    trust = read_trust(project.settings.files)
    output: Path | None = None
    if not (registry or project.settings.registry.value):
        if not project.settings.catalog.value.startswith("/"):
            return ()
        output = Path(project.settings.catalog.value)
    current = read_current(output or current_place(project, registry), trust, now)
    if current is None:
        return ()
    check_signer(current, key, trust, now)
    if dry_run:
        return (current.where,)
    request = CatalogRequest(targets=project.targets, now=now, registry=registry)
    result = prepare_catalog(project, request, before or current, progress)
    return publish(project, result.catalog, key, registry, output=output)[1]


# --- Rollback: what an earlier catalog offered, verified and signed again
# Every catalog stays in the registry under a tag of its own, `<YYYYMMDD>-<12 hex>`. Clients that saw a newer
# catalog reject the old bytes, since a registry could bring them back. So the content gets a new time and a
# new signature. Today's trust, policy and revocations count. An image that the registry no longer has is
# skipped.


PREVIOUS = "previous"
MOST_OPENED = 60
"""The most catalogs to open in search of the previous one: anyone who may push can write many tags."""
_OWN = re.compile(r"([0-9]{8})-([0-9a-f]{12})")
_Form = TypeVar("_Form", CatalogImage, CatalogSif)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRevision:
    """An earlier published catalog, by the digest of its manifest."""

    digest: str
    catalog: Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChange:
    """A target whose image or verdicts differ: its digests now and then, and its numbers of verdicts."""

    target: str
    now: str
    then: str
    verdicts_now: int = 0
    verdicts_then: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """The earlier catalog that would replace the current one, and the changes."""

    earlier: CatalogRevision
    made: CatalogResult
    changes: tuple[CatalogChange, ...]

    @property
    def why(self) -> str:
        return f"the catalog {self.earlier.digest} of {format_time(self.earlier.catalog.created)}"


def find_earlier(
    project: Project,
    request: CatalogRequest,
    name: str,
    current: PublishedCatalog | None,
    trust: TrustRules,
) -> CatalogRevision:
    """Return the catalog of a tag, a digest or its first digits, or the PREVIOUS one.

    Raises UsageError unless exactly one matches, StatementError unless a trusted key signed it. A retired
    key does not count, because anyone who has the key can write any date.
    """
    repo, now = current_place(project, request.registry), request.now
    tags = [match for tag in repo.store.tags(repo.repository) if (match := _OWN.fullmatch(tag))]
    if name == PREVIOUS:
        return _find_previous(repo, tags, current, trust, now)
    if DIGEST.fullmatch(name):
        return _open_catalog(repo, name, trust, now)
    digits = name.removeprefix("sha256:")
    names = [tag[0] for tag in tags if digits and (tag[0] == name or tag[2].startswith(digits[:12]))]
    if len(names) != 1:
        latest = ", ".join(sorted((tag[0] for tag in tags), reverse=True)[:5]) or "none"
        raise UsageError(
            "catalog-not-unique",
            f"'{name[:80]}' matches {len(names)} catalogs of {repo}",
            hint=f"use a tag or a digest; the newest are {latest}",
        )
    revision = _open_catalog(repo, names[0], trust, now)
    if not revision.digest.removeprefix("sha256:").startswith(digits) and names[0] != name:
        raise UsageError(
            "catalog-digest-mismatch",
            f"{repo}:{names[0]} is {revision.digest}, not {name[:80]}",
            hint=f"use the tag {names[0]}",
        )
    return revision


def _find_previous(
    repo: StoreRepository,
    tags: list[re.Match[str]],
    current: PublishedCatalog | None,
    trust: TrustRules,
    now: datetime,
) -> CatalogRevision:
    """Return the newest catalog before the current one. A tag counts only on the day in its content."""
    manifest = repo.store.manifest(repo.repository, CURRENT)
    digits = manifest[0].digest.removeprefix("sha256:") if manifest else ""
    last = current.catalog.created if current and current.catalog else now
    days: dict[str, list[str]] = {}
    for tag in tags:
        if tag[1] <= f"{last:%Y%m%d}" and not digits.startswith(tag[2]):
            days.setdefault(tag[1], []).append(tag[0])
    opened, faults = 0, []
    for _, names in sorted(days.items(), reverse=True):
        revisions = []
        for name in names:
            if (opened := opened + 1) > MOST_OPENED:
                raise RegistryError(
                    "catalog-search-limit",
                    f"{repo} has more than {MOST_OPENED} catalogs that are not the previous one",
                    hint="pass the catalog's digest: --rollback DIGEST",
                )
            try:
                revision = _open_catalog(repo, name, trust, now)
            except StatementError as error:
                faults.append(error.message)
                continue
            time, hexes = revision.catalog.created, revision.digest.removeprefix("sha256:")
            if name == f"{time:%Y%m%d}-{hexes[:12]}" and time < last:
                revisions.append(revision)
        if revisions:
            return max(revisions, key=lambda revision: revision.catalog.created)
    reason = f": {faults[0]}" if faults else ""
    raise UsageError(
        "no-earlier-catalog",
        f"{repo} has no earlier catalog that a trusted key signed{reason}",
        hint="create one from the available images: imagefactory site publish",
    )


def _open_catalog(repo: StoreRepository, name: str, trust: TrustRules, now: datetime) -> CatalogRevision:
    """Return a published catalog, expired or not. Raises StatementError if its key is not trusted now."""
    location = f"{repo}{'@' if DIGEST.fullmatch(name) else ':'}{name}"
    manifest = repo.store.manifest(repo.repository, name)
    if manifest is None:
        raise UsageError(
            "rollback-not-found",
            f"no catalog at {location}",
            hint="to see the newest valid one, run imagefactory site publish --rollback --dry-run",
        )
    try:
        layer = parse_layer(manifest[1], location)
    except RegistryError as error:
        raise StatementError("catalog-rejected", error.message, hint=error.hint) from error
    published, reason = _open(b"".join(repo.store.read(repo.repository, layer)), location, trust, now)
    catalog, key = published.catalog, trust.key(published.keyid)
    late = period_problem(key, catalog.created) if catalog and key else None
    if catalog is None or late:
        raise StatementError(
            "catalog-rejected",
            f"{location} cannot be used: {f'{late[0]}, {late[1]}' if late else reason}",
            hint="choose another: imagefactory site publish --rollback --dry-run shows the newest valid one",
        )
    return CatalogRevision(digest=manifest[0].digest, catalog=catalog)


def roll_back(
    project: Project,
    time: datetime,
    current: PublishedCatalog | None,
    earlier: CatalogRevision,
    progress: Progress,
) -> RollbackPlan:
    """Return the images of an earlier catalog that are valid now. Raises RegistryError and StoreError.

    Raises CheckFailedError if readers would reject it as older than the current one, NothingSelectedError if
    no image is valid.
    """
    now = time.replace(microsecond=0)
    former = current.catalog if current else None
    if former and former.created >= now:
        raise CheckFailedError(
            "clock-before-catalog",
            f"this machine's time {format_time(now)} is before the catalog's, {format_time(former.created)}",
            hint="set this machine's clock: readers reject a catalog that is older than one they have seen",
        )
    policy = read_verification_policy(project, time)
    review = _ImageReview(project=project, policy=policy, revocations=_revocations_of(former))
    known = stored_revocations(project, policy)
    skipped: list[tuple[str, str]] = []
    images: list[CatalogImage] = []
    with (
        progress.stage("checking the verdicts of the earlier catalog again"),
        ThreadPoolExecutor(WORKERS, thread_name_prefix="rollback") as pool,
    ):
        before = earlier.catalog.images
        for old, (image, lines) in zip(before, pool.map(review.verify_image, before), strict=True):
            if image:
                images.append(
                    replace(image, revoked=merge_revoked(image.revoked, known.get(image.target, ())))
                )
            skipped += [(old.target, line) for line in lines]
    if not images:
        reason = [f"{target}: {line}" for target, line in skipped] or ["it has no images"]
        raise NothingSelectedError(
            "catalog-nothing-valid",
            f"no image of the catalog {earlier.digest} is valid now: {'; '.join(reason[:3])}",
            hint="choose another catalog, or create one from the available images: imagefactory site publish",
        )
    catalog = Catalog(created=now, expires=now + LIFE, images=tuple(images), suites=policy.suites)
    result = CatalogResult(catalog=catalog, skipped=tuple(skipped), revoked=known)
    targets = {image.target for image in images}
    dropped = [image.target for image in (former.images if former else ()) if image.target not in targets]
    result = _with_previous_revocations(result, former, dropped)
    return RollbackPlan(earlier=earlier, made=result, changes=tuple(_changes(former, result.catalog)))


def _changes(now: Catalog | None, then: Catalog) -> Iterator[CatalogChange]:
    current, back = ({image.target: image for image in row.images} if row else {} for row in (now, then))
    for target in sorted(current.keys() | back.keys()):
        (digest, verdicts), (digest_then, verdicts_then) = (
            _compared_parts(row.get(target)) for row in (current, back)
        )
        if (digest, verdicts) != (digest_then, verdicts_then):
            yield CatalogChange(
                target=target,
                now=digest,
                then=digest_then,
                verdicts_now=len(verdicts),
                verdicts_then=len(verdicts_then),
            )


def _compared_parts(image: CatalogImage | None) -> tuple[str, frozenset[str]]:
    """Return the digest of an image and its verdicts, including those of its .sif files."""
    if image is None or (image.revoked and not image.envelopes and not image.sifs):
        return "", frozenset()
    envelopes = (image.envelopes, *(sif.envelopes for sif in image.sifs))
    return image.subject.index, frozenset(digest for rows in envelopes for digest, _ in rows)


def _revocations_of(catalog: Catalog | None) -> Mapping[str, Mapping[str, bytes]]:
    """Return the revocations in a catalog, by the manifest of their subject."""
    revocations: dict[str, dict[str, bytes]] = {}
    for image in catalog.images if catalog else ():
        rows = [(image.subject, image.revocations), *((sif.subject, sif.revocations) for sif in image.sifs)]
        for subject, envelopes in rows:
            revocations.setdefault(subject.manifest, {}).update(envelopes)
    return revocations


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageReview:
    """Verifies images of an earlier catalog again. `revocations` are those of the current catalog."""

    project: Project
    policy: VerificationPolicy
    revocations: Mapping[str, Mapping[str, bytes]]

    def verify_image(self, image: CatalogImage) -> tuple[CatalogImage | None, list[str]]:
        """Return the image with its valid statements, None if it is gone; and a line for each invalid one."""
        lines: list[str] = []
        verified = self._verify(image, lines)
        if verified is None:
            return None, lines
        again, cells = verified
        plain = image.target.removeprefix(f"{image.family}-")
        if (
            image.reference
            and not image.only_sif
            and (again.envelopes or not image.gpu)
            and lacks_approvals(self._place(image), image.subject, plain, cells, self.policy)
        ):
            lines.append(f"too few keys approved {image.subject.index}")
            return None, lines
        sifs = [row for sif in image.sifs if (row := self._verify(sif, lines))]
        revoked = merge_revoked(image.revoked, cells, *(of_sif for _, of_sif in sifs))
        return replace(again, sifs=tuple(sif for sif, _ in sifs), revoked=revoked), lines

    def _verify(self, image: _Form, lines: list[str]) -> tuple[_Form, tuple[RevokedCell, ...]] | None:
        repo, subject = self._place(image), image.subject
        if repo.store.manifest(repo.repository, subject.index) is None:
            lines.append(f"{subject.index} is not in {repo} any more")
            return None
        revocations = {**dict(image.revocations), **self.revocations.get(subject.manifest, {})}
        for repository in (repo, local_place(self.project, ANY)):
            rows = read_revocations(repository, subject.manifest)
            revocations.update({row.digest: row.envelope for row in rows})
        revocations = dict(readable_envelopes(revocations))
        heeded = verify_revocations(revocations, subject, self.policy).heeded
        judged = verify_verdicts(dict(image.envelopes), subject, replace(self.policy, revocations=heeded))
        valid = {row.digest for row in judged if row.standing is VerdictStatus.GOOD}
        invalid = Counter(str(row.standing) for row in judged if row.standing is not VerdictStatus.GOOD)
        lines += [
            f"verdicts that do not count now: {count} {reason}" for reason, count in sorted(invalid.items())
        ]
        envelopes: Envelopes = tuple((digest, data) for digest, data in image.envelopes if digest in valid)
        again = replace(image, envelopes=envelopes, revocations=tuple(sorted(revocations.items())))
        return again, revoked_cells(judged, subject, self.policy.trust)

    def _place(self, image: CatalogImage | CatalogSif) -> StoreRepository:
        return place_of(self.project, parse_reference(image.reference) if image.reference else None)
