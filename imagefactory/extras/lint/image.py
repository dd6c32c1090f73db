"""The image of a submit file: how it is named, what a machine needs for it, which of a catalogue it is. Pure.

How condor_submit takes a name was seen with 23.9's `-dry-run`: what begins with `docker:` is docker's, what
ends in `.sif` a file, and all else, names in quotes and `.SIF` too, an unpacked sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from imagefactory.errors import ImagefactoryError
from imagefactory.extras.lint.classads import literal
from imagefactory.extras.lint.findings import (
    PREDICTED,
    REVOKED,
    UNTESTED,
    UNUSABLE,
    VERIFIED,
    CheckContext,
    FileLocation,
    LineEdit,
    ReachableGpus,
    SubmitFinding,
    advice,
    wrong,
)
from imagefactory.extras.lint.reach import ReachableGpu
from imagefactory.extras.lint.reader import QueueStatement, SubmitSetting
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.jobs.offer import ImageEvidence, expected_grounds, verified_evidence
from imagefactory.oci.store import parse_reference
from imagefactory.schedulers.pool import MACHINE_HAS, ImageKind, PoolGpu
from imagefactory.schedulers.sites import Site
from imagefactory.trust.catalog import Catalog, CatalogImage, CatalogSif, ImageOffer
from imagefactory.trust.offers import find_revoked
from imagefactory.trust.verdict import RevokedCell
from imagefactory.versions import natural

SINGULARITY = "my.singularityimage"
_HEX = re.compile(r"(?<![0-9a-f])[0-9a-f]{12,64}(?![0-9a-f])")
_REMOTE = re.compile(r"(osdf|stash|pelican):", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobImage:
    """An image as a job names it. `kind` is None for a sandbox. `key` is the command that names it, or
    SINGULARITY for the attribute that pools read before HTCondor knew images.

    `repository` (HOST/NAME), `tag` and `digest` are of a reference, `hexes` the runs of 12 to 64 hex digits
    in the name of a file. `needs` is the attribute that a machine must have for it, empty for none.
    """

    key: str
    address: str
    kind: ImageKind | None
    needs: str
    repository: str = ""
    tag: str = ""
    digest: str = ""
    hexes: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        return bool(self.digest or self.hexes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownImage:
    """The image of a catalogue that a job names: `sif` where it is one of its files."""

    image: CatalogImage
    sif: CatalogSif | None = None

    def grounds(self, offer: ImageOffer) -> ImageEvidence:
        """What its own verdicts say: one on an image says nothing of a .sif."""
        if self.sif is None:
            return verified_evidence(offer.judged, self.image.revoked_of(self.image.subject))
        digest = self.sif.sha256
        return next(
            (
                verified_evidence(one.judged, self.image.revoked_of(one.sif.subject))
                for one in offer.sifs
                if one.sif.sha256 == digest
            ),
            ImageEvidence(classes=(), refused=()),
        )


def read_image(jobs: QueueStatement) -> JobImage | None:
    """The image of a job; None where it runs in none, or where only the submission tells which."""
    universe = jobs.value("universe").lower()
    keys = ("docker_image",) if universe == "docker" else ("container_image", "docker_image")
    key = next((key for key in (*keys, SINGULARITY) if jobs.value(key)), "")
    if not key or jobs.unknown(key):
        return None
    address = jobs.value(key)
    if key == SINGULARITY:
        text = literal(address)
        return replace(addressed(key, text), needs="") if isinstance(text, str) and text else None
    if key == "docker_image":
        needs = "HasDocker" if universe == "docker" else MACHINE_HAS[ImageKind.DOCKER]
        return referred(key, address, ImageKind.DOCKER, needs)
    return addressed(key, address)


def addressed(key: str, address: str) -> JobImage:
    """An image by an address with its scheme, or by the name of a file."""
    if address.startswith("docker:"):
        return referred(key, address, ImageKind.DOCKER, MACHINE_HAS[ImageKind.DOCKER])
    if address.endswith(".sif"):
        name = address.rpartition("/")[2]
        kind = ImageKind.OSDF if _REMOTE.match(address) else ImageKind.SIF
        hexes = tuple(dict.fromkeys(_HEX.findall(name)))
        return JobImage(key=key, address=address, kind=kind, needs=MACHINE_HAS[kind], hexes=hexes)
    if address.startswith("oras:"):
        return referred(key, address, ImageKind.ORAS, MACHINE_HAS[ImageKind.ORAS])
    return JobImage(key=key, address=address, kind=None, needs="HasSandboxImage")


def referred(key: str, address: str, kind: ImageKind, needs: str) -> JobImage:
    """An image by its reference, as docker completes it; without a repository where it is none."""
    unread = JobImage(key=key, address=address, kind=kind, needs=needs)
    try:
        found = parse_reference(_full_reference(re.sub(r"^(docker|oras):(//)?", "", address)))
    except ImagefactoryError:
        return unread
    repository = f"{found.registry}/{found.repository}"
    return replace(unread, repository=repository, tag=found.tag, digest=found.digest)


def _full_reference(name: str) -> str:
    """A reference as docker completes it: its hub's host, `library/` and `latest` where none are written."""
    if "/" not in name:
        name = f"docker.io/library/{name}"
    elif not has_host(name):
        name = f"docker.io/{name}"
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def has_host(name: str) -> bool:
    """Whether docker takes the first part of a name for a registry's host."""
    host, slash, _ = name.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")


