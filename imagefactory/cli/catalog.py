"""The command `site publish`, which writes the signed catalog."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    choose_targets,
    exit_with_first_failure,
    json_option,
    print_json,
    print_next_command,
    print_prose,
    print_result,
    registry_option,
    targets_argument,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import NothingSelectedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagefactory.actions.catalog import CatalogResult
    from imagefactory.actions.publish import RollbackPlan
    from imagefactory.project import Project
    from imagefactory.trust.claims import VerdictAges
    from imagefactory.trust.verdict import VerificationResult


class PublishedSifRow(TypedDict):
    sha256: str
    reference: str


class PublishedImageRow(TypedDict):
    target: str
    reference: str
    digest: str
    manifest: str
    size: int
    unpacked_size: int
    verified: list[str]
    """The compute capabilities for which it is verified."""
    verdicts: int
    sifs: list[PublishedSifRow]


class SkippedTargetRow(TypedDict):
    target: str
    reason: str


class RollbackChangeRow(TypedDict):
    target: str
    before: str
    """The digest of its image now; empty for none."""
    after: str
    verdicts_before: int
    verdicts_after: int


class RollbackRow(TypedDict):
    digest: str
    """The digest of the earlier catalog."""
    created: str
    changes: list[RollbackChangeRow]


class SitePublishDocument(TypedDict):
    """The catalog that was signed, or would be with `--dry-run`."""

    format: Literal["imagefactory.site-publish/1"]
    created: str
    expires: str
    written: list[str]
    """The places where it is; empty with `--dry-run`."""
    images: list[PublishedImageRow]
    skipped: list[SkippedTargetRow]
    unchanged: list[str]
    """Targets with an invalid recipe, whose row of the previous catalog stays."""
    awaiting_approval: list[str]
    verdict_ages: VerdictAges
    rollback: NotRequired[RollbackRow]
    errors: list[ErrorRow]


@click.command(cls=Command)
@targets_argument(required=False)
@registry_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it to this file (compressed if the name ends in .gz), and push nothing.",
)
@click.option("--dry-run", is_flag=True, help="Print what the catalog would contain. Needs no key.")
@click.option(
    "--rollback",
    is_flag=False,
    flag_value="previous",
    metavar="[DIGEST]",
    help="Restore the previous catalog, or the one with this digest or tag.",
)
@click.option(
    "--yes-everybody-must-join-again",
    is_flag=True,
    help="Replace a catalog that another key signed. All users must then join again.",
)
@json_option
@click.pass_obj
def publish_catalog(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    place: str,
    output: Path | None,
    dry_run: bool,
    rollback: str | None,
    yes_everybody_must_join_again: bool,
    as_json: bool,
) -> None:
    """Sign and publish the catalog of images and verdicts.

    \b
    imagefactory site publish --dry-run
    imagefactory site publish                 to the registry
    imagefactory site publish -o FILE         to a file that everyone reads

    The catalog has the image of each target, its predictions and its verdicts. Users join it with an
    invitation (`imagefactory site invite`), and then use `imagefactory search` and `imagefactory job write`
    anywhere. It is valid for 30 days: publish it after each promotion and every night.

    --rollback signs an earlier catalog again. Revoked verdicts stay revoked. A second --rollback restores
    the replaced catalog.
    """
    from imagefactory.actions.catalog import CatalogRequest
    from imagefactory.actions.publish import (
        check_signer,
        current_place,
        find_earlier,
        prepare_catalog,
        publish,
        publishing_key,
        read_current,
        roll_back,
    )
    from imagefactory.trust.offers import verdict_ages_of, verify_offer
    from imagefactory.trust.policy import read_trust
    from imagefactory.views.verdicts import format_ages

    factory, now = call.factory, datetime.now(UTC)
    if rollback is not None and names:
        raise UsageError(
            "option-conflict",
            f"--rollback applies to the whole catalog, so it does not accept the target {names[0][:80]}",
            hint="remove the targets; a word after --rollback is read as a digest",
        )
    key = None if dry_run else publishing_key(factory, now)
    trust, before = read_trust(factory.settings.files), None
    if output or key or rollback is not None:  # before the work, not after it
        before = read_current(output or current_place(factory, place), trust, now)
    if key and not yes_everybody_must_join_again:
        check_signer(before, key, trust, now)
    with exit_with_first_failure(factory, names) as failures:
        targets = choose_targets(factory, names)
        request = CatalogRequest(targets=targets, now=now, registry=place, named=bool(names))
        back: RollbackPlan | None = None
        if rollback is not None:
            earlier = find_earlier(factory, request, rollback, before, trust)
            back = roll_back(factory, now, before, earlier, call.progress)
        draft = back.made if back else prepare_catalog(factory, request, before, call.progress)
        if not draft.catalog.images:
            if draft.waiting:
                raise NothingSelectedError(
                    "catalog-not-approved",
                    f"{', '.join(draft.waiting)}: too few keys approved the images",
                    hint=f"the owner of another trusted key runs: imagefactory image promote "
                    f"{draft.waiting[0]}",
                )
            raise NothingSelectedError(
                "catalog-empty",
                "no target has an image in this place",
                hint="run imagefactory build --push TARGET, then verify it",
            )
        written: tuple[str, ...] = ()
        if key:
            signed, written = publish(
                factory, draft.catalog, key, place, output=output, rollback=back.why if back else ""
            )
            draft = replace(draft, catalog=signed)
            if output is None:
                _note_other_repository(factory, str(current_place(factory, place)))
        offers = [verify_offer(draft.catalog, image, trust, now) for image in draft.catalog.images]
        proven, ages = (
            {offer.image.target: _verdict_age_text(offer.judged) for offer in offers},
            verdict_ages_of(offers, now),
        )
        if as_json:
            document = _as_json(draft, proven, written, ages, failures.as_json())
            if back:
                document["rollback"] = _rollback_json(back)
            return print_json(document)
        print_result(_format_images(draft, proven))
        for line in _skipped(draft.skipped):
            print_prose(line)
        if back:
            print_result(f"{'restored' if written else 'would restore'} {back.why}")
            for change in back.changes:
                was, will = (digest or "none" for digest in (change.now, change.then))
                verdicts = f"{change.verdicts_now} -> {change.verdicts_then} verdicts"
                print_result(f"  {change.target}  {was}{f' -> {will}' if was != will else ''}, {verdicts}")
            print_result("  all images and verdicts are the same", unless=bool(back.changes))
        for catalog_path in written:
            print_result(f"wrote {catalog_path}")
        print_result(format_ages(ages))
        if written:
            print_result(
                f"signed by '{key.name if key else ''}', valid until {draft.catalog.expires:%Y-%m-%d}"
            )
        if written and back:
            print_result(
                "fix the cause: the next nightly run or `imagefactory site publish` replaces this catalog"
            )
    if written:
        return print_next_command("search")
    return (
        print_next_command("site", "publish", "--rollback", back.earlier.digest)
        if back
        else print_next_command("site", "publish", *names)
    )


def _format_images(draft: CatalogResult, verified: dict[str, list[str]]) -> str:
    from imagefactory.views.text import format_table

    rows = []
    for image in draft.catalog.images:
        status = f"verified {' '.join(verified[image.target])}" if verified[image.target] else "not verified"
        status += "; from the last catalog, because its recipe has errors" * (image.target in draft.kept)
        rows.append((image.target, status, image.reference or image.subject.index))
    return format_table(("TARGET", "STATUS", "IMAGE"), rows, terminal_width())


def _skipped(skipped: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return one line for each reason, with some of its targets."""
    from imagefactory.recipes.names import few

    targets: dict[str, list[str]] = {}
    for target, reason in skipped:
        targets.setdefault(reason, []).append(target)
    for reason, names in targets.items():
        yield f"{len(names)} skipped, {reason}: {few(names)}"


