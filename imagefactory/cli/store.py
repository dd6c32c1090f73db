"""The commands of images in the store and in registries: list, remove, prune and check."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    ImageRow,
    SifRow,
    TargetFailures,
    choose_targets,
    exit_with_first_failure,
    image_json,
    json_option,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    sif_json,
    targets_argument,
    terminal_width,
)
from imagefactory.errors import (
    ImagefactoryError,
    NoPlatformError,
    NothingSelectedError,
    StoreError,
    UsageError,
)
from imagefactory.progress import format_bytes

if TYPE_CHECKING:
    from imagefactory.actions.store import PruneResult
    from imagefactory.oci.candidates import TagTarget
    from imagefactory.oci.layout import Layout
    from imagefactory.oci.manifests import Image, SifArtifact


class ImageListDocument(TypedDict):
    """The images in the store."""

    format: Literal["imagefactory.image-list/1"]
    store: str
    images: list[ImageRow]
    sifs: list[SifRow]
    errors: list[ErrorRow]
    """What cannot be read."""


class RegistryTagRow(TypedDict):
    tag: str
    type: str
    """`candidate`, `capability` or another type of tag."""
    digest: str
    size: int


class RegistryRepositoryRow(TypedDict):
    registry: str
    repository: str
    tags: list[RegistryTagRow]


class RegistryListDocument(TypedDict):
    """The tags of a registry."""

    format: Literal["imagefactory.registry-list/1"]
    repositories: list[RegistryRepositoryRow]


class ImageRemoveDocument(TypedDict):
    """The images that were removed from the store."""

    format: Literal["imagefactory.image-remove/1"]
    removed: list[str]


class ImageCheckDocument(TypedDict):
    """The number of objects in the store, and the corrupt ones."""

    format: Literal["imagefactory.image-check/1"]
    blobs: int
    bytes: int
    records: int
    tags: int
    repaired: list[str]
    errors: list[ErrorRow]


class ImagePruneDocument(TypedDict):
    """The space that was freed in the store."""

    format: Literal["imagefactory.image-prune/1"]
    dry_run: bool
    blobs: int
    unpacked: int
    """The number of unpacked layers."""
    records: int
    bytes: int
    sweep_bytes: int
    cache_bytes: int
    errors: list[ErrorRow]


class PrunedCandidateRow(RegistryTagRow):
    pushed: str | None
    removed: bool
    reason: str


class PrunedRepositoryRow(TypedDict):
    registry: str
    repository: str
    candidates: list[PrunedCandidateRow]


class RegistryPruneDocument(TypedDict):
    """The candidates in a registry, and which of them were removed."""

    format: Literal["imagefactory.registry-prune/1"]
    dry_run: bool
    before: str
    """Candidates that are older than this time are removed."""
    repositories: list[PrunedRepositoryRow]
    errors: list[ErrorRow]


_registry_option = click.option(
    "--registry",
    "place",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[HOST[/PATH]]",
    help="Of this registry instead of the store.  [default: the setting `registry`]",
)


@click.command(cls=Command)
@targets_argument(required=False)
@_registry_option
@json_option
@click.pass_obj
def image_list(call: CommandContext, names: tuple[str, ...], place: str | None, as_json: bool) -> None:
    """List the images of the store or of a registry.

    \b
    imagefactory image list
    imagefactory image list pytorch-2.3-cu121 --registry

    With --registry, TARGET selects the repositories. .sif files of the store are listed too.
    """
    from imagefactory.oci.layout import Layout

    if place is not None:
        return _list_registry(call, names, place, as_json=as_json)
    reject_conflict(names, "TARGET requires --registry", "add --registry, or run imagefactory show TARGET")

    settings = call.settings
    with exit_with_first_failure() as failures:
        contents = _read_store(Layout(settings.store_path), failures)
        _list_images(contents, settings.store.value, as_json=as_json)
    return None


@dataclasses.dataclass(slots=True)
class _Contents:
    """The contents of a store. `sifs` have the names that `image remove` accepts: a tag or a file name.

    `unusable` are tags and digests without an image for this platform, which is not an error.
    """

    images: list[Image]
    sifs: list[tuple[str, SifArtifact]]
    errors: list[ErrorRow]
    unusable: list[tuple[str, str]]


def _read_store(layout: Layout, failures: TargetFailures) -> _Contents:
    """Return the contents.

    A corrupt .sif of an image is listed but is not a failure, since it can be rebuilt.
    """
    from imagefactory.oci.sif import load_sif, stored_sifs

    images: list[Image] = []
    unusable: list[tuple[str, str]] = []
    sifs: dict[tuple[str, str], SifArtifact] = {}
    damaged = TargetFailures()
    for name, descriptor in layout.tags().items():
        with failures.of(name):
            if name.endswith(".sif"):
                sifs[name, descriptor.digest] = load_sif(layout, descriptor.digest)
            else:
                try:
                    images.append(layout.load(name, descriptor))
                except NoPlatformError as error:
                    unusable.append((name, descriptor.digest))
                    damaged.of(name).add(error)
    for manifest in dict.fromkeys(image.manifest for image in images):
        with damaged.of(manifest):
            for record in stored_sifs(layout, manifest):
                with damaged.of(record.name):
                    if isinstance(record.artifact, ImagefactoryError):
                        raise record.artifact
                    sifs[record.name, record.digest] = record.artifact
    named = [(name, sif) for (name, _), sif in sifs.items()]
    errors = failures.as_json() + damaged.as_json()
    return _Contents(images=images, sifs=named, errors=errors, unusable=unusable)


def _list_images(contents: _Contents, registry: str, *, as_json: bool) -> None:
    from imagefactory.views.text import format_table

    images, sifs = contents.images, contents.sifs
    if as_json:
        return print_json(
            ImageListDocument(
                format="imagefactory.image-list/1",
                store=registry,
                images=[image_json(image) for image in images],
                sifs=[{**sif_json(sif), "name": name} for name, sif in sifs],
                errors=contents.errors,
            )
        )
    if not images and not sifs and not contents.unusable:
        print_result(f"no image yet in {registry}")
        return print_next_command("list")
    rows = [(i.name, str(len(i.layers)), format_bytes(i.size), i.digest) for i in images]
    rows += [(name, "sif", format_bytes(sif.file.size), sif.digest) for name, sif in sifs]
    rows += [(name, "unusable", "", digest) for name, digest in contents.unusable]
    print_result(format_table(("IMAGE", "LAYERS", "SIZE", "DIGEST"), rows, terminal_width()))
    unique = {layer.descriptor.digest: layer.descriptor.size for i in images for layer in i.layers}
    total = format_bytes(sum(unique.values()))
    print_result(f"{total} in {len(unique)} different layers, in {registry}")
    runnable = [image.name for image in images if not image.name.startswith("base:")]
    return print_next_command("run", runnable[0], "--", "python") if runnable else None


def complete_images(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    from imagefactory.oci.layout import Layout

    call = ctx.find_object(CommandContext) or CommandContext(None, "quiet")
    try:
        tags = Layout(call.settings.store_path).tags()
    except ImagefactoryError:
        return []
    return [name for name in tags if name.startswith(incomplete)]


@click.command(cls=Command)
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True, shell_complete=complete_images)
@json_option
@click.pass_obj
def image_remove(call: CommandContext, names: tuple[str, ...], as_json: bool) -> None:
    """Remove images from the store by name.

    \b
    imagefactory image remove pytorch:2.3-cu121 && imagefactory image prune

    `image prune` then frees the disk space.
    """
    import difflib

    from imagefactory.oci.layout import Layout

    layout = Layout(call.settings.store_path)
    tags = layout.tags()
    references = {} if all(name in tags for name in names) else _sifs_of_images(layout)
    for name in names:
        if name not in tags and name not in references:
            suggestion = difflib.get_close_matches(name, (*tags, *references), n=1)
            hint = f"did you mean {suggestion[0]}?" if suggestion else "imagefactory image list"
            raise NothingSelectedError("image-not-found", f"{layout.path} has no image '{name}'", hint=hint)
    for name in names:
        if name in tags:
            layout.untag(name)
        for subject, digest in references.get(name, ()):
            layout.unrefer(subject, digest)
        print_result(f"removed {name}", unless=as_json)
    if as_json:
        print_json(ImageRemoveDocument(format="imagefactory.image-remove/1", removed=list(names)))
    print_next_command("image", "prune")


def _sifs_of_images(layout: Layout) -> dict[str, list[tuple[str, str]]]:
    """Return subject and digest of the .sif files that belong to images, by the names in `image list`."""
    from imagefactory.oci.sif import stored_sifs

    references: dict[str, list[tuple[str, str]]] = {}
    for name, descriptor in layout.tags().items():
        with contextlib.suppress(StoreError):
            for record in stored_sifs(layout, layout.load(name, descriptor).manifest):
                references.setdefault(record.name, []).append((record.subject, record.digest))
    return references


@click.command(cls=Command)
@click.option("--fix", is_flag=True, help="Remove damaged data and rewrite damaged records.")
@json_option
@click.pass_obj
def image_check(call: CommandContext, fix: bool, as_json: bool) -> None:
    """Check the whole store for damage.

    \b
    imagefactory image check
    imagefactory image check --fix

    It compares all data with its checksums, and checks that each image is complete. It waits for running
    builds. A new build or pull restores what --fix removes.
    """
    from imagefactory.actions.store import check_store
    from imagefactory.oci.layout import Layout

    layout = Layout(call.settings.store_path)
    with exit_with_first_failure() as failures:
        scan = check_store(layout, call.progress, mend=fix)
        repaired = [fault.place for fault in scan.faults if fault.mended]
        for fault in scan.faults:
            if fault.mended:
                print_result(f"repaired: {fault.error.message}", unless=as_json)
            else:
                failures.of(fault.place).add(fault.error)
        if as_json:
            return print_json(
                ImageCheckDocument(
                    format="imagefactory.image-check/1",
                    blobs=scan.blobs,
                    bytes=scan.bytes,
                    records=scan.records,
                    tags=scan.tags,
                    repaired=repaired,
                    errors=failures.as_json(),
                )
            )
        print_result(
            f"{scan.blobs} blobs ({format_bytes(scan.bytes)}), {scan.records} records and {scan.tags} tags: "
            f"{f'{len(failures.errors)} damaged' if failures.errors else 'no damage'}"
        )
        if failures.errors and not fix:
            print_next_command("image", "check", "--fix")
    return None


@click.command(cls=Command)
@_registry_option
@click.option(
    "--older-than",
    default="",
    metavar="AGE",
    help="With --registry: remove candidates older than this: 30d, 12h, 2w.",
)
@click.option("--cache", is_flag=True, help="Also remove cached packages that no lock here names.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@json_option
@click.pass_obj
def image_prune(
    call: CommandContext, place: str | None, older_than: str, cache: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove what no image needs from the store or a registry.

    \b
    imagefactory image prune --dry-run
    imagefactory image prune
    imagefactory image prune --registry --older-than 30d

    In the store it removes data that no image uses, and sweeps older than 60 days. Verified images stay. It
    waits for running builds.

    In a registry it removes old candidates. A candidate stays if another tag points to it, if it is
    verified, or if the time of its push is unknown. The registry frees the disk space by its own garbage
    collection.
    """
    if place is None:
        reject_conflict(
            older_than, "--older-than requires --registry", "add --registry or remove --older-than"
        )
        return _prune_store(call, cache=cache, dry_run=dry_run, as_json=as_json)
    reject_conflict(cache, "--cache and --registry exclude each other", "remove one of them")
    if not older_than:
        raise UsageError("argument-missing", "--registry requires an age here", hint="add --older-than 30d")
    return _prune_registry(call, place, older_than, dry_run=dry_run, as_json=as_json)


