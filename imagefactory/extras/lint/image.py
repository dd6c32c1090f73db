"""The image of a submit file: its name, what it requires of a machine, and its catalog entry. Pure functions.

condor_submit classifies names, as observed with `-dry-run` of 23.9: a name that starts with `docker:` is a
Docker image, one that ends in `.sif` is a file. Everything else, even `.SIF` and quoted names, is a sandbox
directory.
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
    """The image in a job file. `kind` is None for a sandbox.

    `key` is the submit command, or SINGULARITY for the attribute that older pools read. `repository`
    (HOST/NAME), `tag` and `digest` are the parts of a reference. `hexes` are the runs of 12 to 64 hex digits
    in a file name. `needs` is the machine attribute that the image requires, or "".
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
    """The catalog image in a job file. `sif` is set if the job names one of its .sif files."""

    image: CatalogImage
    sif: CatalogSif | None = None

    def grounds(self, offer: ImageOffer) -> ImageEvidence:
        """Return the evidence about the image. Verdicts of an image do not apply to its .sif files."""
        if self.sif is None:
            return verified_evidence(offer.judged, self.image.revoked_of(self.image.subject))
        digest = self.sif.sha256
        return next(
            (
                verified_evidence(row.judged, self.image.revoked_of(row.sif.subject))
                for row in offer.sifs
                if row.sif.sha256 == digest
            ),
            ImageEvidence(classes=(), refused=()),
        )


def read_image(jobs: QueueStatement) -> JobImage | None:
    """Return the image of a job, None if there is none or if it is known only at submission."""
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
    """Return an image, given by an address with a scheme or by a file name."""
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
    """Return an image, given by a reference, which is completed like in Docker.

    The image of an invalid reference has no repository.
    """
    unread = JobImage(key=key, address=address, kind=kind, needs=needs)
    try:
        reference = parse_reference(_full_reference(re.sub(r"^(docker|oras):(//)?", "", address)))
    except ImagefactoryError:
        return unread
    repository = f"{reference.registry}/{reference.repository}"
    return replace(unread, repository=repository, tag=reference.tag, digest=reference.digest)


def _full_reference(name: str) -> str:
    """Return a reference completed like in Docker: with docker.io, `library/` and `latest`."""
    if "/" not in name:
        name = f"docker.io/library/{name}"
    elif not has_host(name):
        name = f"docker.io/{name}"
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def has_host(name: str) -> bool:
    """Return whether Docker reads the first part of a name as a registry host."""
    host, slash, _ = name.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")


def find_catalog_image(image: JobImage, images: Iterable[CatalogImage]) -> KnownImage | None:
    """Return the catalog image with the digest of the job's index, manifest, artifact or file."""
    for cataloged in images:
        for sif in cataloged.sifs:
            sha256 = sif.sha256.removeprefix("sha256:")
            artifact = sif.reference.partition("@")[2]
            if image.digest and image.digest in (artifact, sif.subject.manifest, sif.subject.index):
                return KnownImage(image=cataloged, sif=sif)
            if any(sha256.startswith(part) for part in image.hexes):
                return KnownImage(image=cataloged, sif=sif)
        digests = (cataloged.reference.partition("@")[2], cataloged.subject.manifest, cataloged.subject.index)
        if image.digest and image.digest in digests:
            return KnownImage(image=cataloged)
    return None


def instead(image: JobImage, images: Iterable[CatalogImage]) -> tuple[CatalogImage, ...]:
    """Return the catalog images in the same repository; if the tag has a version, only those with it."""
    alike = [image_ for image_ in images if image_.reference.partition("@")[0] == image.repository]
    named = [
        image_
        for image_ in alike
        if image.tag.startswith(f"{image_.version}-") or image_.version == image.tag
    ]
    return tuple(named or alike)


# --- Findings about image names, and how to pin the same image. Pure