def _note_other_repository(factory: Project, registry: str) -> None:
    from imagefactory.trust.catalog_package import CURRENT, catalog_repository

    entry = factory.settings.catalog
    remote = entry.value and not entry.value.startswith("/")
    if entry.value and not (remote and str(catalog_repository(entry.value)) == f"{registry}:{CURRENT}"):
        write_terminal(
            2,
            f"note: your settings name another catalog: {entry.value} ({entry.origin})",
        )


def _verdict_age_text(judged: Iterable[VerificationResult]) -> list[str]:
    from imagefactory.gpu.values import Compatibility
    from imagefactory.trust.claims import verified_claims

    return [str(gpu) for gpu, claim in verified_claims(judged).items() if claim.answer is Compatibility.YES]


def _rollback_json(back: RollbackPlan) -> RollbackRow:
    from imagefactory.serialize import format_time

    return RollbackRow(
        digest=back.earlier.digest,
        created=format_time(back.earlier.catalog.created),
        changes=[
            RollbackChangeRow(
                target=change.target,
                before=change.now,
                after=change.then,
                verdicts_before=change.verdicts_now,
                verdicts_after=change.verdicts_then,
            )
            for change in back.changes
        ],
    )


def _as_json(
    draft: CatalogResult,
    proven: dict[str, list[str]],
    written: tuple[str, ...],
    ages: VerdictAges,
    errors: list[ErrorRow],
) -> SitePublishDocument:
    from imagefactory.serialize import format_time

    return SitePublishDocument(
        format="imagefactory.site-publish/1",
        created=format_time(draft.catalog.created),
        expires=format_time(draft.catalog.expires),
        written=list(written),
        images=[
            PublishedImageRow(
                target=image.target,
                reference=image.reference,
                digest=image.subject.index,
                manifest=image.subject.manifest,
                size=image.size,
                unpacked_size=image.unpacked,
                verified=proven[image.target],
                verdicts=len(image.envelopes),
                sifs=[PublishedSifRow(sha256=sif.sha256, reference=sif.reference) for sif in image.sifs],
            )
            for image in draft.catalog.images
        ],
        skipped=[SkippedTargetRow(target=name, reason=reason) for name, reason in draft.skipped],
        unchanged=list(draft.kept),
        awaiting_approval=list(draft.waiting),
        verdict_ages=ages,
        errors=errors,
    )
