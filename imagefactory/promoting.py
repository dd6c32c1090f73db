"""Tags that follow verdicts: promoted, and moved back when verdicts are taken back.

verify/promotion.py decides, here it is read and done. One at a time moves tags from one store; where another
store's promoter was at a tag meanwhile, all is read and decided anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from imagefactory.errors import (
    CheckFailedError,
    FactoryError,
    NoImageError,
    NothingSelectedError,
    RegistryError,
    UsageError,
)
from imagefactory.factory import Factory
from imagefactory.model import Target
from imagefactory.oci.candidates import (
    CANDIDATE,
    CAPABILITY,
    REVOCATION_TYPE,
    plain_tag,
    read_pushed,
    read_records,
)
from imagefactory.oci.graph import Place, parse_parts, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.verdicts import (
    ANY,
    Attaching,
    Found,
    attach_to,
    find_in,
    find_verdicts,
    local_place,
    read_court,
    writing,
)
from imagefactory.verify.attached import Statement, put_statement
from imagefactory.verify.judgement import Court, out_of_period
from imagefactory.verify.judging import read_subject
from imagefactory.verify.model import Judged, Standing, Subject
from imagefactory.verify.promotion import Candidate, Rule, Stand, TagFate, decide_tags, newest_first, stand
from imagefactory.verify.revocation import Withdrawal, judge_revocations, sign_revocation

if TYPE_CHECKING:
    from imagefactory.verify.keys import SigningKey

TRIES = 3
"""How often tags are decided anew when another promoter moved one meanwhile."""


def capability_proven(judged: Sequence[Judged], capability: str) -> bool:
    """Whether an image with these verdicts is verified for a capability (`8.0`)."""
    return stand(judged, capability)[0] is Stand.PROVEN


# --- promoting -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoting:
    """Whose tags follow the verdicts, where, and when. With `dry_run` none moves."""

    target: Target
    place: Place
    now: datetime
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What became of the tags. `faults` are those that could not be moved, with why."""

    target: str
    place: str
    fates: tuple[TagFate, ...]
    faults: tuple[tuple[str, FactoryError], ...] = ()

    @property
    def proven(self) -> bool:
        """Whether any tag points to a candidate that fulfils its rule."""
        return any(fate.proven for fate in self.fates)


def promote(factory: Factory, wanted: Promoting, progress: Progress) -> Promotion:
    """Lets the tags of a target follow the verdicts that can be relied on (promotion.decide_tags).

    Raises RegistryError or StoreError, also when others keep moving the same tags.
    """
    place, court = wanted.place, read_court(factory, wanted.now)
    local = isinstance(place.store, LayoutStore)
    rule = Rule(plain=plain_tag(wanted.target), capabilities=wanted.target.capabilities, pointers_only=local)
    with writing(factory, place, progress), progress.stage(f"{wanted.target.name}: tags in {place}"):
        for _ in range(TRIES):
            read, tags = _read_candidates(factory, wanted, court, progress)
            fates = decide_tags(rule, [one.candidate for one in read], tags)
            faults = () if wanted.dry_run else _move_all(place, fates)
            if faults is not None:
                return Promotion(target=wanted.target.name, place=str(place), fates=fates, faults=faults)
    raise RegistryError(
        f"{place}: others keep moving the tags of {wanted.target.name}",
        hint="one promoter at a time: run it again when the other has ended",
    )


