"""The verdict commands and `image promote`, and code shared by commands about verdicts."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    capability_of,
    choose_targets,
    complete_targets,
    exit_with_first_failure,
    json_option,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_result,
    registry_option,
    terminal_width,
)
from imagefactory.errors import CheckFailedError, NothingSelectedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagefactory.actions.promote import PromotionResult
    from imagefactory.model import Target
    from imagefactory.oci.graph import StoreRepository
    from imagefactory.project import Project
    from imagefactory.trust.judgement import VerdictSet
    from imagefactory.trust.keys import SigningKey
    from imagefactory.trust.policy import TrustRules
    from imagefactory.trust.verdict import VerdictStatus, VerificationResult
    from imagefactory.verify.report import FormattedGpuReport
    from imagefactory.views.verdicts import RevokedRow


NAME = "TARGET|REFERENCE"


class VerdictRow(TypedDict):
    digest: str
    artifact: str
    """The digest of the artifact that has the verdict."""
    status: VerdictStatus
    reason: str
    """Why it does not count; empty if it does."""
    verifies: bool
    """Whether it counts as verified."""
    keyid: NotRequired[str]
    key: NotRequired[str]
    """The name of a key that is trusted here, else empty."""
    issued: NotRequired[str]
    expires: NotRequired[str]
    report: NotRequired[FormattedGpuReport]
    """The report of the verification, in the format of the verdict."""


class ImageVerdictsRow(TypedDict):
    place: str
    digest: str
    manifest: str
    config: str
    tags: list[str]
    verdicts: list[VerdictRow]
    revoked: list[RevokedRow]
    ignored: list[str]
    """Revocations that do not count."""


class VerdictListDocument(TypedDict):
    """The verdicts of images."""

    format: Literal["imagefactory.verdict-list/1"]
    images: list[ImageVerdictsRow]


class PromotedTagRow(TypedDict):
    tag: str
    before: str
    """The digest that the tag pointed to; empty for none."""
    after: str
    moved: bool
    verified: bool
    reason: str
    requested: str
    """The digest that the tag would point to with all approvals."""
    approved: list[str]
    missing: int
    """The number of approvals that are missing."""
    fault: str


class PromotionRow(TypedDict):
    target: str
    place: str
    tags: list[PromotedTagRow]


class ImagePromoteDocument(TypedDict):
    """The tags of each target, and the images that they point to."""

    format: Literal["imagefactory.image-promote/1"]
    dry_run: bool
    results: list[PromotionRow]
    errors: list[ErrorRow]


class VerdictRevokeDocument(TypedDict):
    """The revoked verdicts, and the tags that were moved."""

    format: Literal["imagefactory.verdict-revoke/1"]
    dry_run: bool
    place: str
    manifest: str
    revocation: str
    """The digest of the signed revocation; empty for a dry run."""
    revoked: list[str]
    catalog: list[str]
    """The places of the catalog that was signed again."""
    promotions: list[PromotionRow]
    errors: list[ErrorRow]


class VerdictSyncRow(TypedDict):
    place: str
    listed: int
    """The number of statements that were in the list."""
    repaired: list[str]
    """The digests of the artifacts that were added again."""
    gone: int
    """The number of statements about deleted images."""
    expired: int
    damaged: int
    """The number of unreadable lines in the record of this store."""


class VerdictSyncDocument(TypedDict):
    """The repaired lists of verdicts in a registry."""

    format: Literal["imagefactory.verdict-sync/1"]
    repositories: list[VerdictSyncRow]
    errors: list[ErrorRow]


def parse_option(_: click.Context, __: click.Parameter, text: str) -> str:

    return str(capability_of(text)) if text else ""


def check_registry_option(name: str, registry: str) -> None:
    if registry:
        raise UsageError("option-conflict", f"'{name}' already has a registry", hint="remove --registry")


@click.command(cls=Command)
@click.argument("name", metavar=NAME, shell_complete=complete_targets)
@registry_option
@click.option(
    "--capability",
    default="",
    metavar="X.Y",
    callback=parse_option,
    help="Exit with 9 unless a valid verdict says verified for this compute capability.",
)
@click.option("--numbers", is_flag=True, help="Show every check of every verdict, with its numbers.")
@json_option
@click.pass_obj
def list_(
    call: CommandContext, /, *, name: str, place: str, capability: str, numbers: bool, as_json: bool
) -> None:
    """Show who verified an image, when and on which GPU.

    \b
    imagefactory verdict list pytorch-2.3-cu121
    imagefactory verdict list pytorch-2.3-cu121:2.3-cu121-sm80
    imagefactory verdict list registry.example.org/gpu/pytorch@sha256:...

    VALID is yes if the verdict counts, else the reason why it does not. The [[trust]] rows of
    imagefactory.toml decide whose signatures count. For a TARGET it shows all its images, here and in the
    registry; outside a project, those of the catalog.
    """
    from imagefactory.project import is_project
    from imagefactory.trust.policy import read_trust
    from imagefactory.trust.tags import CapabilityStatus, capability_status
    from imagefactory.views.verdicts import format_verdicts

    images, trust = _find(call, name, place, datetime.now(UTC))
    keys = {key.keyid: key.name for key in (trust or read_trust(call.settings.files)).keys}
    if as_json:
        print_json(
            VerdictListDocument(
                format="imagefactory.verdict-list/1",
                images=[_verdict_set_json(image, keys) for image in images],
            )
        )
    else:
        print_result(format_verdicts(images, keys, terminal_width(), numbers=numbers))
        for_cpus = is_project(call.settings) and name in {t.name for t in call.factory.targets if not t.gpu}
        if for_cpus:
            print_result(f"{name} is for CPUs only, so it has no verdicts; its smoke test is its only check")
        elif is_project(call.settings) and not any(image.judged for image in images):
            print_next_command("verify", name)
    states = [capability_status(image.judged, capability)[0] for image in images]
    if capability and CapabilityStatus.PROVEN not in states:
        hint = f"verify it: imagefactory verify {name} --capability {capability}"
        if not is_project(call.settings):
            hint = "choose a verified image: imagefactory search"
        raise CheckFailedError("not-verified", f"{name} is not verified for {capability}", hint=hint)


def _find(
    call: CommandContext, name: str, registry: str, now: datetime
) -> tuple[tuple[VerdictSet, ...], TrustRules | None]:
    """Return the images and the trust of their center, None for the trust in the settings."""
    from imagefactory.actions.centers import names_center, read_offer, verdicts_on
    from imagefactory.actions.promote import PromotionRequest, list_verdicts
    from imagefactory.actions.transfer import target_reference
    from imagefactory.actions.verdicts import local_place, place_of, registry_of, verdicts_of
    from imagefactory.oci.candidates import plain_tag
    from imagefactory.oci.layout import reference
    from imagefactory.oci.store import parse_reference
    from imagefactory.project import uses_catalog

    plain = not any(mark in name for mark in "/:@") or names_center(name, call.settings)
    if plain and not registry and uses_catalog(call.settings):
        shelf = read_offer(call.settings, os.environ, name, now)
        call.progress.note(shelf.source)
        print_catalog_notes(shelf.notes)
        return verdicts_on(shelf.offers[0]), shelf.center.trust
    if "/" in name:
        check_registry_option(name, registry)
        image_reference = parse_reference(name)
        access = call.access
        return (
            verdicts_of(access, place_of(access, image_reference), image_reference.tag_or_digest, now),
        ), None
    factory = call.factory
    if ":" in name or "@" in name:
        _, image_reference = target_reference(factory, name, registry)
        return (
            verdicts_of(factory, place_of(factory, image_reference), image_reference.tag_or_digest, now),
        ), None
    target = factory.select_single(name)
    places: list[StoreRepository] = []
    if not registry:
        places.append(local_place(factory, target.family))
    if registry or factory.settings.registry.value:
        places.append(registry_of(factory, target.family, registry))
    images = [
        image
        for repository in places
        for image in list_verdicts(
            factory, PromotionRequest(target=target, place=repository, now=now), call.progress
        )
    ]
    if not registry and f"{reference(target)}.sif" in factory.layout.tags():
        images.append(verdicts_of(factory, places[0], f"{plain_tag(target)}.sif", now))
    if not images:
        raise NothingSelectedError(
            "image-not-found",
            f"no image of {target.name} is in {', '.join(map(str, places))}",
            hint=f"run imagefactory build {target.name}, or pass a registry: --registry HOST[/PATH]",
        )
    return tuple(images), None


def _verdict_set_json(image: VerdictSet, keys: Mapping[str, str]) -> ImageVerdictsRow:
    from imagefactory.views.verdicts import revoked_json

    return ImageVerdictsRow(
        place=image.place,
        digest=image.subject.index,
        manifest=image.subject.manifest,
        config=image.subject.config,
        tags=list(image.tags),
        verdicts=[_verification_json(judged, keys) for judged in image.judged],
        revoked=[revoked_json(row) for row in image.revoked],
        ignored=list(image.ignored),
    )


def _verification_json(judged: VerificationResult, keys: Mapping[str, str]) -> VerdictRow:
    from imagefactory.serialize import format_time
    from imagefactory.verify.report import format_gpu_report

    row = VerdictRow(
        digest=judged.name,
        artifact=judged.digest,
        status=judged.standing,
        reason=judged.why,
        verifies=judged.proves,
    )
    verdict = judged.verdict
    if verdict:
        row["keyid"] = verdict.keyid
        row["key"] = keys.get(verdict.keyid, "")
        row["issued"] = format_time(verdict.issued)
        row["expires"] = format_time(verdict.expires)
        row["report"] = format_gpu_report(verdict.report)
    return row


# --- imagefactory image promote


@click.command(cls=Command)
@click.argument("names", metavar=f"{NAME}...", nargs=-1, required=True, shell_complete=complete_targets)
@registry_option
@click.option("--dry-run", is_flag=True, help="Print which tags would move; move nothing.")
@json_option
@click.pass_obj
def promote(call: CommandContext, names: tuple[str, ...], place: str, dry_run: bool, as_json: bool) -> None:
    """Move the tags of targets to their verified images.

    \b
    imagefactory image promote pytorch-2.3-cu121 --dry-run
    imagefactory image promote pytorch-2.3-cu121
    imagefactory image promote registry.example.org/gpu/pytorch@sha256:...

    2.3-cu121-sm80 points to the newest image that is verified for capability 8.0, and 2.3-cu121 to the
    newest that is verified for all capabilities of the recipe. Without a registry the tags of the store
    move.

    If [policy] sets promotion-signatures, tags of a registry move after that number of trusted keys
    approved. This command adds your approval and prints who else must approve.

    Exit code 9 if no tag points to a verified image, or if approvals are missing.
    """
    from imagefactory.actions.promote import PromotionRequest, promote
    from imagefactory.views.verdicts import format_promotion

    factory, now = call.factory, datetime.now(UTC)
    results: list[PromotionRow] = []
    with exit_with_first_failure(factory, names) as failures:
        for target, image_reference, digest in _targets(factory, names, place):
            with failures.of(target.name):
                request = PromotionRequest(target=target, place=image_reference, now=now, dry_run=dry_run)
                result = promote(factory, request, call.progress)
                results.append(promotion_json(result))
                print_result(format_promotion(result, terminal_width(), dry_run=dry_run), unless=as_json)
                for _, fault in result.faults:
                    failures.add(fault)
                _insist(result, target, digest)
        if as_json:
            print_json(
                ImagePromoteDocument(
                    format="imagefactory.image-promote/1",
                    dry_run=dry_run,
                    results=results,
                    errors=failures.as_json(),
                )
            )
    print_next_command("image", "promote", *names) if dry_run else print_next_command(
        "site", "publish", "--dry-run"
    )


def _targets(
    factory: Project, names: tuple[str, ...], registry: str
) -> tuple[tuple[Target, StoreRepository, str], ...]:
    """Return each target, the repository of its tags, and the named digest, if any."""
    from imagefactory.actions.promote import target_at
    from imagefactory.actions.transfer import plain_name
    from imagefactory.actions.verdicts import place_of
    from imagefactory.oci.graph import read_manifest
    from imagefactory.oci.store import parse_reference

    targets: list[tuple[Target, StoreRepository, str]] = []
    for name in names:
        if "/" not in name:
            continue
        check_registry_option(name, registry)
        image_reference = parse_reference(name)
        repository = place_of(factory, image_reference)
        digest = read_manifest(repository, image_reference.tag_or_digest).descriptor.digest
        targets.append((target_at(factory, repository, digest), repository, digest))
    plain = [name for name in names if "/" not in name]
    selection = choose_targets(factory, tuple(plain)) if plain else ()
    # A tag for several platforms waits for those of the others.
    for target in sorted(selection, key=lambda target: target.name == plain_name(target)):
        targets.append((target, place_of_target(factory, target, registry), ""))
    return tuple(targets)


def place_of_target(factory: Project, target: Target, registry: str) -> StoreRepository:
    """Return the named or configured registry, or else the local store."""
    from imagefactory.actions.verdicts import local_place, registry_of

    if registry or factory.settings.registry.value:
        return registry_of(factory, target.family, registry)
    return local_place(factory, target.family)


def _insist(result: PromotionResult, target: Target, digest: str) -> None:
    if waiting := [decision.tag for decision in result.fates if decision.missing]:
        raise CheckFailedError(
            "approval-missing",
            f"{', '.join(waiting)}: approvals are missing, see the table",
            hint=f"the owner of another trusted key runs: imagefactory image promote {result.target}",
        )
    if not target.gpu and not result.proven:
        raise CheckFailedError(
            "image-not-pushed",
            f"no image of {result.target} is in {result.place}",
            hint=f"push it: imagefactory build --push {result.target}",
        )
    hint = f"verify it: imagefactory verify {result.target}"
    if not result.proven:
        raise CheckFailedError(
            "not-verified", f"no image of {result.target} in {result.place} is verified", hint=hint
        )
    if digest and not any(decision.proven and decision.after == digest for decision in result.fates):
        raise CheckFailedError(
            "tag-missing", f"no tag of {result.target} points to {digest}: see the table", hint=hint
        )


def promotion_json(promotion: PromotionResult) -> PromotionRow:
    """Return a promotion as JSON."""
    faults = {tag: error.message for tag, error in promotion.faults}
    return PromotionRow(
        target=promotion.target,
        place=promotion.place,
        tags=[
            PromotedTagRow(
                tag=decision.tag,
                before=decision.before,
                after=decision.before if decision.tag in faults else decision.after,
                moved=decision.moved and decision.tag not in faults,
                verified=decision.proven,
                reason=decision.why,
                requested=decision.wanted or decision.after,
                approved=list(decision.approved),
                missing=decision.missing,
                fault=faults.get(decision.tag, ""),
            )
            for decision in promotion.fates
        ],
    )


# --- imagefactory verdict revoke


@click.command(cls=Command)
@click.argument("name", metavar=NAME, shell_complete=complete_targets)
@registry_option
@click.option(
    "--reason", required=True, metavar="TEXT", help="The reason, in one line. Everyone can read it."
)
@click.option(
    "--capability",
    default="",
    metavar="X.Y",
    callback=parse_option,
    help="Revoke only verdicts of this compute capability.",
)
@click.option(
    "--verdict",
    "digests",
    multiple=True,
    metavar="DIGEST",
    help="Revoke only this verdict, by its first digits (repeatable).",
)
@click.option("--dry-run", is_flag=True, help="Print what would be revoked and moved; change nothing.")
@json_option
@click.pass_obj
def revoke(
    call: CommandContext,
    /,
    *,
    name: str,
    place: str,
    reason: str,
    capability: str,
    digests: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Revoke the verdicts of an image and move its tags back.

    \b
    imagefactory verdict revoke pytorch-2.3-cu121 --reason "wrong sums" --dry-run
    imagefactory verdict revoke pytorch-2.3-cu121 --reason "wrong sums"
    imagefactory verdict revoke pytorch-2.3-cu121 --capability 8.0 --reason TEXT

    Later verdicts count again. The tags move to the newest other verified image, or are removed if there is
    none. The catalog is signed again if there is one. It records who revoked what, when and why.
    """
    from imagefactory.actions.promote import RevokeRequest, follow, revoke
    from imagefactory.actions.verdicts import signing_key
    from imagefactory.views.verdicts import format_promotion, format_revoke

    factory, now = call.factory, datetime.now(UTC)
    image_reference, reference, target = _resolve_image(factory, name, place, capability)
    key = signing_key(factory, now)
    if key is None:
        raise CheckFailedError(
            "signing-key-missing",
            "a revocation must be signed, but no key signs on this machine",
            hint="run imagefactory key create NAME",
        )
    request = RevokeRequest(
        place=image_reference,
        wanted=reference,
        why=reason,
        now=now,
        capability=capability,
        verdicts=digests,
        target=target.name,
        dry_run=dry_run,
    )
    result = revoke(factory, request, key, call.progress)
    print_result(format_revoke(result), unless=as_json)
    with exit_with_first_failure() as failures:
        moved = follow(factory, request, result.revocation, target, call.progress)
        for promotion in moved:
            print_result(format_promotion(promotion, terminal_width(), dry_run=dry_run), unless=as_json)
            for tag, fault in promotion.faults:
                failures.of(tag).add(fault)
        written: tuple[str, ...] = ()
        with failures.of("catalog"):
            written = _publish(call, factory, key, now, _registry_of(name, place), dry_run=dry_run)
            for address in written:
                print_result(f"{'would be written' if dry_run else 'written'}: {address}", unless=as_json)
        if as_json:
            print_json(
                VerdictRevokeDocument(
                    format="imagefactory.verdict-revoke/1",
                    dry_run=dry_run,
                    place=result.place,
                    manifest=result.subject.manifest,
                    revocation=result.digest,
                    revoked=list(result.taken),
                    catalog=list(written),
                    promotions=[promotion_json(promotion) for promotion in moved],
                    errors=failures.as_json(),
                )
            )
    if not dry_run:
        print_next_command("verify", target.name)