def _prune_store(call: CommandContext, *, cache: bool, dry_run: bool, as_json: bool) -> None:
    from imagefactory.actions.store import collect_cache, collect_sweeps, retained_digests
    from imagefactory.oci.layout import Layout
    from imagefactory.oci.maintenance import collect

    factory = call.factory if cache else None
    layout, progress = Layout(call.settings.store_path), call.progress
    access = call.access
    now = datetime.now(UTC)
    with exit_with_first_failure() as failures:
        gc = collect(layout, progress, lambda: retained_digests(access, now), dry_run=dry_run)
        sweeps = collect_sweeps(access, now, dry_run=dry_run)
        emptied = collect_cache(factory, progress, dry_run=dry_run) if factory else None
        freed = emptied.bytes if emptied else 0
        for name, error in (*gc.damaged, *gc.stuck, *sweeps.stuck, *(emptied.stuck if emptied else ())):
            with failures.of(name):
                raise error
        if as_json:
            return print_json(
                ImagePruneDocument(
                    format="imagefactory.image-prune/1",
                    dry_run=dry_run,
                    blobs=gc.blobs,
                    unpacked=gc.unpacked,
                    records=gc.records,
                    bytes=gc.bytes,
                    sweep_bytes=sweeps.bytes,
                    cache_bytes=freed,
                    errors=failures.as_json(),
                )
            )
        verb = "would free" if dry_run else "freed"
        print_result(f"{verb} {format_bytes(gc.bytes)}: {gc.blobs} blobs, {gc.unpacked} unpacked layers")
        print_result(f"{verb} {format_bytes(sweeps.bytes)} of old sweeps", unless=not sweeps.bytes)
        if cache:
            print_result(f"{verb} {format_bytes(freed)} of the cache")
    if dry_run:
        print_next_command("image", "prune", *(("--cache",) if cache else ()))
    return None


