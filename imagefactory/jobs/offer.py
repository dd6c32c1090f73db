"""Find the GPUs on which an image may run, the form in which a job uses it, and matching GPUs of an
inventory. Pure.

A class of GPUs has a compute capability and the newest CUDA version that the driver supports. Pools report
this version for every GPU (`DriverVersion`), but often not the driver version. Drivers that support the same
CUDA version are in one class.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.drivers import older, parse_driver
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.oci.sif import sif_name
from imagefactory.oci.store import parse_reference
from imagefactory.schedulers.pool import ImageKind, Inventory, PoolGpu, PoolImage
from imagefactory.schedulers.sites import Site
from imagefactory.schedulers.sizes import MB
from imagefactory.settings.load import SIF_DIRECTORY
from imagefactory.trust.catalog import CatalogImage, ImageOffer
from imagefactory.trust.claims import verified_claims
from imagefactory.trust.verdict import RevokedCell, VerdictStatus, VerificationResult

_RUNS = (Compatibility.YES, Compatibility.PTX)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClass:
    """GPUs of one capability whose driver supports `cuda` (`12.4`) or newer; an empty `cuda` means any
    driver.

    `claim` is the reason, VERIFIED or PREDICTED. `faults` are known faults that affect some calls on these
    GPUs.
    """

    capability: Capability
    cuda: str
    claim: CellClaim
    faults: tuple[CellClaim, ...] = ()

    @property
    def verified(self) -> bool:
        return self.claim.basis is ClaimBasis.VERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEvidence:
    """The classes of GPUs that an image may use, and the excluded capabilities, each with a reason.

    `revoked` are revocations without a newer verdict. No prediction can override them.
    """

    classes: tuple[GpuClass, ...]
    refused: tuple[tuple[Capability, str], ...]
    revoked: tuple[RevokedCell, ...] = ()

    def revoked_on(self, capability: Capability) -> RevokedCell | None:
        """Return the newest revocation that covers a capability."""
        return next((row for row in self.revoked if row.capability in ("", str(capability))), None)

    @property
    def verified(self) -> bool:
        return any(gpu_class.verified for gpu_class in self.classes)


def verified_evidence(
    judged: Sequence[VerificationResult], revoked: Iterable[RevokedCell] = ()
) -> ImageEvidence:
    """Return the evidence in the valid verdicts of one image and its revocations.

    A class starts at the oldest driver from which on every verdict is `verified`. A pass is valid for its
    driver and newer ones until a newer driver fails (trust/claims.py).
    """
    cudas = _cudas(judged)
    classes, refused = [], []
    for capability in sorted({capability for capability, _ in cudas}):
        drivers = [driver for verified_capability, driver in cudas if verified_capability == capability]
        passed: list[tuple[str, CellClaim]] = []
        failure: CellClaim | None = None
        for driver in sorted(drivers, key=parse_driver, reverse=True):
            claim, cuda = verified_claims(judged, driver)[capability], cudas[capability, driver]
            if claim.answer is not Compatibility.YES:
                failure = claim
                passed = [row for row in passed if cuda and row[0] and numbers(row[0]) > numbers(cuda)]
                break
            passed.append((cuda, claim))
        known = [row for row in passed if row[0] or capability.processor]  # AMD drivers take no CUDA
        if known:
            classes.append(GpuClass(capability=capability, cuda=known[-1][0], claim=known[-1][1]))
        else:
            cause = f"{failure.rule}: {failure.reason}" if failure else "the CUDA of its driver is not known"
            refused.append((capability, cause))
    verified = {str(gpu_class.capability) for gpu_class in classes}
    rows = tuple(row for row in revoked if row.capability not in verified)
    failed = {capability for capability, _ in refused}
    reasons: dict[str, str] = {}
    for row in rows:
        if row.capability:
            reasons.setdefault(row.capability, row.summary)
    refused += [
        (parse_capability(text), reason)
        for text, reason in reasons.items()
        if parse_capability(text) not in failed
    ]
    return ImageEvidence(classes=tuple(classes), refused=tuple(refused), revoked=rows)


def expected_grounds(grounds: ImageEvidence, image: CatalogImage, *, faulty: bool = False) -> ImageEvidence:
    """Return the evidence of a form of `image`, with predictions for capabilities that have no verdict.

    Predictions come from a scan, never only from the page of a project. A prediction does not count if
    another claim says no, if no driver is known to be new enough, or if a known fault affects some calls
    (unless `faulty` is set).
    """
    decided = {gpu_class.capability for gpu_class in grounds.classes} | {
        capability for capability, _ in grounds.refused
    }
    predicted: dict[Capability, list[CellClaim]] = {}
    for text, claim in image.predicted:
        predicted.setdefault(parse_capability(text), []).append(claim)
    least_cuda = "" if image.minor_compat else image.runtime
    classes, refused = list(grounds.classes), list(grounds.refused)
    for capability, claims in sorted(predicted.items()):
        faults = tuple(claim for claim in claims if claim.is_fault)
        if capability in decided:
            classes = [
                replace(row, faults=faults) if row.capability == capability else row for row in classes
            ]
            continue
        if revoked := grounds.revoked_on(capability):
            refused.append((capability, revoked.summary))
            continue
        accepted = faults if faulty else ()
        denial = next((row for row in claims if row.answer not in _RUNS and row not in accepted), None)
        scan = next((row for row in claims if row.basis is ClaimBasis.PREDICTED), None)
        if denial or scan is None:
            claim = denial or claims[0]
            refused.append((capability, f"{claim.basis} {claim.answer}: {claim.reason}"))
            continue
        floors = [cuda_of_driver(scan.driver)] if scan.driver else []
        floors += [_major_minor(".".join([*least_cuda.split("."), "0"][:2]))] if least_cuda else []
        if not all(floors) or not floors:
            refused.append((capability, f"which drivers are new enough is not known: {scan.reason}"))
            continue
        cuda = max(floors, key=numbers)
        classes.append(GpuClass(capability=capability, cuda=cuda, claim=scan, faults=faults))
    classes.sort(key=lambda gpu_class: gpu_class.capability)
    return replace(grounds, classes=tuple(classes), refused=tuple(refused))


def cuda_of_driver(driver: str) -> str:
    """Return the lowest CUDA version whose first driver is `driver` or newer: `545.10` -> `12.3`.

    So no older driver supports it. The result is empty if the table of drivers has no such row, or if
    `driver` is not a version.
    """
    try:
        fitting = [cuda for cuda, first in knowledge.cuda_drivers().items() if not older(first, driver)]
    except ValueError:
        return ""
    return min(fitting, key=numbers, default="")


def all_capabilities() -> tuple[Capability, ...]:
    """Return all known capabilities: of GPUs and of compiler targets."""
    targets = {
        code.architecture
        for codes in knowledge.cuda_targets().values()
        for code in codes
        if code.architecture is not None
    }
    return tuple(sorted(targets | set(knowledge.capabilities())))


def is_range(capabilities: Sequence[Capability]) -> bool:
    """Return whether the capabilities include every known one between the lowest and the highest.

    Capabilities that are newer than this program are never a range, because those between them are unknown.
    """
    lowest, highest = min(capabilities), max(capabilities)
    between = {row for row in all_capabilities() if lowest <= row <= highest}
    return lowest == highest or between == set(capabilities)


def _cudas(judged: Iterable[VerificationResult]) -> Mapping[tuple[Capability, str], str]:
    """Return the CUDA versions of the drivers on which a valid verdict ran, by capability."""
    cudas: dict[tuple[Capability, str], str] = {}
    for judgement in judged:
        verdict = judgement.verdict
        if judgement.standing is not VerdictStatus.GOOD or verdict is None:
            continue
        report = verdict.report
        if report.hardware is None or report.device is None:
            continue
        try:
            key = parse_capability(report.device.capability), report.hardware.driver
            parse_driver(report.hardware.driver)
        except ValueError:
            continue
        if key[0] in verified_claims([judgement], key[1]):
            cudas[key] = max(
                cudas.get(key, ""), _major_minor(report.cuda), key=lambda cuda: numbers(cuda or "0")
            )
    return cudas


def _major_minor(cuda: str) -> str:
    """Return a version such as `12.4`, empty if it has another format, which no pool can be queried for."""
    major, dot, minor = cuda.partition(".")
    whole = dot and all(part.isascii() and part.isdigit() for part in (major, minor))
    return cuda if whole and len(major) <= 2 and len(minor) == 1 else ""


# --- Forms of an image. Every address is pinned: layers and artifacts by digest, files by a name with 12 hex
# digits of their sha256, since the caches of the OSDF go by names. Each form needs its own verdicts: a
# verdict on an image is not one on its .sif.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """A form in which a job can use an image, and the evidence in its verdicts.

    `fetch` is the command that downloads the file. It is empty if the file is in no registry, or if jobs
    download it.
    """

    image: PoolImage
    grounds: ImageEvidence
    fetch: str = ""


def forms_of(offer: ImageOffer, directory: str) -> tuple[ImageForm, ...]:
    """Return all forms of an image.

    `directory` contains its .sif files: a path, `osdf:///...`, or "" for this directory.

    Raises UsageError for another address.
    """
    if directory and not SIF_DIRECTORY.fullmatch(directory):
        raise UsageError(
            "sif-folder-invalid",
            f"sif-folder: '{directory[:80]}' is neither an absolute path nor osdf:///...",
            hint="write /staging/gpu/images or osdf:///chtc/staging/gpu/images: letters, digits and . _ + - "
            "without '..'",
        )
    return tuple(_forms(offer, directory.rstrip("/")))


def choose_form(
    forms: Sequence[ImageForm], site: Site, kind: ImageKind | None, *, default_form: str = ""
) -> ImageForm:
    """Return the first verified form that works at a site, or else the first form that works there.

    `default_form` is the target if the project has it: then its image is in the store, and a .sif can
    be exported. Raises UsageError for a type that does not work at the site, NothingSelectedError if no form
    does.
    """
    if kind is not None and kind not in site.kinds:
        raise UsageError(
            "image-type-unsupported",
            f"the documentation of {site.title} does not list images of type '{kind}'",
            hint=f"use --image-format {' or '.join(site.kinds)}",
        )
    kinds = site.kinds if kind is None else (kind,)
    fitting = [form for name in kinds for form in forms if form.image.kind is name]
    if fitting:
        return next((form for form in fitting if form.grounds.verified), fitting[0])
    offered = ", ".join(dict.fromkeys(form.image.kind.value for form in forms))
    if default_form and ImageKind.SIF in kinds and not any(form.image.sha256 for form in forms):
        reason = "not in a registry or file"
        if offered:
            reason = f"only available as {offered}, which this site does not run"
        raise NothingSelectedError(
            "image-not-exported",
            f"jobs cannot fetch {default_form}, because it is {reason}",
            hint=f"run imagefactory image export {default_form} --format sif, then write the job again",
        )
    if not offered:
        raise NothingSelectedError(
            "image-not-published",
            "the image is not in a registry or file, so jobs cannot fetch it",
            hint="run imagefactory push, or imagefactory push --format sif, in its project",
        )
    raise NothingSelectedError(
        "image-type-not-offered",
        f"no image of type {' or '.join(kinds)}, only {offered}",
        hint="use another --image-format; a .sif in the OSDF requires the setting sif-folder = osdf:///...",
    )


def _forms(offer: ImageOffer, directory: str) -> Iterator[ImageForm]:
    image = offer.image
    if _is_pinned(image.reference) and not image.only_sif:
        yield ImageForm(
            image=PoolImage(
                kind=ImageKind.DOCKER,
                address=f"docker://{image.reference}",
                subject=image.subject,
                size=image.size,
                unpacked=image.unpacked,
            ),
            grounds=verified_evidence(offer.judged, image.revoked_of(image.subject)),
        )
    for offered in offer.sifs:
        sif = offered.sif
        name = sif_name(image.target, sif.sha256)
        grounds = verified_evidence(offered.judged, image.revoked_of(sif.subject))
        file = PoolImage(
            kind=ImageKind.OSDF if directory.startswith("osdf:") else ImageKind.SIF,
            address=f"{directory}/{name}" if directory else name,
            subject=sif.subject,
            size=sif.size,
            unpacked=image.unpacked,
            sha256=sif.sha256,
        )
        if not _is_pinned(sif.reference):
            yield ImageForm(image=file, grounds=grounds)
            continue
        address = f"oras://{sif.reference}"
        yield ImageForm(image=file, grounds=grounds, fetch=f"apptainer pull {name} {address}")
        yield ImageForm(image=replace(file, kind=ImageKind.ORAS, address=address), grounds=grounds)


def _is_pinned(reference: str) -> bool:
    """Return whether a reference has a digest. Raises UsageError for an invalid one."""
    return bool(reference) and bool(parse_reference(reference).digest)


# --- GPUs of an inventory, by values only; `job check` evaluates the expressions of files, also those of
# people. The maximum of each machine counts; free means without a job now. If the inventory lacks
# something (START, the attributes of a machine), a GPU counts and is marked as unsure.


INVENTORY_FRESHNESS = timedelta(minutes=5)
"""The age up to which an inventory is current."""
_HOSTS = {"linux/amd64": "amd64", "linux/arm64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """The resources of one job: `gpus` on one machine, each with `gpu_memory` bytes.

    Sizes are in bytes, 0 for any. `mig` accepts MIG slices. `needs` are attributes that a machine must have
    as true.
    """

    gpus: int = 1
    gpu_memory: int = 0
    cpus: int = 0
    memory: int = 0
    disk: int = 0
    mig: bool = False
    platform: str = "linux/amd64"
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableGpus:
    """GPUs of one type that a job can get, on machines that are alike. `gpu` is one of them.

    `free` is 0 unless as many GPUs as the job requests are free on each of these machines.
    """

    gpu: PoolGpu
    gpu_class: GpuClass
    count: int
    free: int
    unsure: bool


GpuClassifier = Callable[[PoolGpu], GpuClass | None]
"""A function that returns the class in which an image may run on a GPU, None if it may not."""


def classifier_for(classes: Iterable[GpuClass]) -> GpuClassifier:
    """Return the classifier of an image that may run on these classes.

    Pools report the newest CUDA version that a driver supports. A GPU without one matches only classes for
    any driver.
    """
    by_capability = {str(row.capability): row for row in classes}

    def classify(gpu: PoolGpu) -> GpuClass | None:
        row = by_capability.get(gpu.capability)
        if row is None or (row.cuda and not (gpu.cuda and numbers(gpu.cuda) >= numbers(row.cuda))):
            return None
        return row

    return classify


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGroup:
    """Machines with the same numbers of GPUs and the same true attributes, prepared for many queries.

    `types` are the types of GPUs of each machine, with the number of GPUs and of free ones. Groups share the
    value of a type. `sizes` are the memory and disk in bytes and the cores of each machine, infinite if
    unknown, `least` the least of each. `true` are attributes in lower case, as ClassAds ignore case, None for
    machines without attributes. `sure` means that the architecture is known and the START expression accepts
    any job.
    """

    types: tuple[tuple[PoolGpu, int, int], ...]
    sizes: tuple[tuple[float, float, float], ...]
    least: tuple[float, float, float]
    true: frozenset[str] | None
    sure: bool


def index_machines(inventory: Inventory) -> tuple[MachineGroup, ...]:
    """Return the machines of an inventory."""
    gpus: dict[tuple[object, ...], PoolGpu] = {}
    groups: dict[tuple[Any, ...], list[tuple[float, float, float]]] = {}
    for machine in inventory.machines:
        counts: dict[tuple[object, ...], list[int]] = {}
        for gpu in machine.gpus:
            key = (gpu.name, gpu.capability, gpu.memory, gpu.driver, gpu.cuda, gpu.mig, gpu.host)
            gpus.setdefault(key, gpu)
            number = counts.setdefault(key, [0, 0])
            number[0] += 1
            number[1] += gpu.free
        has = {name.lower(): value for name, value in machine.attributes.items()}
        true = frozenset(name for name, value in has.items() if value is True) if has else None
        is_open = machine.start.strip().lower() in ("", "true")
        types = tuple((key, *number) for key, number in counts.items())
        size = _size(has, "memory", MB), _size(has, "disk", 1024), _size(has, "cpus", 1)
        groups.setdefault((types, true, is_open, "arch" in has), []).append(size)
    return tuple(
        MachineGroup(
            types=tuple((gpus[key], number, free) for key, number, free in types),
            sizes=tuple(sizes),
            least=(min(row[0] for row in sizes), min(row[1] for row in sizes), min(row[2] for row in sizes)),
            true=true,
            sure=is_open and (has_arch or true is None),
        )
        for (types, true, is_open, has_arch), sizes in groups.items()
    )


def _size(has: Mapping[str, object], name: str, unit: int) -> float:
    value = has.get(name)
    return value * unit if isinstance(value, int | float) and not isinstance(value, bool) else math.inf


def find_available_gpus(
    classify: GpuClassifier, request: ResourceRequest, machines: Iterable[MachineGroup]
) -> tuple[AvailableGpus, ...]:
    """Return the GPUs of these machines that a job with an image can get."""
    classes: dict[int, GpuClass | None] = {}

    def class_of(gpu: PoolGpu) -> GpuClass | None:
        if id(gpu) not in classes:  # groups share the values of types
            classes[id(gpu)] = classify(gpu) if fits(gpu, request) else None
        return classes[id(gpu)]

    return tuple(gpus for group in machines for gpus in _on(group, class_of, request))


def fits(gpu: PoolGpu, request: ResourceRequest) -> bool:
    """Return whether the GPU meets the request, whatever the image."""
    host = _HOSTS.get(request.platform, "")
    small = gpu.memory // MB < -(-request.gpu_memory // MB)
    return not small and (request.mig or not gpu.mig) and (not gpu.host or gpu.host == host)


def _on(group: MachineGroup, class_of: GpuClassifier, request: ResourceRequest) -> Iterator[AvailableGpus]:
    fitting = [(gpu, row, count, free) for gpu, count, free in group.types if (row := class_of(gpu))]
    if not fitting or sum(count for *_, count, _ in fitting) < request.gpus:
        return
    if group.true is not None and any(need.lower() not in group.true for need in request.needs):
        return
    amounts = (request.memory, request.disk, request.cpus)
    machines = len(group.sizes)
    if any(map(operator.lt, group.least, amounts)):
        machines = sum(not any(map(operator.lt, sizes, amounts)) for sizes in group.sizes)
    if not machines:
        return
    enough = sum(free for *_, free in fitting) >= request.gpus
    unsure = not group.sure or (group.true is None and bool(request.needs))
    for gpu, gpu_class, count, free in fitting:
        yield AvailableGpus(
            gpu=gpu,
            gpu_class=gpu_class,
            count=count * machines,
            free=free * machines if enough else 0,
            unsure=unsure,
        )


def format_available(places: Sequence[AvailableGpus], inventory: Inventory, now: datetime) -> str:
    """Return `GPUs that match: 12 of 40, 3 free now`, with the time of the inventory if it is not current."""
    total = len(inventory.gpus)
    text = f"GPUs that match: {sum(place.count for place in places)} of {total}"
    unsure = sum(place.count for place in places if place.unsure)
    if when := free_when(inventory, now):
        text += f", {sum(place.free for place in places)} free {when}"
    return text + (f" ({unsure} of them on machines that may reject the job)" if unsure else "")


def free_when(inventory: Inventory, now: datetime) -> str:
    """Return when the GPUs were free: `now` or a time, empty if the inventory has no time."""
    if now - inventory.taken < INVENTORY_FRESHNESS:
        return "now"
    return f"at {inventory.taken:%Y-%m-%d %H:%M} UTC" if inventory.taken.year > 1970 else ""