def _move_all(place: Place, fates: Sequence[TagFate]) -> tuple[tuple[str, FactoryError], ...] | None:
    """Moves what moves; gives the faults, or None where another was at one of the tags meanwhile."""
    faults: list[tuple[str, FactoryError]] = []
    for fate in (one for one in fates if one.moved):
        there = place.store.manifest(place.repository, fate.tag)
        if (there[0].digest if there else "") != fate.before:
            return None
        if fate.after:
            root = read_manifest(place, fate.after)
            put = place.store.put_manifest(place.repository, root.data, root.descriptor.media_type, fate.tag)
            if put.digest != fate.after:
                return None
            continue
        try:
            place.store.untag(place.repository, fate.tag)
        except RegistryError as error:  # docker-registry 2.8 cannot: the tag stays, and that is said
            faults.append((fate.tag, error))
    return tuple(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Root:
    """What a tag may point to. `built` is true where the store's own tag of the target points to it."""

    digest: str
    name: str
    built: bool
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    candidate: Candidate
    found: Found


def _read_candidates(
    factory: Factory, wanted: Promoting, court: Court, progress: Progress
) -> tuple[tuple[_Read, ...], dict[str, str]]:
    """All that the target's tags may point to, and what they point to now."""
    place, plain = wanted.place, plain_tag(wanted.target)
    names = [tag for tag in place.store.tags(place.repository) if _belongs(tag, plain)]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="candidates") as pool:
        found = pool.map(lambda tag: place.store.manifest(place.repository, tag), names)
        digests = {name: one[0].digest for name, one in zip(names, found, strict=True) if one}
        tags = {name: digest for name, digest in digests.items() if not CANDIDATE.fullmatch(name)}
        named = _untagged(factory, wanted.target, court) if isinstance(place.store, LayoutStore) else {}
        for name in sorted(digests, key=lambda name: (name not in tags, name == plain)):  # the best name last
            named[digests[name]] = name
        roots = [
            _Root(
                digest=digest,
                name=name,
                built=tags.get(plain) == digest,
                tags=tuple(tag for tag, there in digests.items() if there == digest),
            )
            for digest, name in named.items()
        ]
        read = list(pool.map(lambda root: _read_candidate(factory, wanted, court, root), roots))
    for note in (one for one in read if isinstance(one, str)):
        progress.note(note)
    return tuple(one for one in read if isinstance(one, _Read)), tags


def _belongs(tag: str, plain: str) -> bool:
    """Whether a tag is the target's: its own, one of a capability, or a candidate's that is no .sif."""
    if tag == plain:
        return True
    match = CAPABILITY.fullmatch(tag) or CANDIDATE.fullmatch(tag)
    return bool(match and match["plain"] == plain and not tag.endswith(".sif"))


def _read_candidate(factory: Factory, wanted: Promoting, court: Court, root: _Root) -> _Read | str:
    """The candidate of a root, or what to say of one whose parts are gone or that is no image."""
    place = wanted.place
    try:
        subject = read_subject(place, root.digest)
    except NoImageError as error:
        return f"{root.name} in {place} is left out: {error.message}"
    except RegistryError:
        children, _ = parse_parts(read_manifest(place, root.digest))
        if all(place.store.manifest(place.repository, child.digest) for child in children):
            raise
        return f"{root.name} is not whole in {place}: left out"
    found = find_in(factory, place, subject, court)
    # What was verified as another target moves none of this one's tags, whoever calls it a candidate of it.
    judged = tuple(one for one in found.judged if _target(one) in ("", wanted.target.name))
    if isinstance(place.store, LayoutStore):
        # The store tells no times: what was built last is the newest, others are as old as their last run.
        times = [one.verdict.report.ended for one in judged if one.verdict]
        pushed = wanted.now if root.built else max(times, default=None)
    else:
        pushed = read_pushed(read_records(place, root.digest))
    candidate = Candidate(name=root.name, digest=root.digest, pushed=pushed, judged=judged)
    return _Read(candidate=candidate, found=replace(found, tags=root.tags))


def _target(judged: Judged) -> str:
    return judged.verdict.report.subject.target if judged.verdict else ""


def _untagged(factory: Factory, target: Target, court: Court) -> dict[str, str]:
    """Images of the target that the store keeps for their verdicts, by digest; what a person calls them."""
    layout, place, found = factory.layout, local_place(factory, ANY), {}
    for digest in layout.subjects():
        if layout.manifest(digest) is None:
            continue
        try:
            found_here = find_verdicts(place, read_subject(place, digest), court)
        except NoImageError:
            continue
        for one in found_here.judged:
            subject = one.verdict.report.subject if one.verdict else None
            if one.proves and subject and (subject.target, subject.manifest) == (target.name, digest):
                root = digest if layout.manifest(subject.index) is None else subject.index
                found[root] = f"{target.name}@{root[:19]}"
    return found


def target_at(factory: Factory, place: Place, digest: str) -> Target:
    """The target whose candidate or tag is `digest` in that repository. Raises NothingSelectedError."""
    family = place.repository.rpartition("/")[2]
    for target in (one for one in factory.targets if one.family == family):
        for tag in place.store.tags(place.repository):
            if _belongs(tag, plain_tag(target)):
                there = place.store.manifest(place.repository, tag)
                if there and there[0].digest == digest:
                    return target
    raise NothingSelectedError(
        f"no target's tag in {place} points to {digest}",
        hint="name the target, and the registry by --registry",
    )