def _list_registry(call: CommandContext, names: tuple[str, ...], registry: str, *, as_json: bool) -> None:
    from imagefactory.actions.store import list_registry
    from imagefactory.views.images import format_repositories

    factory = call.factory
    with exit_with_first_failure(factory, names):
        shelves = list_registry(factory, choose_targets(factory, names), registry, call.progress)
        if as_json:
            repositories = [
                RegistryRepositoryRow(
                    registry=shelf.registry,
                    repository=shelf.repository,
                    tags=[_tag_json(tag) for tag in shelf.tagged],
                )
                for shelf in shelves
            ]
            return print_json(
                RegistryListDocument(format="imagefactory.registry-list/1", repositories=repositories)
            )
        print_result(format_repositories(shelves, terminal_width()))
    images = [(shelf, row) for shelf in shelves for row in shelf.tagged if row.kind != "sources"]
    if not images:
        return None
    shelf, row = images[0]
    return print_next_command("pull", f"{shelf.registry}/{shelf.repository}:{row.tag}")


def _tag_json(tag: TagTarget) -> RegistryTagRow:
    return RegistryTagRow(tag=tag.tag, type=tag.kind, digest=tag.digest, size=tag.size)


def _prune_registry(
    call: CommandContext, place: str, older_than: str, *, dry_run: bool, as_json: bool
) -> None:
    from imagefactory.access import registry_place
    from imagefactory.actions.store import prune_registry
    from imagefactory.views.images import format_pruned

    factory, progress = call.factory, call.progress
    registry_place(factory, place)
    now = datetime.now(UTC)
    before = now - parse_age(older_than)
    results: list[PrunedRepositoryRow] = []
    # The repository of an invalid recipe's family stays as it is: only the recipe names its plain tags.
    with exit_with_first_failure(factory) as failures:
        for family in sorted({target.family for target in factory.targets}):
            with failures.of(family):
                pruned = prune_registry(
                    factory, family, before, now, progress, registry=place, dry_run=dry_run
                )
                results.append(_pruned_json(pruned))
                print_result(format_pruned(pruned, dry_run=dry_run), unless=as_json)
        if as_json:
            print_json(
                RegistryPruneDocument(
                    format="imagefactory.registry-prune/1",
                    dry_run=dry_run,
                    before=before.isoformat(timespec="seconds"),
                    repositories=results,
                    errors=failures.as_json(),
                )
            )
    if dry_run:
        registry = ("--registry", place) if place else ("--registry",)
        print_next_command("image", "prune", "--older-than", older_than, *registry)


def parse_age(text: str) -> timedelta:
    """Parse `30d`, `12h` or `2w`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,5})([hdw])", text)
    if not match:
        raise UsageError(
            "option-invalid", f"'{text}' is not an age", hint="write hours, days or weeks: 12h, 30d, 2w"
        )
    return timedelta(hours=int(match[1]) * {"h": 1, "d": 24, "w": 168}[match[2]])


def _pruned_json(pruned: PruneResult) -> PrunedRepositoryRow:
    return PrunedRepositoryRow(
        registry=pruned.registry,
        repository=pruned.repository,
        candidates=[
            {
                **_tag_json(decision.candidate),
                "pushed": decision.candidate.pushed.isoformat() if decision.candidate.pushed else None,
                "removed": decision.remove,
                "reason": decision.why,
            }
            for decision in pruned.fates
        ],
    )