def find_catalog_image(image: JobImage, images: Iterable[CatalogImage]) -> KnownImage | None:
    """The image of a catalogue that a job names by digest: of an index, a manifest, an artifact or a file."""
    for catalogued in images:
        for sif in catalogued.sifs:
            sha256 = sif.sha256.removeprefix("sha256:")
            artifact = sif.reference.partition("@")[2]
            if image.digest and image.digest in (artifact, sif.subject.manifest, sif.subject.index):
                return KnownImage(image=catalogued, sif=sif)
            if any(sha256.startswith(part) for part in image.hexes):
                return KnownImage(image=catalogued, sif=sif)
        own = (catalogued.reference.partition("@")[2], catalogued.subject.manifest, catalogued.subject.index)
        if image.digest and image.digest in own:
            return KnownImage(image=catalogued)
    return None


def instead(image: JobImage, images: Iterable[CatalogImage]) -> tuple[CatalogImage, ...]:
    """The images of a catalogue that lie in the same repository and have a version that the tag names."""
    alike = [one for one in images if one.reference.partition("@")[0] == image.repository]
    named = [one for one in alike if image.tag.startswith(f"{one.version}-") or one.version == image.tag]
    return tuple(named or alike)


# --- What is wrong with how a submit file names its image, and how to name the very same one for good. Pure


