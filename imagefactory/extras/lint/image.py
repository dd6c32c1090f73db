"""The image of a submit file: how it is named, what a machine needs for it, which of a catalogue it is. Pure.

How condor_submit takes a name was seen with 23.9's `-dry-run`: what begins with `docker:` is docker's, what
ends in `.sif` a file, and all else, names in quotes and `.SIF` too, an unpacked sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from imagefactory.catalogue.model import CataloguedImage, CataloguedSif, Offer
from imagefactory.errors import FactoryError
from imagefactory.oci.store import parse_reference
from imagefactory.schedulers.pool import MACHINE_HAS, ImageKind
from imagefactory.extras.lint.classads import literal
from imagefactory.submit.check.language import Jobs
from imagefactory.jobs.offer import Grounds, proven_grounds

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

    image: CataloguedImage
    sif: CataloguedSif | None = None

    def grounds(self, offer: Offer) -> Grounds:
        """What its own verdicts say: one on an image says nothing of a .sif."""
        if self.sif is None:
            return proven_grounds(offer.judged, self.image.revoked_of(self.image.subject))
        digest = self.sif.sha256
        return next(
            (
                proven_grounds(one.judged, self.image.revoked_of(one.sif.subject))
                for one in offer.sifs
                if one.sif.sha256 == digest
            ),
            Grounds(classes=(), refused=()),
        )


def read_image(jobs: Jobs) -> JobImage | None:
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
        found = parse_reference(_whole(re.sub(r"^(docker|oras):(//)?", "", address)))
    except FactoryError:
        return unread
    repository = f"{found.registry}/{found.repository}"
    return replace(unread, repository=repository, tag=found.tag, digest=found.digest)


def _whole(name: str) -> str:
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


def find_known(image: JobImage, images: Iterable[CataloguedImage]) -> KnownImage | None:
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


def instead(image: JobImage, images: Iterable[CataloguedImage]) -> tuple[CataloguedImage, ...]:
    """The images of a catalogue that lie in the same repository and have a version that the tag names."""
    alike = [one for one in images if one.reference.partition("@")[0] == image.repository]
    named = [one for one in alike if image.tag.startswith(f"{one.version}-") or one.version == image.tag]
    return tuple(named or alike)