def _registry_of(name: str, registry: str) -> str:
    """Return the registry whose catalog lists an image: the named one, "" for the one in the settings."""
    from imagefactory.oci.store import parse_reference

    if "/" not in name:
        return registry
    image_reference = parse_reference(name)
    path = image_reference.repository.rpartition("/")[0]
    return f"{image_reference.registry}/{path}" if path else image_reference.registry


def _publish(
    call: CommandContext, factory: Project, key: SigningKey, now: datetime, registry: str, *, dry_run: bool
) -> tuple[str, ...]:
    """Sign the catalog again, unless it is a dry run. Return its places.

    Raises CheckFailedError with the command to run later.
    """
    from imagefactory.actions.publish import publish_again
    from imagefactory.errors import ImagefactoryError

    try:
        return publish_again(factory, key, now, registry, call.progress, dry_run=dry_run)
    except ImagefactoryError as error:
        if dry_run:
            raise
        option = f" --registry {registry}" if registry else ""
        raise CheckFailedError(
            "publish-incomplete",
            f"the revocation is signed, but the catalog does not contain it yet: {error.message}",
            hint=f"sign the catalog again: imagefactory site publish{option}",
        ) from error


def _resolve_image(
    factory: Project, name: str, registry: str, capability: str
) -> tuple[StoreRepository, str, Target]:
    """Return the repository of an image, its tag or digest there, and its target."""
    from imagefactory.actions.promote import target_at
    from imagefactory.actions.transfer import target_reference
    from imagefactory.actions.verdicts import place_of
    from imagefactory.oci.candidates import plain_tag
    from imagefactory.oci.graph import read_manifest
    from imagefactory.oci.store import parse_reference
    from imagefactory.trust.tags import capability_tag

    if "/" in name:
        check_registry_option(name, registry)
        image_reference = parse_reference(name)
        repository = place_of(factory, image_reference)
        digest = read_manifest(repository, image_reference.tag_or_digest).descriptor.digest
        return repository, digest, target_at(factory, repository, digest)
    if ":" in name or "@" in name:
        target, image_reference = target_reference(factory, name, registry)
        return place_of(factory, image_reference), image_reference.tag_or_digest, target
    target = factory.select_single(name)
    plain = plain_tag(target)
    return (
        place_of_target(factory, target, registry),
        capability_tag(plain, capability) if capability else plain,
        target,
    )


# --- imagefactory verdict sync


@click.command(cls=Command)
@registry_option
@json_option
@click.pass_obj
def sync(call: CommandContext, place: str, as_json: bool) -> None:
    """Restore the registry's lists of the verdicts attached here.

    \b
    imagefactory verdict sync

    If two programs attach verdicts at the same time, a registry without the referrers API can lose one.
    This store has a record of those that it attached. Run this while no one else attaches verdicts.
    """
    from imagefactory.actions.verdicts import repair_all_referrers
    from imagefactory.views.verdicts import format_reconciled

    factory = call.factory
    with exit_with_first_failure(factory) as failures:
        repositories = repair_all_referrers(factory, place, datetime.now(UTC), call.progress)
        if as_json:
            return print_json(
                VerdictSyncDocument(
                    format="imagefactory.verdict-sync/1",
                    repositories=[
                        VerdictSyncRow(
                            place=row.place,
                            listed=row.listed,
                            repaired=list(row.repaired),
                            gone=row.gone,
                            expired=row.expired,
                            damaged=row.damaged,
                        )
                        for row in repositories
                    ],
                    errors=failures.as_json(),
                )
            )
        print_result(format_reconciled(repositories))
    return print_next_command("image", "list", "--registry")