def list_verdicts(factory: Factory, wanted: Promoting, progress: Progress) -> tuple[Found, ...]:
    """The verdicts about all images of a target in a place, the newest image first."""
    read, _ = _read_candidates(factory, wanted, read_court(factory, wanted.now), progress)
    order = newest_first([one.candidate for one in read])
    return tuple(sorted((one.found for one in read), key=lambda one: order.index(one.subject.index)))


# --- taking back ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoking:
    """What is taken back where: `wanted` is a tag or digest of `place`; the rest is as Withdrawal has it.

    Of the digests in `verdicts` the first digits are enough.
    """

    place: Place
    wanted: str
    why: str
    now: datetime
    capability: str = ""
    verdicts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """A revocation that was attached, and the verdicts that it takes back, by their digests."""

    place: str
    subject: Subject
    digest: str
    taken: tuple[str, ...]


def revoke(factory: Factory, wanted: Revoking, key: SigningKey, progress: Progress) -> Revoke:
    """Signs that verdicts of an image hold no longer, attaches it, and remembers it in the store here.

    Raises CheckFailedError where this factory would not heed that key, and where nothing would be taken back.
    """
    place, court = wanted.place, read_court(factory, wanted.now)
    trusted = court.trust.key(key.keyid)
    late = (None, "it is not trusted") if trusted is None else out_of_period(trusted, wanted.now)
    if late:
        raise CheckFailedError(
            f"nobody here would heed the key '{key.name}': {late[1]}",
            hint=f"imagefactory keys trust {key.name}, or sign with another: IMAGEFACTORY_SIGNING_KEY",
        )
    subject = read_subject(place, wanted.wanted)
    judged = find_in(factory, place, subject, court).judged
    before = {one.digest for one in judged if one.standing is Standing.GOOD}
    withdrawal = Withdrawal(
        subject=subject,
        why=wanted.why,
        verdicts=tuple(_whole_digest(one, judged) for one in wanted.verdicts),
        capability=wanted.capability,
    )
    envelope = sign_revocation(withdrawal, key, wanted.now)
    known = judge_revocations({"": envelope}, subject, court).heeded
    after = find_verdicts(place, subject, replace(court, revocations=known)).judged
    taken = tuple(one.digest for one in after if one.standing is Standing.REVOKED and one.digest in before)
    if not taken:
        raise CheckFailedError(
            f"no verdict of {place}@{subject.manifest} that can be relied on would be taken back",
            hint="imagefactory verdicts shows what there is",
        )
    one = Attaching(subject=subject, kind=REVOCATION_TYPE, envelope=envelope, until=None)
    if not isinstance(place.store, LayoutStore):
        own = local_place(factory, ANY)
        there = read_manifest(place, subject.manifest).descriptor
        with writing(factory, own, progress):
            put_statement(own, Statement(kind=REVOCATION_TYPE, subject=there, envelope=envelope))
    return Revoke(
        place=str(place), subject=subject, digest=attach_to(factory, place, one, progress), taken=taken
    )


def _whole_digest(text: str, judged: Sequence[Judged]) -> str:
    digits = text.removeprefix("sha256:")
    found = [one.digest for one in judged if digits and one.digest[len("sha256:") :].startswith(digits)]
    if len(found) != 1:
        raise UsageError(
            f"'{text[:80]}' is the beginning of {len(found)} verdicts of this image",
            hint="write a digest that `imagefactory verdicts` shows",
        )
    return found[0]


def follow(factory: Factory, revoked: Revoking, target: Target, progress: Progress) -> tuple[Promotion, ...]:
    """Lets the target's tags follow what was taken back, where that was and in the store here."""
    places, local = [revoked.place], local_place(factory, target.family)
    if not isinstance(revoked.place.store, LayoutStore) and any(
        _belongs(tag, plain_tag(target)) for tag in local.store.tags(local.repository)
    ):
        places.append(local)
    return tuple(
        promote(factory, Promoting(target=target, place=place, now=revoked.now), progress) for place in places
    )
