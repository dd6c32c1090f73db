"""What a catalogue says of an image beside its digests: versions, driver, predictions, its unpacked size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from imagefactory.errors import StoreError, ToolError
from imagefactory.project import Factory
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.cells import CellEvidence, answer_cell, ask
from imagefactory.gpu.drivers import cuda_floor, older, parse_driver
from imagefactory.gpu.frameworks import cuda_of
from imagefactory.gpu.knowledge.amd_gpus import processors
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.values import Answer, Basis, Claim, Contents, Package
from imagefactory.matrix.plan import weigh
from imagefactory.model import Lock, LockedConda, Target
from imagefactory.oci.inflate import DamagedError, plain_layer
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.layout import Layout
from imagefactory.oci.model import Image, Layer
from imagefactory.actions.plan import recall_contents

SIZES = "sizes"
"""Records of the store: what a layer has unpacked, by the digest of the packed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """`version` of the framework and `runtime`, the CUDA that came, `driver` and `minor_compat` as
    CataloguedImage has them."""

    version: str
    runtime: str
    driver: str
    minor_compat: bool


def facts_of(target: Target, lock: Lock | None, predicted: Sequence[tuple[str, Claim]]) -> ImageFacts:
    """What is known of an image by its lock, without one by its target alone.

    Programs of a CUDA major start on the first driver of that major (gpu/drivers.py, rule R6), unless their
    code is packed so that older drivers cannot read it (R7); what must be compiled from PTX needs more, and
    its claim says so. `driver` is the lowest of what runs as machine code, and `minor_compat` says whether
    that is the major's first.
    """
    packages = lock.packages if lock else ()
    names = {target.framework, target.framework.replace("_", "-").lower()}
    version = next((package.version for package in packages if package.name in names), target.version)
    contents = Contents(
        source="the lock",
        libraries=(),
        packages=tuple(
            Package(
                name=package.name,
                version=package.version,
                build=package.build if isinstance(package, LockedConda) else "",
            )
            for package in packages
        ),
    )
    if not target.gpu or rocm_of(target.cuda):
        return ImageFacts(version=version, runtime="", driver="", minor_compat=False)
    runtime = cuda_of(contents) or target.cuda
    floor = cuda_floor(runtime).driver
    native = [claim.driver for _, claim in predicted if claim.answer is Answer.YES and claim.driver]
    driver = min(native, key=parse_driver, default=floor)
    return ImageFacts(
        version=version,
        runtime=runtime,
        driver=driver,
        minor_compat=bool(floor and driver and not older(floor, driver)),
    )


def predicted_claims(
    factory: Factory, target: Target, lock: Lock | None, image: Image | None
) -> tuple[tuple[str, Claim], ...]:
    """What one expects of each known capability, by rule plan.weigh: a reason against it comes first, and
    behind it known faults that some calls meet there. Nothing of an image whose lock is not known, or
    that is for CPUs.
    """
    if lock is None or not target.gpu:
        return ()
    evidence = CellEvidence(contents=recall_contents(factory.layout, image) if image else None)
    found = []
    for capability in processors() if rocm_of(target.cuda) else capabilities():
        ruling = weigh(answer_cell(ask(target, lock, capability), evidence), frozenset())
        if ruling.claim is not None and ruling.claim.basis is not Basis.VERIFIED:
            faults = (claim for claim in ruling.warnings if claim.is_fault)
            found += [(str(capability), claim) for claim in (ruling.claim, *faults)]
    return tuple(found)


def unpacked_size(layout: Layout, image: Image) -> int:
    """Bytes of the layers' tars together, 0 where one cannot be read here. Each is read once, then known."""
    try:
        return sum(_plain_size(layout, layer) for layer in image.layers)
    except (StoreError, ToolError, DamagedError, OSError):
        return 0


def _plain_size(layout: Layout, layer: Layer) -> int:
    key = layer.descriptor.digest.removeprefix("sha256:")
    known = layout.recall(SIZES, key)
    if known and isinstance(known.get("size"), int):
        return int(known["size"])
    with layout.blob_path(layer.descriptor.digest).open("rb") as file:
        chunks = iter(lambda: file.read(CHUNK), b"")
        size = sum(map(len, plain_layer(layer.descriptor.media_type, chunks)))
    with suppress(StoreError):  # a full disk: it is measured again
        layout.record(SIZES, key, {"size": size})
    return size
