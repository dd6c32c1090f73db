"""What is wrong with how a submit file names its image, and how to name the very same one for good. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from imagefactory.catalogue.model import CataloguedImage
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import Site
from imagefactory.submit.check.findings import Edit, Spot, SubmitFinding, advice, wrong
from imagefactory.extras.lint.image import SINGULARITY, JobImage, instead
from imagefactory.submit.check.language import Jobs, SubmitSetting

_REFERENCE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9._-]+)*(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})"
)
"""What no folder is called, and images are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """What is known of names that may move: the site, a catalogue's images, a registry's word on a tag."""

    site: Site
    images: Sequence[CataloguedImage]
    digest: Callable[[str], str]


def image_findings(jobs: Jobs, image: JobImage | None, around: Moving) -> Iterator[SubmitFinding]:
    """All that can be said of a name alone."""
    keys = ("container_image", "docker_image", SINGULARITY)
    if image is None:
        if jobs.asks_gpus and not any(jobs.unknown(key) for key in keys):
            text = "the job uses no image, so no verdict applies to it"
            yield advice(
                jobs.line, "no-image", text, "write a file with an image: imagefactory submit TARGET"
            )
        return
    setting = jobs.settings[image.key]
    if image.key == SINGULARITY:
        yield _attribute(setting, image, around.site)
    yield from _named(image, setting)
    if jobs.value("universe").lower() == "docker" and jobs.value("container_image"):
        text = "container_image does not work in the docker universe, so condor_submit rejects the file"
        yield wrong(jobs.settings["container_image"].line, "universe", text, "write universe = container")
    if not image.pinned:
        yield from moving(image, Spot(setting.line), around)


def _attribute(setting: SubmitSetting, image: JobImage, site: Site) -> SubmitFinding:
    line = f"container_image = {image.address}"
    if site.migrated:
        text = f"{site.title} uses container_image, without quotes, instead of +SingularityImage"
        return advice(setting.line, "singularity", text, f"write {line}", edits=_instead(setting, line))
    text = "+SingularityImage works only in pools that read it; the HTCondor command is container_image"
    return advice(setting.line, "singularity", text, f"write {line}, without quotes")


def _named(image: JobImage, setting: SubmitSetting) -> Iterator[SubmitFinding]:
    """How condor_submit takes the name."""
    address, line = image.address, setting.line
    if address[:1] in "\"'":
        own = address.strip("\"'")
        text = f"{image.key} has quotes, which HTCondor takes as part of the name"
        edits = _instead(setting, f"{setting.written} = {own}") if setting.value == address else ()
        yield wrong(line, "quoted", text, f"write {image.key} = {own}", edits=edits)
    elif image.kind is None and (address.startswith("osdf:") or address.lower().endswith(".sif")):
        text = "the name does not end in .sif, so HTCondor expects an unpacked sandbox directory"
        yield wrong(line, "sandbox", text, "rename the file to *.sif")
    elif image.kind is None and _REFERENCE.fullmatch(address):
        text = f"HTCondor takes '{address[:60]}' as a directory with an unpacked image"
        yield wrong(line, "sandbox", text, f"write docker://{address[:60]}")
    elif image.kind is None:
        text = (
            f"HTCondor takes '{address[:60]}' as a directory with an unpacked image, which cannot be pinned"
        )
        yield advice(line, "sandbox", text, "use a .sif with digits of its sha256 in its name")
    elif image.kind in (ImageKind.DOCKER, ImageKind.ORAS) and not image.repository:
        yield wrong(
            line, "reference", f"'{address[:60]}' is not an image reference", "write HOST/NAME@sha256:..."
        )
    elif image.key == "docker_image" and address.startswith("docker:") and image.needs == "HasDocker":
        bare = address.partition("//")[2]
        edits = _instead(setting, f"{setting.written} = {bare}") if setting.value == address else ()
        text = "docker_image of the docker universe requires a name without docker://"
        yield wrong(line, "reference", text, f"write docker_image = {bare}", edits=edits)


def moving(
    image: JobImage, at: Spot, around: Moving, written: Callable[[str], str] | None = None
) -> Iterator[SubmitFinding]:
    """A name that may be another image tomorrow: wrong where a catalogue has the same under a digest.

    `written` is how a reference stands in that file; by default with what it begins with there.
    """
    said = written or (lambda name: f"{image.kind}://{name}" if image.needs != "HasDocker" else name)
    if image.kind in (ImageKind.DOCKER, ImageKind.ORAS) and image.repository:
        text = f"'{image.tag}' is a tag, which may point to another image tomorrow"
        if found := instead(image, around.images):
            yield wrong(at.line, "tag", text, f"write {said(found[0].reference)}", column=at.column)
            return
        digest = around.digest(f"{image.repository}:{image.tag}")
        hint = "write " + said(f"{image.repository}@{digest or 'sha256:...'}")
        yield advice(at.line, "tag", text, hint, column=at.column)
    elif image.kind in (ImageKind.SIF, ImageKind.OSDF):
        cached = "; the OSDF caches by name, so jobs may get an old file"
        text = f"'{image.address.rpartition('/')[2][:60]}' does not identify one version of the file"
        text += cached if image.kind is ImageKind.OSDF else ""
        hint = "add 12 digits of its sha256 to the name: torch-0123456789ab.sif"
        yield advice(at.line, "name", text, hint, column=at.column)


def _instead(setting: SubmitSetting, line: str) -> tuple[Edit, ...]:
    return (Edit(first=setting.line, last=setting.end, text=(line,)),)
