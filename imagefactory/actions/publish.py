"""A catalogue on its way to its readers, and whose catalogue lies there: signed, put there, never in silence
in the place of another key's.

    read_current(place) -> check_signer() -> publish() -> what was written

What the last catalogue says was revoked stays in the next one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from imagefactory.access import open_registry, registry_place
from imagefactory.actions.audit import log_acts
from imagefactory.actions.catalog import (
    CatalogRequest,
    CatalogResult,
    build_catalog,
    lacks_approvals,
    readable_envelopes,
    stored_revocations,
)
from imagefactory.actions.read_catalog import cache_published, with_former_families
from imagefactory.actions.verdicts import (
    ANY,
    check_key_trusted,
    local_place,
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
    LARGEST,
    LIFE,
    Catalog,
    CatalogImage,
    CatalogSif,
    Envelopes,
    parse_catalog,
    sign_catalog,
)
from imagefactory.trust.catalog_package import CURRENT, catalog_repository, parse_layer, unpack_artifact
from imagefactory.trust.judgement import (
    VerificationPolicy,
    merge_revoked,
    out_of_period,
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
    """What lies where a catalogue goes. `keyid` is the key's that it names, empty if it names none.

    `catalogue` is what it says, None if no key that is trusted now signed it.
    """

    where: str
    keyid: str
    catalogue: Catalog | None


def current_place(factory: Project, registry: str) -> StoreRepository:
    """The repository of the catalogue, in the registry `registry` or that of the settings."""
    host, path = registry_place(factory, registry)
    reference = catalog_repository(f"{host}/{path}" if path else host)
    return StoreRepository(store=open_registry(factory, host), repository=reference.repository)


def read_current(where: StoreRepository | Path, trust: TrustRules, now: datetime) -> PublishedCatalog | None:
    """Return what lies there now, None for nothing.

    Raises RegistryError if a registry does not answer, UsageError for a file that cannot be read.
    """
    name = str(where) if isinstance(where, Path) else f"{where}:{CURRENT}"
    data = _read(where)
    if data is None:
        return None
    return _open(data, name, trust, now)[0]


def _open(data: bytes, name: str, trust: TrustRules, now: datetime) -> tuple[PublishedCatalog, str]:
    """A catalogue that may have expired, by a key that is trusted now; else why it does not count."""
    try:
        opened = verify_envelope(unpack_artifact(data, name), trust, FORM)
    except StatementError as error:
        return PublishedCatalog(where=name, keyid="", catalogue=None), error.message
    keyid = opened.envelope.keyid if opened.envelope and opened.envelope.signature else ""
    found: Catalog | None = None
    why = f"{opened.standing}, {opened.why}"
    if opened.envelope and opened.key and opened.standing is VerdictStatus.GOOD:
        late = out_of_period(opened.key, now)
        try:
            found = None if late else parse_catalog(opened.envelope.payload, name, keyid)
            why = f"{late[0]}, {late[1]}" if late else ""
        except StatementError as error:  # of another version
            why = error.message
    return PublishedCatalog(where=name, keyid=keyid, catalogue=found), why


def open_earlier(data: bytes, where: str, trust: TrustRules, now: datetime) -> Catalog:
    """A catalogue that was published once, expired or not. Raises StatementError, also where its key is not
    trusted now: whoever has a retired key can date a catalogue back."""
    current, why = _open(data, where, trust, now)
    found, key = current.catalogue, trust.key(current.keyid)
    late = out_of_period(key, found.made) if found and key else None
    if found is None or late:
        raise StatementError(
            "catalog-rejected",
            f"{where} cannot be used: {f'{late[0]}, {late[1]}' if late else why}",
            hint="choose another: imagefactory site publish --rollback --dry-run shows the newest valid one",
        )
    return found


def _read(where: StoreRepository | Path) -> bytes | None:
    if isinstance(where, Path):
        try:
            with where.open("rb") as file:
                return file.read(LARGEST)
        except FileNotFoundError:
            return None
        except OSError as error:  # whose it is would be guessed
            raise UsageError(
                *os_problem("read", where, error),
                hint="it would be replaced: make it readable, or write to another file",
            ) from error
    manifest = where.store.manifest(where.repository, CURRENT)
    if manifest is None:
        return None
    try:
        layer = parse_layer(manifest[1], str(where))
    except RegistryError:  # not a catalogue
        return b""
    return b"".join(where.store.read(where.repository, layer))


def check_signer(current: PublishedCatalog | None, key: SigningKey, trust: TrustRules, now: datetime) -> None:
    """Raises CheckFailedError if another key signed what lies there, unless that key is retired here."""
    if current is None or current.keyid in ("", key.keyid):
        return
    other = trust.key(current.keyid)
    if other and other.until <= now:
        return
    whose = f"'{other.name}'" if other else f"a key that is not trusted here, {current.keyid[:16]}"
    raise CheckFailedError(
        "catalog-other-key",
        f"{current.where} is signed by {whose}, and people who joined may trust only that key",
        hint=f"sign with that key, or retire it (key rotate); to replace its catalog: {JOIN_AGAIN}, then "
        "imagefactory site invite --push",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    """What is published, and where: into `output`, else into the registry. `before` is what lies there.

    `rollback` says which earlier catalogue is put back, empty for none.
    """

    making: CatalogRequest
    output: Path | None = None
    before: PublishedCatalog | None = None
    rollback: str = ""


def prepare_catalog(factory: Project, asked: PublishRequest, progress: Progress) -> CatalogResult:
    """What is there now, with what the last catalogue said was revoked. Raises as `catalogue_of`."""
    making = asked.making
    made = build_catalog(factory, making, progress)
    if factory.faults and not making.named and (making.registry or factory.settings.registry.value):
        made = with_former_families(factory, made, making.registry, making.now)
    former = asked.before.catalogue if asked.before else None
    return with_previous_revocations(made, former, [name for name, _ in made.left_out])


def with_previous_revocations(
    made: CatalogResult, former: Catalog | None, gone: Sequence[str]
) -> CatalogResult:
    """With what the last catalogue said was revoked, also of targets that are `gone` from this one."""
    before = {image.target: image for image in former.images} if former else {}
    images = [
        replace(image, revoked=merge_revoked(image.revoked, before[image.target].revoked))
        if image.target in before
        else image
        for image in made.catalogue.images
    ]
    images += _only_revoked(made, [before[name] for name in gone if name in before])
    return replace(made, catalogue=replace(made.catalogue, images=tuple(images)))


def _only_revoked(made: CatalogResult, former: Sequence[CatalogImage]) -> Iterator[CatalogImage]:
    """Images of the last catalogue that no tag has any more because their verdicts were taken back.

    They stay in the list without verdicts: who uses one learns why not to.
    """
    for image in former:
        revoked = merge_revoked(image.revoked, made.revoked.get(image.target, ()))
        if any(row.subject.manifest == image.subject.manifest for row in revoked):
            yield replace(image, envelopes=(), sifs=(), revoked=revoked)


def publish(
    factory: Project, made: Catalog, key: SigningKey, asked: PublishRequest
) -> tuple[Catalog, tuple[str, ...]]:
    """Signs a catalogue and brings it where it is read; gives it as signed, and where it lies.

    It expires with its key at the latest.
    """
    trusted = read_trust(factory.settings.files).key(key.keyid)
    if trusted:
        made = replace(made, expires=min(made.expires, trusted.until))
    envelope = sign_catalog(made, key)
    if asked.output is not None:
        write_catalog(asked.output, envelope)
        written: tuple[str, ...] = (str(asked.output),)
    else:
        place = current_place(factory, asked.making.registry)
        written = tuple(str(one) for one in publish_catalog(place, envelope, made.made))
        cache_published(factory.settings, str(place), envelope, made.made)
    act = AuditEntry(
        action=ROLLBACK if asked.rollback else PUBLISH,
        what=f"catalogue of {len(made.images)} images",
        where=written[-1],
        key=key.keyid,
        why=asked.rollback,
    )
    log_acts(factory, (act,))
    return made, written


def publishing_key(factory: Project, now: datetime) -> SigningKey:
    """The key that signs. Raises CheckFailedError if there is none that this factory itself trusts."""
    key = signing_key(factory, now)
    if key is None:
        raise CheckFailedError(
            "signing-key-missing",
            "no key to sign the catalog",
            hint="create one: imagefactory key create NAME; or set IMAGEFACTORY_SIGNING_KEY",
        )
    check_key_trusted(key, read_trust(factory.settings.files), now)
    return key


def publish_again(
    factory: Project,
    key: SigningKey,
    now: datetime,
    registry: str,
    progress: Progress,
    before: PublishedCatalog | None = None,
) -> tuple[str, ...]:
    """Sign the catalogue again where people read it; gives where it lies, nothing if there never was one.

    `before` is what lay there, where the caller has read it. Raises as `publish`.
    """
    trust = read_trust(factory.settings.files)
    output: Path | None = None
    if not (registry or factory.settings.registry.value):
        if not factory.settings.catalogue.value.startswith("/"):
            return ()
        output = Path(factory.settings.catalogue.value)
    current = read_current(output or current_place(factory, registry), trust, now)
    if current is None:
        return ()
    check_signer(current, key, trust, now)
    making = CatalogRequest(targets=factory.targets, now=now, registry=registry)
    asked = PublishRequest(making=making, output=output, before=before or current)
    made = prepare_catalog(factory, asked, progress)
    return publish(factory, made.catalogue, key, asked)[1]


# --- An earlier catalogue put back: what it offered, signed again now, without what has stopped to count
# since
#     find_earlier() -> roll_back() -> publish() (actions/publish.py)
# Every catalogue stays in the registry under a tag of its own, `<YYYYMMDD>-<12 hex>`. The old bytes would be
# refused by whoever has seen a newer one, and a registry could bring them back by itself, so its content
# gets
# a new time and a new signature. Verdicts are judged again by today's trust, policy and revocations; what is
# known to be revoked stays so, and an image that the registry has no more is left out.


PREVIOUS = "previous"
MOST_OPENED = 60
"""Catalogues that are opened in search of the previous one: whoever may push can write tags without end."""
_OWN = re.compile(r"([0-9]{8})-([0-9a-f]{12})")
_Form = TypeVar("_Form", CatalogImage, CatalogSif)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRevision:
    """A catalogue that was published before, by the digest of its manifest."""

    digest: str
    catalogue: Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChange:
    """A target whose image or verdicts differ: its digests now and then, empty for none, and how many
    verdicts each carries."""

    target: str
    now: str
    then: str
    verdicts_now: int = 0
    verdicts_then: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """What would be published in the place of the current catalogue, and what that changes."""

    earlier: CatalogRevision
    made: CatalogResult
    changes: tuple[CatalogChange, ...]

    @property
    def why(self) -> str:
        return f"the catalogue {self.earlier.digest} of {format_time(self.earlier.catalogue.made)}"


# --- finding it ----------------------------------------------------------------------------------


def find_earlier(factory: Project, asked: PublishRequest, wanted: str, trust: TrustRules) -> CatalogRevision:
    """The catalogue that `wanted` names (a tag, a digest or the first digits of one), or the PREVIOUS one.

    Raises UsageError where none or several are meant, StatementError for one that no key signed which is
    trusted now: whoever has a retired key can date a catalogue back.
    """
    place, now = current_place(factory, asked.making.registry), asked.making.now
    tags = [match for tag in place.store.tags(place.repository) if (match := _OWN.fullmatch(tag))]
    if wanted == PREVIOUS:
        return _find_previous(place, tags, asked.before, trust, now)
    if not DIGEST.fullmatch(wanted):
        digits = wanted.removeprefix("sha256:")
        names = [tag[0] for tag in tags if digits and (tag[0] == wanted or tag[2].startswith(digits[:12]))]
        if len(names) != 1:
            listed = ", ".join(sorted((tag[0] for tag in tags), reverse=True)[:5]) or "none"
            raise UsageError(
                "catalog-not-unique",
                f"'{wanted[:80]}' matches {len(names)} catalogs of {place}",
                hint=f"use a tag or a digest; the newest are {listed}",
            )
        found = _open_catalog(place, names[0], trust, now)
        if not found.digest.removeprefix("sha256:").startswith(digits) and names[0] != wanted:
            raise UsageError(
                "catalog-digest-mismatch",
                f"{place}:{names[0]} is {found.digest}, not {wanted[:80]}",
                hint="use its tag",
            )
        return found
    return _open_catalog(place, wanted, trust, now)


def _find_previous(
    place: StoreRepository,
    tags: list[re.Match[str]],
    before: PublishedCatalog | None,
    trust: TrustRules,
    now: datetime,
) -> CatalogRevision:
    """The newest one that was made before the current one. A tag counts on the day that its content says."""
    manifest = place.store.manifest(place.repository, CURRENT)
    current = manifest[0].digest if manifest else ""
    last = before.catalogue.made if before and before.catalogue else now
    days: dict[str, list[str]] = {}
    for tag in tags:
        if tag[1] <= f"{last:%Y%m%d}" and not current.removeprefix("sha256:").startswith(tag[2]):
            days.setdefault(tag[1], []).append(tag[0])
    opened, faults = 0, []
    for _, names in sorted(days.items(), reverse=True):
        found = []
        for name in names:
            if (opened := opened + 1) > MOST_OPENED:
                raise RegistryError(
                    "catalog-search-limit",
                    f"{place} has more than {MOST_OPENED} catalogs that are not the previous one",
                    hint="name it: --rollback DIGEST",
                )
            try:
                one = _open_catalog(place, name, trust, now)
            except StatementError as error:
                faults.append(error.message)
                continue
            hexes = one.digest.removeprefix("sha256:")
            if name == f"{one.catalogue.made:%Y%m%d}-{hexes[:12]}" and one.catalogue.made < last:
                found.append(one)
        if found:
            return max(found, key=lambda one: one.catalogue.made)
    why = f": {faults[0]}" if faults else ""
    raise UsageError(
        "no-earlier-catalog",
        f"{place} has no earlier catalog by a key that is trusted now{why}",
        hint="create one from the available images: imagefactory site publish",
    )


def _open_catalog(place: StoreRepository, wanted: str, trust: TrustRules, now: datetime) -> CatalogRevision:
    where = f"{place}{'@' if DIGEST.fullmatch(wanted) else ':'}{wanted}"
    manifest = place.store.manifest(place.repository, wanted)
    if manifest is None:
        raise UsageError(
            "rollback-not-found",
            f"no catalog at {where}",
            hint="see imagefactory site publish --rollback --dry-run",
        )
    try:
        layer = parse_layer(manifest[1], where)
    except RegistryError as error:
        raise StatementError("catalog-rejected", error.message, hint=error.hint) from error
    data = b"".join(place.store.read(place.repository, layer))
    return CatalogRevision(digest=manifest[0].digest, catalogue=open_earlier(data, where, trust, now))


# --- what is left of it --------------------------------------------------------------------------


def roll_back(
    factory: Project, asked: PublishRequest, earlier: CatalogRevision, progress: Progress
) -> RollbackPlan:
    """What an earlier catalogue offered, as far as it counts now. Raises RegistryError and StoreError.

    CheckFailedError where readers would take it for older than the current one, NothingSelectedError where
    nothing is left of it.
    """
    now = asked.making.now.replace(microsecond=0)
    former = asked.before.catalogue if asked.before else None
    if former and former.made >= now:
        raise CheckFailedError(
            "clock-before-catalog",
            f"the current catalog is of {format_time(former.made)}, but it is {format_time(now)} here",
            hint="set this machine's clock: clients reject a catalog that is older than one they have seen",
        )
    court = read_verification_policy(factory, asked.making.now)
    judging = _ImageReview(factory=factory, court=court, revocations=_revocations_of(former))
    left_out: list[tuple[str, str]] = []
    images: list[CatalogImage] = []
    with (
        progress.stage("checking the verdicts of the earlier catalog again"),
        ThreadPoolExecutor(WORKERS, thread_name_prefix="rollback") as pool,
    ):
        for before, (image, lines) in zip(
            earlier.catalogue.images, pool.map(judging.judge_image, earlier.catalogue.images), strict=True
        ):
            images += [image] if image else []
            left_out += [(before.target, line) for line in lines]
    if not images:
        why = [f"{target}: {line}" for target, line in left_out] or ["it has no images"]
        raise NothingSelectedError(
            "catalog-nothing-valid",
            f"no image of the catalog {earlier.digest} can be offered now: {'; '.join(why[:3])}",
            hint="choose another catalog, or create one from the available images: imagefactory site publish",
        )
    catalogue = Catalog(made=now, expires=now + LIFE, images=tuple(images), suites=court.suites)
    made = CatalogResult(
        catalogue=catalogue, left_out=tuple(left_out), revoked=stored_revocations(factory, court)
    )
    rows = made.revoked
    images = [replace(one, revoked=merge_revoked(one.revoked, rows.get(one.target, ()))) for one in images]
    made = replace(made, catalogue=replace(catalogue, images=tuple(images)))
    known = {image.target for image in images}
    gone = [image.target for image in (former.images if former else ()) if image.target not in known]
    made = with_previous_revocations(made, former, gone)
    return RollbackPlan(earlier=earlier, made=made, changes=tuple(_changes(former, made.catalogue)))


def _changes(now: Catalog | None, then: Catalog) -> Iterator[CatalogChange]:
    there, back = ({image.target: image for image in one.images} if one else {} for one in (now, then))
    for target in sorted(there.keys() | back.keys()):
        rows = [_compared_parts(one.get(target)) for one in (there, back)]
        if rows[0] != rows[1]:
            (digest, verdicts), (digest_then, verdicts_then) = rows
            yield CatalogChange(
                target=target,
                now=digest,
                then=digest_then,
                verdicts_now=len(verdicts),
                verdicts_then=len(verdicts_then),
            )


def _compared_parts(image: CatalogImage | None) -> tuple[str, frozenset[str]]:
    """What is compared of an image: its digest and its verdicts, those of its .sif files too."""
    if image is None or _is_revoked_only(image):
        return "", frozenset()
    envelopes = (image.envelopes, *(sif.envelopes for sif in image.sifs))
    return image.subject.index, frozenset(digest for rows in envelopes for digest, _ in rows)


def _is_revoked_only(image: CatalogImage) -> bool:
    """Whether it is in the list for what was revoked of it alone."""
    return bool(image.revoked) and not image.envelopes and not image.sifs


def _revocations_of(catalogue: Catalog | None) -> Mapping[str, Mapping[str, bytes]]:
    """The revocations that a catalogue carries, by the manifest that they speak of."""
    found: dict[str, dict[str, bytes]] = {}
    for image in catalogue.images if catalogue else ():
        rows = ((image.subject, image.revocations), *((sif.subject, sif.revocations) for sif in image.sifs))
        for subject, revocations in rows:
            found.setdefault(subject.manifest, {}).update(revocations)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageReview:
    """By what images are judged again: `revocations` are those of the current catalogue."""

    factory: Project
    court: VerificationPolicy
    revocations: Mapping[str, Mapping[str, bytes]]

    def judge_image(self, image: CatalogImage) -> tuple[CatalogImage | None, list[str]]:
        """The image with what counts of it, None where it is gone; and a line for each thing that is not."""
        lines: list[str] = []
        judged = self._judge(image, lines)
        if judged is None:
            return None, lines
        again, cells = judged
        plain = image.target.removeprefix(f"{image.family}-")
        if (
            image.reference
            and not image.only_sif
            and (again.envelopes or not image.gpu)
            and lacks_approvals(self._place(image), image.subject, plain, cells, self.court)
        ):
            lines.append(f"too few keys approved {image.subject.index}")
            return None, lines
        sifs = [one for sif in image.sifs if (one := self._judge(sif, lines))]
        rows = merge_revoked(image.revoked, cells, *(of_sif for _, of_sif in sifs))
        return replace(again, sifs=tuple(sif for sif, _ in sifs), revoked=rows), lines

    def _judge(self, one: _Form, lines: list[str]) -> tuple[_Form, tuple[RevokedCell, ...]] | None:
        place, subject = self._place(one), one.subject
        if place.store.manifest(place.repository, subject.index) is None:
            lines.append(f"{subject.index} is not in {place} any more")
            return None
        found = {**dict(one.revocations), **self.revocations.get(subject.manifest, {})}
        for each in (place, local_place(self.factory, ANY)):
            found.update({row.digest: row.envelope for row in read_revocations(each, subject.manifest)})
        found = dict(readable_envelopes(found))
        heeded = verify_revocations(found, subject, self.court).heeded
        envelopes = dict(one.envelopes)
        judged = verify_verdicts(envelopes, subject, replace(self.court, revocations=heeded))
        good = {row.digest for row in judged if row.standing is VerdictStatus.GOOD}
        bad = Counter(str(row.standing) for row in judged if row.standing is not VerdictStatus.GOOD)
        lines += [f"verdicts that do not count now: {count} {why}" for why, count in sorted(bad.items())]
        kept: Envelopes = tuple((digest, data) for digest, data in one.envelopes if digest in good)
        again = replace(one, envelopes=kept, revocations=tuple(sorted(found.items())))
        return again, revoked_cells(judged, subject, self.court.trust)

    def _place(self, one: CatalogImage | CatalogSif) -> StoreRepository:
        if not one.reference:
            return local_place(self.factory, ANY)
        return place_of(self.factory, parse_reference(one.reference))