_REFERENCE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9._-]+)*(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})"
)
"""Image references that are unlikely to be names of directories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutableNames:
    """The facts to resolve mutable names: the site, the catalog images, and a query for the digest of a
    tag.
    """

    site: Site
    images: Sequence[CatalogImage]
    digest: Callable[[str], str]


def image_findings(
    jobs: QueueStatement, image: JobImage | None, around: MutableNames
) -> Iterator[SubmitFinding]:
    """Yield the findings about the image name."""
    keys = ("container_image", "docker_image", SINGULARITY)
    if image is None:
        if jobs.requests_gpus and not any(jobs.unknown(key) for key in keys):
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
    """Report names that condor_submit interprets in another way."""
    address, line = image.address, setting.line
    if address[:1] in "\"'":
        image_address = address.strip("\"'")
        text = f"{image.key} has quotes, which HTCondor takes as part of the name"
        edits = _instead(setting, f"{setting.written} = {image_address}") if setting.value == address else ()
        yield wrong(line, "quoted", text, f"write {image.key} = {image_address}", edits=edits)
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
    image: JobImage, location: FileLocation, around: MutableNames, written: Callable[[str], str] | None = None
) -> Iterator[SubmitFinding]:
    """Report a mutable name. It is WRONG if the catalog has the image with a digest.

    `written` formats a reference for the file. By default, the scheme stays.
    """
    format_name = written or (lambda name: f"{image.kind}://{name}" if image.needs != "HasDocker" else name)
    if image.kind in (ImageKind.DOCKER, ImageKind.ORAS) and image.repository:
        text = f"'{image.tag}' is a tag, which may point to another image tomorrow"
        if images := instead(image, around.images):
            yield wrong(
                location.line,
                "tag",
                text,
                f"write {format_name(images[0].reference)}",
                column=location.column,
            )
            return
        digest = around.digest(f"{image.repository}:{image.tag}")
        hint = "write " + format_name(f"{image.repository}@{digest or 'sha256:...'}")
        yield advice(location.line, "tag", text, hint, column=location.column)
    elif image.kind in (ImageKind.SIF, ImageKind.OSDF):
        cached = "; the OSDF caches by name, so jobs may get an old file"
        text = f"'{image.address.rpartition('/')[2][:60]}' does not identify one version of the file"
        text += cached if image.kind is ImageKind.OSDF else ""
        hint = "add 12 digits of its sha256 to the name: torch-0123456789ab.sif"
        yield advice(location.line, "name", text, hint, column=location.column)


def _instead(setting: SubmitSetting, line: str) -> tuple[LineEdit, ...]:
    return (LineEdit(first=setting.line, last=setting.end, text=(line,)),)


# --- The image's status on the GPUs that a job can get. Pure


_FEW = 6


def grounds_of(known: KnownImage | None, around: CheckContext) -> ImageEvidence | None:
    """Return the verdicts and predictions of an image, None if it is not in the catalog."""
    if known is None:
        return None
    return expected_grounds(known.grounds(around.offer(known.image)), known.image)


def reached_by(places: Iterable[ReachableGpu], grounds: ImageEvidence | None) -> Iterator[ReachableGpus]:
    """Yield the reachable GPUs, grouped by capability and image status."""
    groups: dict[tuple[str, str, str], list[ReachableGpu]] = {}
    for gpu in places:
        word, reason = image_status_on(gpu.gpu, grounds)
        groups.setdefault((gpu.gpu.capability, word, reason), []).append(gpu)
    for (capability, word, reason), reached in sorted(
        groups.items(), key=lambda item: (natural(item[0][0]), item[0])
    ):
        yield ReachableGpus(
            capability=capability,
            gpus=len(reached),
            free=sum(gpu.gpu.free for gpu in reached),
            unsure=sum(bool(gpu.unsure) for gpu in reached),
            image=word,
            why=reason,
        )


def image_status_on(gpu: PoolGpu, grounds: ImageEvidence | None) -> tuple[str, str]:
    """Return the status of the image on a GPU and the reason, both empty if the image is unknown.

    Pools report the newest CUDA version of a driver, which decides. A GPU without it is not tested. A MIG
    slice is a separate class, without verdicts.
    """
    if grounds is None:
        return "", ""
    if not gpu.capability:
        return UNTESTED, f"no GPU is known by the name '{gpu.name[:40]}'"
    capability = parse_capability(gpu.capability)
    refused = next((reason for row, reason in grounds.refused if row == capability), "")
    gpu_class = next((row for row in grounds.classes if row.capability == capability), None)
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
    image: JobImage, known: KnownImage | None, catalog: Catalog | None, location: FileLocation, site: str = ""
) -> Iterator[SubmitFinding]:
    """Report a pinned image that is not in the catalog or has revoked verdicts, or that there is no
    catalog.
    """
    if catalog is None:
        text = "this machine has no catalog, so no verdict of this image is known"
        hint = "join your center: imagefactory site join ADDRESS|FILE"
        yield advice(location.line, "no-catalog", text, hint, column=location.column)
        return
    target, revoked = find_revoked(catalog.images, image.digest, image.hexes)
    if revoked and known is None:
        for row in revoked[:_FEW]:
            text = f"the verdicts of this image of {target} {row.where} were {row.summary}"
            hint = f"use another image: imagefactory job write {target}{site}"
            yield wrong(location.line, REVOKED, text, hint, column=location.column)
    elif known is None:
        text = "the image is not in the catalog, so no verdict of it is known"
        hint = f"use an image of the catalog: imagefactory job write TARGET{site}"
        yield wrong(location.line, "unknown-image", text, hint, column=location.column)


def unused_gpu_request(known: KnownImage, location: FileLocation, asks: str) -> SubmitFinding:
    """Report a GPU request for an image that is only for CPUs."""
    text = f"{known.image.target} is for CPUs only, so the job requests a GPU that it cannot use"
    return wrong(location.line, "no-use", text, f"remove {asks}", column=location.column)


def nowhere(known: KnownImage, grounds: ImageEvidence, location: FileLocation) -> SubmitFinding:
    text = f"{known.image.target} is not verified on any GPU"
    if grounds.revoked:
        row = grounds.revoked[0]
        text = f"{text}: its verdicts {row.where} were {row.summary}"
        return wrong(
            location.line, REVOKED, text, "choose another image: imagefactory search", column=location.column
        )
    return wrong(
        location.line,
        "unverified",
        text,
        "choose a verified image: imagefactory search",
        column=location.column,
    )


def revoked_on(known: KnownImage, row: RevokedCell, location: FileLocation) -> SubmitFinding:
    """Report revoked verdicts on GPUs that the jobs accept."""
    text = f"{known.image.target} {row.where}, which these jobs take, was {row.summary}"
    hint = f"write a file that matches only verified GPUs: imagefactory job write {known.image.target}"
    return wrong(location.line, REVOKED, text, hint, column=location.column)


def unverified(
    known: KnownImage, reached: Sequence[ReachableGpus], at: FileLocation, site: str = ""
) -> Iterator[SubmitFinding]:
    """Report reachable GPUs without a verdict. `site` is the `--site` option for the hint."""
    target = known.image.target
    words = (
        (REVOKED, "was revoked"),
        (UNUSABLE, "fails"),
        (UNTESTED, "is not verified"),
        (PREDICTED, "is not verified"),
    )
    for word, severity in words:
        rows = [row for row in reached if row.image == word]
        if rows:
            reasons = [row.why if row.why.startswith(word) else f"{word}: {row.why}" for row in rows[:_FEW]]
            location = "; ".join(
                f"{row.gpus} of {row.capability} ({reason})"
                for row, reason in zip(rows, reasons, strict=False)
            )
            count = sum(row.gpus for row in rows)
            gpus = "1 GPU that matches" if count == 1 else f"{count} GPUs that match"
            text = f"{target} {severity} on {gpus}: {location}"
            hint = f"write a file that matches only verified GPUs: imagefactory job write {target}{site}"
            rule = word if word in (UNUSABLE, REVOKED) else "unverified"
            yield wrong(at.line, rule, text, hint, column=at.column)


def narrow(
    known: KnownImage,
    grounds: ImageEvidence | None,
    places: Iterable[ReachableGpu],
    location: FileLocation,
    site: str = "",
) -> Iterator[SubmitFinding]:
    """Report verified GPUs that the jobs exclude."""
    missed = [gpu_match.gpu for gpu_match in places if gpu_match.unasked]
    more = [gpu.capability for gpu in missed if image_status_on(gpu, grounds)[0] == VERIFIED]
    if more:
        kinds = ", ".join(sorted(set(more), key=parse_capability))
        gpus = f"{len(more)} GPU{'s' * (len(more) != 1)}"
        text = f"it is also verified on {gpus} ({kinds}), which these jobs exclude"
        hint = f"write a file that includes them: imagefactory job write {known.image.target}{site}"
        yield advice(location.line, "narrow", text, hint, column=location.column)
