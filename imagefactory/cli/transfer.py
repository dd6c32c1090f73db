"""The commands that move images: push, pull, copy and export."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    SifRow,
    complete_targets,
    exit_with_first_failure,
    has_gpu,
    has_scheduler,
    json_option,
    next_after_build,
    only_with,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_result,
    registry_option,
    reject_conflict,
    sif_json,
    targets_argument,
)
from imagefactory.errors import BuildError, UsageError
from imagefactory.plugins import has_extra, load_extra
from imagefactory.progress import format_bytes

if TYPE_CHECKING:
    from imagefactory.actions.transfer import PlatformIndexPush, PullResult, PushResult, SourcesPush
    from imagefactory.oci.transfer import TransferResult


class SentBlobsRow(TypedDict):
    sent: int
    mounted: int
    """Blobs that the registry took from another of its repositories."""
    present: int


class TransferFields(TypedDict):
    tags: dict[str, str]
    """Each further tag and its digest."""
    bytes_sent: int
    blobs: SentBlobsRow
    seconds: float


class PlatformIndexRow(TypedDict):
    reference: str
    platforms: list[str]
    digest: str
    tags: dict[str, str]


class PushedSourcesRow(TransferFields):
    """The locked files of `--with-sources`."""

    reference: str
    digest: str
    files: int
    size: int
    base: str
    """The image of a pulled base, which is not among the files; empty for a base of Debian packages."""
    signed_by: str | None
    """The key that signed the statement about the Debian packages."""


class PushRow(TransferFields):
    target: str
    reference: str
    registry: str
    repository: str
    tag: str
    digest: str
    manifest: str
    file: NotRequired[str]
    """The name of a .sif file."""
    index: NotRequired[PlatformIndexRow]
    """The index that has the images of several platforms."""
    attached: NotRequired[dict[str, str]]
    """The artifacts of `--sbom`."""
    sources: NotRequired[PushedSourcesRow]


class PushDocument(TypedDict):
    """The pushed images."""

    format: Literal["imagefactory.push/1"]
    results: list[PushRow]
    errors: list[ErrorRow]


class ReceivedBlobsRow(TypedDict):
    received: int
    present: int


class PullDocument(TypedDict):
    """The pulled image."""

    format: Literal["imagefactory.pull/1"]
    reference: str
    name: str
    digest: str
    complete: bool
    """False if only one platform of an index was pulled."""
    bytes_received: int
    blobs: ReceivedBlobsRow
    seconds: float


class PullSifDocument(TypedDict):
    """The .sif file that was pulled or built."""

    format: Literal["imagefactory.pull-sif/1"]
    reference: str
    path: str
    sha256: str
    size: int
    origin: str


class ImageCopyDocument(TransferFields):
    """The image that was copied to another registry."""

    format: Literal["imagefactory.image-copy/1"]
    dry_run: bool
    """Whether nothing was copied, and the numbers are predictions."""
    source: str
    destination: str
    digest: str
    before: str
    """The digest that the tag of the destination pointed to; empty for none."""
    sources: list[str]
    """The copies of its locked packages, with `--referrers`."""


class ImageExportDocument(TypedDict):
    """The archive of an image."""

    format: Literal["imagefactory.image-export/1"]
    target: str
    path: str
    type: str
    size: int
    digest: str


class SourcesExportDocument(TypedDict):
    """The directory with the locked files of a target."""

    format: Literal["imagefactory.image-export-sources/1"]
    target: str
    path: str
    files: int
    copied: int
    """The files that the directory did not have yet."""
    size: int
    base: str
    """The image of a pulled base, which is not in the directory; empty for a base of Debian packages."""


class SifExportDocument(SifRow):
    """The .sif file of an image."""

    format: Literal["imagefactory.image-export-sif/1"]
    target: str


@click.command(cls=Command)
@targets_argument(required=True)
@section("Where")
@registry_option
@click.option("--tag", "tags", multiple=True, metavar="NAME", help="Also set this tag.")
@section("What")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["image", "sif"]),
    default="image",
    show_default=True,
    help="sif pushes a .sif file, for `apptainer pull oras://`.",
)
@click.option(
    "--compression",
    type=click.Choice(["fast", "small"]),
    help="How to compress the .sif file.  [default: fast]",
)
@only_with(
    "sbom",
    click.option(
        "--sbom", is_flag=True, help="Attach the bill of materials and, if you have a key, the provenance."
    ),
)
@click.option(
    "--with-sources", is_flag=True, help="Also push the locked packages, to build it again years later."
)
@json_option
@click.pass_obj
def push(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    place: str,
    tags: tuple[str, ...],
    kind: str,
    compression: str | None,
    with_sources: bool,
    as_json: bool,
    sbom: bool = False,
) -> None:
    """Push images to a registry, under tags that never move.

    \b
    imagefactory push pytorch-2.3-cu121
    imagefactory push pytorch-2.3-cu121 --registry registry.example.org/gpu
    imagefactory push pytorch-2.3-cu121 --with-sources

    Log in with `docker login` first. After an interruption, run it again: only missing data is sent.
    """
    from imagefactory.actions.transfer import (
        PushOptions,
        check_push,
        plain_name,
        push_sources,
        push_target,
    )
    from imagefactory.actions.verdicts import signing_key
    from imagefactory.views.images import format_pushed, format_pushed_sources

    factory = call.factory
    selection = factory.select(names)
    named = {(target.family, plain_name(target)) for target in selection}
    reject_conflict(
        tags and len(named) > len({family for family, _ in named}),
        "--tag does not apply to two targets of one family: a tag points to one image",
        "push them one by one",
    )
    reject_conflict(
        compression and kind != "sif",
        "--compression requires --format sif",
        "add --format sif or remove --compression",
    )
    reject_conflict(
        sbom and kind == "sif", "--sbom does not apply to --format sif", "remove --sbom, or push the image"
    )
    sif = (compression or "fast") if kind == "sif" else ""
    push_options = PushOptions(registry=place, tags=tags, now=datetime.now(UTC), sif=sif)
    if len(selection) > 1 or sif:
        check_push(factory, push_options)
    attest = load_extra("sbom.attest:attester")(factory, push_options.now) if sbom else None
    key = signing_key(factory, push_options.now) if with_sources else None
    results: list[PushRow] = []
    with exit_with_first_failure() as failures:
        for target in selection:
            with failures.of(target.name):
                pushed = push_target(factory, target, push_options, call.progress)
                results.append(pushed_json(pushed))
                print_result(format_pushed(pushed), unless=as_json)
                if attest:
                    attested = attest(pushed, call.progress)
                    results[-1]["attached"] = dict(attested.artifacts)
                    print_result(attested.text, unless=as_json)
                if with_sources:
                    sources = push_sources(factory, pushed, key, push_options.now, call.progress)
                    results[-1]["sources"] = _sources_json(sources)
                    print_result(format_pushed_sources(sources), unless=as_json)
                    if sources.debs and not key:
                        call.progress.note(
                            "create a key and push again to sign them: imagefactory key create NAME"
                        )
        if as_json:
            print_json(PushDocument(format="imagefactory.push/1", results=results, errors=failures.as_json()))
    if kind != "sif":
        on_gpus = {target.name for target in selection if target.gpu}
        references = [row["reference"] for row in results if row["target"] in on_gpus]
        gpu, scheduler = has_gpu(), has_scheduler()
        # The addresses of several are longer than a terminal, and a sweep has names of targets.
        by_name = len(references) > 1 if gpu else references and scheduler
        images = names if by_name else references
        print_next_command(*next_after_build(names, images, gpu=gpu, scheduler=scheduler, pushed=True))


def pushed_json(pushed: PushResult) -> PushRow:
    image_reference = pushed.reference
    sent = _transfer_json(pushed.sent)
    row = PushRow(
        target=pushed.target.name,
        reference=str(image_reference),
        registry=image_reference.registry,
        repository=image_reference.repository,
        tag=image_reference.tag,
        digest=image_reference.digest,
        manifest=pushed.manifest,
        tags=sent["tags"],
        bytes_sent=sent["bytes_sent"],
        blobs=sent["blobs"],
        seconds=sent["seconds"],
    )
    if pushed.file:
        row["file"] = pushed.file
    if pushed.joined:
        row["index"] = _platform_index_json(pushed.joined)
    return row


def _sources_json(pushed: SourcesPush) -> PushedSourcesRow:
    return PushedSourcesRow(
        {
            "reference": str(pushed.reference),
            "digest": pushed.reference.digest,
            "files": pushed.files,
            "size": pushed.size,
            "base": pushed.base,
            "signed_by": pushed.signer or None,
            **_transfer_json(pushed.sent),
        }
    )


def _platform_index_json(joined: PlatformIndexPush) -> PlatformIndexRow:
    return PlatformIndexRow(
        reference=str(joined.reference),
        platforms=list(joined.platforms),
        digest=joined.reference.digest,
        tags=dict(joined.sent.tags),
    )


def _transfer_json(sent: TransferResult) -> TransferFields:
    return TransferFields(
        tags=dict(sent.tags),
        bytes_sent=sent.bytes_sent,
        blobs=SentBlobsRow(sent=sent.sent, mounted=sent.mounted, present=sent.present),
        seconds=sent.seconds,
    )


# --- imagefactory pull


@click.command(cls=Command)
@click.argument("name", metavar="TARGET|REFERENCE", shell_complete=complete_targets)
@registry_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["image", "sif"]),
    default="image",
    show_default=True,
    help="sif writes a .sif file: the registry's, or one that apptainer builds here.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the .sif file to this path.  [default: a name with its sha256, here]",
)
@json_option
@click.pass_obj
def pull(
    call: CommandContext, /, *, name: str, place: str, kind: str, output: Path | None, as_json: bool
) -> None:
    """Pull an image into the store and check every byte.

    \b
    imagefactory pull pytorch-2.3-cu121@sha256:...
    imagefactory pull pytorch-2.3-cu121:2.3-cu121-0123456789ab
    imagefactory pull registry.example.org/gpu/pytorch:2.3-cu121

    The pulled image becomes the image of the target in this store. Outside a project, TARGET is an image of
    the catalog that you joined, or CENTER/TARGET if you joined several centers.
    """
    from imagefactory.actions.centers import read_offer
    from imagefactory.actions.run import offered_reference
    from imagefactory.actions.transfer import (
        local_name,
        pull_image,
        pull_sif,
        target_reference,
    )
    from imagefactory.oci.layout import reference
    from imagefactory.oci.store import parse_reference
    from imagefactory.views.images import format_pulled, format_pulled_sif

    platform = ""
    if not place and _is_cataloged(call, name):
        shelf = read_offer(call.settings, os.environ, name, datetime.now(UTC))
        call.progress.note(shelf.source)
        print_catalog_notes(shelf.notes)
        access, image = call.access, shelf.offers[0].image
        image_reference = offered_reference(image, sif=kind == "sif")
        local_target, file, platform = local_name(access, image_reference), image.target, image.platform
    elif "/" in name:
        if place:
            raise UsageError("option-conflict", f"'{name}' already has a registry", hint="remove --registry")
        access = call.access
        image_reference = parse_reference(name)
        local_target = local_name(access, image_reference)
        file = image_reference.repository.rpartition("/")[2]
    else:
        access = factory = call.factory
        target, image_reference = target_reference(factory, name, place)
        local_target, file, platform = reference(target), target.name, target.platform
    if kind == "sif":
        sif = pull_sif(
            access, image_reference, local_target, file, call.progress, output=output, platform=platform
        )
        if as_json:
            return print_json(
                PullSifDocument(
                    format="imagefactory.pull-sif/1",
                    reference=str(sif.reference),
                    path=str(sif.path),
                    sha256=sif.sha256,
                    size=sif.size,
                    origin=sif.how,
                )
            )
        return print_result(format_pulled_sif(sif))
    if output:
        raise UsageError(
            "option-conflict", "--output requires --format sif", hint="add --format sif or remove --output"
        )
    pulled = pull_image(access, image_reference, local_target, call.progress, platform=platform)
    if as_json:
        return print_json(_pulled_json(pulled))
    print_result(format_pulled(pulled, access.settings.store.value))
    return print_next_command("run", pulled.name, "--", "python")


def _is_cataloged(call: CommandContext, name: str) -> bool:
    """Return whether a joined catalog has the name. If only `registry` is set, query the registry."""
    from imagefactory.actions.centers import names_center
    from imagefactory.project import uses_catalog

    settings = call.settings
    if not uses_catalog(settings):
        return False
    plain = not any(mark in name for mark in "/:@")
    joined = settings.centers or (settings.catalog.value and not settings.registry.value)
    return bool(plain and joined) or names_center(name, settings)


def _pulled_json(pulled: PullResult) -> PullDocument:
    sent = pulled.sent
    return PullDocument(
        format="imagefactory.pull/1",
        reference=str(pulled.reference),
        name=pulled.name,
        digest=pulled.digest,
        complete=pulled.whole,
        bytes_received=sent.bytes_sent,
        blobs=ReceivedBlobsRow(received=sent.sent, present=sent.present + sent.mounted),
        seconds=sent.seconds,
    )


# --- imagefactory image copy


@click.command(cls=Command)
@click.argument("source", metavar="SOURCE")
@click.argument("destination", metavar="DESTINATION")
@click.option(
    "--referrers", is_flag=True, help="Also copy its verdicts, other artifacts and locked packages."
)
@click.option("--dry-run", is_flag=True, help="Print what would be copied; copy nothing.")
@json_option
@click.pass_obj
def copy(
    call: CommandContext, source: str, destination: str, referrers: bool, dry_run: bool, as_json: bool
) -> None:
    """Copy an image to another registry. Its digest stays.

    \b
    imagefactory image copy --dry-run a.example.org/jax:0.4 b.example.org/jax:0.4
    imagefactory image copy a.example.org/pytorch:2.3 b.example.org/pytorch:2.3

    Nothing is stored on this machine. An existing tag is moved to the image.
    """
    from imagefactory.actions.transfer import copy_image
    from imagefactory.oci.store import parse_reference
    from imagefactory.views.images import format_copied

    copied = copy_image(
        call.access,
        parse_reference(source),
        parse_reference(destination),
        datetime.now(UTC),
        call.progress,
        referrers=referrers,
        dry_run=dry_run,
    )
    if as_json:
        image_reference = copied.destination
        return print_json(
            ImageCopyDocument(
                {
                    "format": "imagefactory.image-copy/1",
                    "dry_run": dry_run,
                    "source": str(copied.source),
                    "destination": str(image_reference),
                    "digest": image_reference.digest,
                    "before": copied.before,
                    "sources": [str(other.destination) for other in copied.sources],
                    **_transfer_json(copied.sent),
                }
            )
        )
    print_result(format_copied(copied, dry_run=dry_run))
    return None if dry_run else print_next_command("verdict", "list", str(copied.destination))


# --- imagefactory image export


@click.command(cls=Command)
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@click.option(
    "--format",
    "kind",
    type=click.Choice(
        [
            *("oci-archive", "docker-archive", "sif", "sqsh", "sources"),
            *(["module"] if has_extra("modules") else []),
        ]
    ),
    default="oci-archive",
    show_default=True,
    help=(
        "oci-archive is for Podman, skopeo and Apptainer, docker-archive for `docker load`, sif for "
        "Apptainer, sqsh for enroot and pyxis, module for `module load`. sources are the locked packages, to "
        "build it again years later."
    ),
)
@click.option(
    "--compression",
    type=click.Choice(["fast", "small"]),
    help="How to compress .sif and .sqsh. small takes much longer and saves some space.  [default: fast]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=(
        "The file, or the directory of modules or sources.  [default: TARGET.FORMAT.tar, TARGET-SHA256.sif, "
        "TARGET.sqsh, modules, or the setting sources]"
    ),
)
@json_option
@click.pass_obj
def export(
    call: CommandContext, name: str, kind: str, compression: str | None, output: Path | None, as_json: bool
) -> None:
    """Write an image as a file or a module, or write its packages.

    \b
    imagefactory image export pytorch-2.3-cu121 --format docker-archive
    imagefactory image export pytorch-2.3-cu121 --format sif
    imagefactory image export pytorch-2.3-cu121 --format sqsh
    imagefactory image export pytorch-2.3-cu121 --format module -o /software/gpu
    imagefactory image export pytorch-2.3-cu121 --format sources -o /archive

    Slurm's plugin pyxis starts a .sqsh file: srun --container-image=./FILE.sqsh.

    A module works with Lmod and Environment Modules. It has a wrapper for each program of the image, which
    runs it by Apptainer with the GPUs of the machine. All machines must see its directory.
    """
    if compression and kind not in ("sif", "sqsh"):
        raise UsageError(
            "option-conflict",
            "--compression requires --format sif or sqsh",
            hint="add --format sif or remove --compression",
        )
    if kind == "sources":
        return _export_sources(call, name, output, as_json=as_json)
    if kind == "module":
        return _export_module(call, name, output or Path("modules"), as_json=as_json)
    if kind == "sif":
        return _export_sif(call, name, (compression or "", output), as_json=as_json)
    from imagefactory.actions.images import stored_image
    from imagefactory.build.sif import write_sqsh
    from imagefactory.oci.archive import export as export_image

    factory, progress = call.factory, call.progress
    target = factory.select_single(name)
    path = output or Path(f"{target.name}.sqsh" if kind == "sqsh" else f"{target.name}.{kind}.tar")
    with factory.layout.in_use(progress):
        image = stored_image(factory, target)
        if image is None:
            raise BuildError(
                "image-not-built",
                f"{target.name} is not built",
                hint=f"run imagefactory build {target.name}",
            )
        with progress.stage(f"{target.name}: export {kind}"):
            if kind == "sqsh":
                write_sqsh(
                    factory.layout,
                    image,
                    path,
                    compression=compression or "fast",
                    workers=call.settings.worker_count,
                    progress=progress,
                )
            else:
                export_image(factory.layout, image, path, kind=kind, progress=progress)
    if as_json:
        return print_json(
            ImageExportDocument(
                format="imagefactory.image-export/1",
                target=target.name,
                path=str(path),
                type=kind,
                size=path.stat().st_size,
                digest=image.digest,
            )
        )
    load = {
        "oci-archive": f"skopeo inspect oci-archive:{path}",
        "docker-archive": f"docker load --input {path}",
        "sqsh": f"srun --container-image={path if '/' in str(path) else f'./{path}'} python",
    }[kind]
    size = format_bytes(path.stat().st_size)
    print_result(f"wrote {path} ({size}), image {image.name}@{image.digest}\nread it: {load}")
    return None


def _export_sources(call: CommandContext, name: str, output: Path | None, *, as_json: bool) -> None:
    from imagefactory.actions.build import export_sources

    factory = call.factory
    directory = output or factory.settings.sources_path or Path("sources")
    exported = export_sources(factory, factory.select_single(name), directory, call.progress)
    if as_json:
        return print_json(
            SourcesExportDocument(
                format="imagefactory.image-export-sources/1",
                target=exported.target,
                path=str(directory),
                files=exported.files,
                copied=exported.copied,
                size=exported.size,
                base=exported.base,
            )
        )
    if exported.base:
        call.progress.note(f"the base {exported.base} is not in it: keep a copy in a registry")
    size = format_bytes(exported.size)
    return print_result(
        f"wrote {exported.files} files to {directory} ({size}, {exported.copied} new)\n"
        f'build from it: sources = "{directory.absolute()}" in your settings, then imagefactory build '
        f"{exported.target}"
    )


def _export_module(call: CommandContext, name: str, directory: Path, *, as_json: bool) -> None:

    factory = call.factory
    write_module = load_extra("modules.action:write_module")
    module = write_module(factory, factory.select_single(name), directory, call.progress)
    if as_json:
        return print_json(module.as_json())
    return print_result(module.text)


def _export_sif(call: CommandContext, name: str, options: tuple[str, Path | None], *, as_json: bool) -> None:
    from imagefactory.actions.transfer import export_sif

    factory = call.factory
    target = factory.select_single(name)
    compression, output = options
    sif, path = export_sif(factory, target, call.progress, compression=compression, output=output)
    if as_json:
        return print_json(
            SifExportDocument(
                {
                    **sif_json(sif),
                    "format": "imagefactory.image-export-sif/1",
                    "target": target.name,
                    "path": str(path),
                }
            )
        )
    source = f"made from {sif.made_from}" if sif.made_from else "built by apptainer from the definition"
    print_result(
        f"wrote {path} ({format_bytes(sif.file.size)}, {sif.compression}), {source}\n"
        f"sha256 {sif.file.digest.removeprefix('sha256:')}\ntry it: apptainer exec {path} python"
    )
    return None
