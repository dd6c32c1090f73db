"""imagefactory export."""

from __future__ import annotations

from pathlib import Path

import click

from imagefactory.cli.output import Call, complete_targets, json_option, made_json, say, say_json
from imagefactory.errors import BuildError, UsageError
from imagefactory.progress import format_bytes


@click.command()
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["oci-archive", "docker-archive", "sif"]),
    default="oci-archive",
    show_default=True,
    help="oci-archive for podman, skopeo, apptainer; docker-archive for `docker load`; sif for apptainer.",
)
@click.option(
    "--compression",
    type=click.Choice(["fast", "small"]),
    help="Of a .sif: small takes many times as long and saves a part.  [default: fast]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: TARGET.FORMAT.tar, or TARGET-<12 digits of its sha256>.sif",
)
@json_option
@click.pass_obj
def export(
    call: Call, name: str, kind: str, compression: str | None, output: Path | None, as_json: bool
) -> None:
    """Write an image as one file for docker, podman or apptainer.

    A .sif is made once and kept in the store with its image.
    """
    if kind == "sif":
        return _export_sif(call, name, (compression or "", output), as_json=as_json)
    if compression:
        raise UsageError(
            "option-conflict",
            "--compression requires --format sif",
            hint="add --format sif or remove --compression",
        )
    from imagefactory.oci.archive import export as export_image
    from imagefactory.recipes.expand import select_one
    from imagefactory.stages.stored import stored_image

    factory, progress = call.factory, call.progress
    target = select_one(factory.targets, name)
    path = output or Path(f"{target.name}.{kind}.tar")
    with factory.layout.in_use(progress):
        image = stored_image(factory, target)
        if image is None:
            raise BuildError(
                "image-not-built", f"{target.name} is not built", hint=f"imagefactory build {target.name}"
            )
        with progress.stage(f"{target.name}: export {kind}"):
            export_image(factory.layout, image, path, kind=kind, progress=progress)
    if as_json:
        value = {"target": target.name, "path": str(path), "kind": kind, "size": path.stat().st_size}
        return say_json("export", {**value, "digest": image.digest})
    load = {
        "oci-archive": f"skopeo inspect oci-archive:{path}",
        "docker-archive": f"docker load --input {path}",
    }[kind]
    size = format_bytes(path.stat().st_size)
    say(f"wrote {path} ({size}), image {image.name}@{image.digest}\nread it: {load}")
    return None


def _export_sif(call: Call, name: str, options: tuple[str, Path | None], *, as_json: bool) -> None:
    from imagefactory.recipes.expand import select_one
    from imagefactory.stages.export import SifExport, export_sif

    factory = call.factory
    target = select_one(factory.targets, name)
    compression, output = options
    sif, path = export_sif(factory, target, SifExport(compression=compression, output=output), call.progress)
    if as_json:
        artifact = {**made_json(sif), "path": str(path)}
        return say_json("export", {"target": target.name, "kind": "sif", **artifact})
    source = f"made from {sif.made_from}" if sif.made_from else "built by apptainer from the definition"
    say(
        f"wrote {path} ({format_bytes(sif.file.size)}, {sif.compression}), {source}\n"
        f"sha256 {sif.file.digest.removeprefix('sha256:')}\ntry it: apptainer exec {path} python"
    )
    return None