_REFERENCE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9._-]+)*(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})"
)
"""What no folder is called, and images are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutableNames:
    """What is known of names that may move: the site, a catalogue's images, a registry's word on a tag."""

    site: Site
    images: Sequence[CatalogImage]
    digest: Callable[[str], str]


def image_findings(
    jobs: QueueStatement, image: JobImage | None, around: MutableNames
) -> Iterator[SubmitFinding]:
    """All that can be said of a name alone."""
    keys = ("container_image", "docker_image", SINGULARITY)
    if image is None:
        if jobs.asks_gpus and not any(jobs.unknown(key) for key in keys):
            text = "the job uses no image, so no verdict applies to it"
            yield advice(
                jobs.line, "no-image", text, "write a file with an image: imagefactory job write TARGET"
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
        yield from moving(image, FileLocation(setting.line), around)


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
    image: JobImage, at: FileLocation, around: MutableNames, written: Callable[[str], str] | None = None
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


def _instead(setting: SubmitSetting, line: str) -> tuple[LineEdit, ...]:
    return (LineEdit(first=setting.line, last=setting.end, text=(line,)),)


# --- What is known of an image on the GPUs that a job can get, and what is told of it. Pure


_FEW = 6


def grounds_of(known: KnownImage | None, around: CheckContext) -> ImageEvidence | None:
    """What verdicts and predictions say of an image; None where it is not known at all."""
    if known is None:
        return None
    return expected_grounds(known.grounds(around.offer(known.image)), known.image)


def reached_by(places: Iterable[ReachableGpu], grounds: ImageEvidence | None) -> Iterator[ReachableGpus]:
    """The GPUs that jobs get, by capability and what is known there."""
    groups: dict[tuple[str, str, str], list[ReachableGpu]] = {}
    for place in places:
        word, why = image_status_on(place.gpu, grounds)
        groups.setdefault((place.gpu.capability, word, why), []).append(place)
    for (capability, word, why), own in sorted(groups.items(), key=lambda one: (natural(one[0][0]), one[0])):
        yield ReachableGpus(
            capability=capability,
            gpus=len(own),
            free=sum(place.gpu.free for place in own),
            unsure=sum(bool(place.unsure) for place in own),
            image=word,
            why=why,
        )


def image_status_on(gpu: PoolGpu, grounds: ImageEvidence | None) -> tuple[str, str]:
    """What is known of an image on one GPU, as a word of this room and why; two empty texts for nothing.

    Pools tell the newest CUDA that a driver takes, so that decides; a GPU that tells none is not known.
    A slice (MIG) is a class of its own, of which no verdict speaks.
    """
    if grounds is None:
        return "", ""
    if not gpu.capability:
        return UNTESTED, f"no GPU is known by the name '{gpu.name[:40]}'"
    capability = parse_capability(gpu.capability)
    refused = next((why for one, why in grounds.refused if one == capability), "")
    gpu_class = next((one for one in grounds.classes if one.capability == capability), None)
    if gpu_class is None:
        if revoked := grounds.revoked_on(capability):
            return REVOKED, revoked.summary
        return (UNUSABLE, refused) if refused else (UNTESTED, "the image has no verdict for it")
    if gpu.mig:
        return UNTESTED, "a slice of a GPU (MIG) is a class of its own"
    if gpu_class.cuda and not gpu.cuda:
        return UNTESTED, f"its driver is not known; the verdict applies from CUDA {gpu_class.cuda} on"
    if gpu_class.cuda and numbers(gpu.cuda) < numbers(gpu_class.cuda):
        return UNTESTED, f"its driver supports CUDA {gpu.cuda}; the verdict applies from {gpu_class.cuda} on"
    return (VERIFIED if gpu_class.verified else PREDICTED), gpu_class.claim.reason


def catalog_findings(
    image: JobImage, known: KnownImage | None, catalogue: Catalog | None, at: FileLocation, site: str = ""
) -> Iterator[SubmitFinding]:
    """Of an image that is pinned: whether there is a catalogue, it has that image, what was revoked of it."""
    if catalogue is None:
        text = "this machine has no catalog, so no verdict of this image is known"
        hint = "join your center: imagefactory site join ADDRESS|FILE"
        yield advice(at.line, "no-catalogue", text, hint, column=at.column)
        return
    target, revoked = find_revoked(catalogue.images, image.digest, image.hexes)
    if revoked and known is None:
        for row in revoked[:_FEW]:
            text = f"the verdicts of this image of {target} {row.where} were {row.summary}"
            hint = f"use another image: imagefactory job write {target}{site}"
            yield wrong(at.line, REVOKED, text, hint, column=at.column)
    elif known is None:
        text = "the image is not in the catalog, so no verdict of it is known"
        hint = f"use an image of the catalog: imagefactory job write TARGET{site}"
        yield wrong(at.line, "unknown-image", text, hint, column=at.column)


def no_use(known: KnownImage, at: FileLocation, asks: str) -> SubmitFinding:
    """An image for CPUs alone is proven on no GPU, and should get none."""
    text = f"{known.image.target} is for CPUs only, so the job requests a GPU that it cannot use"
    return wrong(at.line, "no-use", text, f"remove {asks}", column=at.column)


def nowhere(known: KnownImage, grounds: ImageEvidence, at: FileLocation) -> SubmitFinding:
    text = f"{known.image.target} is not verified on any GPU"
    if grounds.revoked:
        row = grounds.revoked[0]
        text = f"{text}: its verdicts {row.where} were {row.summary}"
        return wrong(at.line, REVOKED, text, "choose another image: imagefactory search", column=at.column)
    return wrong(
        at.line, "unverified", text, "choose a verified image: imagefactory search", column=at.column
    )


def revoked_on(known: KnownImage, row: RevokedCell, at: FileLocation) -> SubmitFinding:
    """An image whose verdicts on GPUs that the jobs take were taken back."""
    text = f"{known.image.target} {row.where}, which these jobs take, was {row.summary}"
    hint = f"write a file that matches only verified GPUs: imagefactory job write {known.image.target}"
    return wrong(at.line, REVOKED, text, hint, column=at.column)


def unverified(
    known: KnownImage, reached: Sequence[ReachableGpus], at: FileLocation, site: str = ""
) -> Iterator[SubmitFinding]:
    """GPUs that the jobs may get and where the image is not proven. `site` is an option of submit."""
    target = known.image.target
    words = (
        (REVOKED, "was revoked"),
        (UNUSABLE, "fails"),
        (UNTESTED, "is not verified"),
        (PREDICTED, "is not verified"),
    )
    for word, severity in words:
        found = [one for one in reached if one.image == word]
        if found:
            said = [one.why if one.why.startswith(word) else f"{word}: {one.why}" for one in found[:_FEW]]
            where = "; ".join(
                f"{one.gpus} of {one.capability} ({why})" for one, why in zip(found, said, strict=False)
            )
            count = sum(one.gpus for one in found)
            gpus = "1 GPU that matches" if count == 1 else f"{count} GPUs that match"
            text = f"{target} {severity} on {gpus}: {where}"
            hint = f"write a file that matches only verified GPUs: imagefactory job write {target}{site}"
            rule = word if word in (UNUSABLE, REVOKED) else "unverified"
            yield wrong(at.line, rule, text, hint, column=at.column)


def narrow(
    known: KnownImage,
    grounds: ImageEvidence | None,
    places: Iterable[ReachableGpu],
    at: FileLocation,
    site: str = "",
) -> Iterator[SubmitFinding]:
    """Proven GPUs that the jobs leave out."""
    missed = [place.gpu for place in places if place.unasked]
    more = [gpu.capability for gpu in missed if image_status_on(gpu, grounds)[0] == VERIFIED]
    if more:
        kinds = ", ".join(sorted(set(more), key=parse_capability))
        gpus = f"{len(more)} GPU{'s' * (len(more) != 1)}"
        text = f"it is also verified on {gpus} ({kinds}), which these jobs exclude"
        hint = f"write a file that includes them: imagefactory job write {known.image.target}{site}"
        yield advice(at.line, "narrow", text, hint, column=at.column)
