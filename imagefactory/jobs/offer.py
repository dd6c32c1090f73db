"""On which GPUs an image may run: verdicts, and predictions where somebody accepts them, as classes of GPUs.

Pure. A class is a compute capability and the lowest driver, told as the newest CUDA that it takes, since that
is what pools tell of every GPU (`DriverVersion`); the driver's own version many do not tell. So two drivers
that take the same CUDA are one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

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
    """GPUs of one capability whose driver takes `cuda` (`12.4`) or newer, any where it is empty.

    `claim` is why: its basis is VERIFIED or PREDICTED. `faults` are known ones that some calls meet there.
    """

    capability: Capability
    cuda: str
    claim: CellClaim
    faults: tuple[CellClaim, ...] = ()

    @property
    def proven(self) -> bool:
        return self.claim.basis is ClaimBasis.VERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEvidence:
    """What is known of an image: classes that may be used, and capabilities that may not, each with why.

    `revoked` is what was taken back and not verified again: no prediction outweighs it.
    """

    classes: tuple[GpuClass, ...]
    refused: tuple[tuple[Capability, str], ...]
    revoked: tuple[RevokedCell, ...] = ()

    def revoked_on(self, capability: Capability) -> RevokedCell | None:
        """The newest row that speaks of a capability, None without one."""
        return next((row for row in self.revoked if row.capability in ("", str(capability))), None)

    @property
    def proven(self) -> bool:
        return any(one.proven for one in self.classes)


def verified_evidence(
    judged: Sequence[VerificationResult], revoked: Iterable[RevokedCell] = ()
) -> ImageEvidence:
    """What verdicts that can be relied on say of one image, and what was taken back of it.

    A class begins at the lowest driver from which on every verdict says verified: a pass holds for its
    driver and newer ones until a newer one fails (trust/claims.py).
    """
    cudas = _cudas(judged)
    classes, refused = [], []
    for capability in sorted({capability for capability, _ in cudas}):
        drivers = sorted((driver for of, driver in cudas if of == capability), key=parse_driver, reverse=True)
        passed: list[tuple[str, CellClaim]] = []
        against: CellClaim | None = None
        for driver in drivers:
            claim, cuda = verified_claims(judged, driver)[capability], cudas[capability, driver]
            if claim.answer is not Compatibility.YES:
                against = claim
                passed = [one for one in passed if cuda and one[0] and numbers(one[0]) > numbers(cuda)]
                break
            passed.append((cuda, claim))
        known = [one for one in passed if one[0] or capability.processor]  # AMD's drivers take no CUDA
        if known:
            cuda, claim = known[-1]
            classes.append(GpuClass(capability=capability, cuda=cuda, claim=claim))
        else:
            why = f"{against.rule}: {against.reason}" if against else "the CUDA of its driver is not known"
            refused.append((capability, why))
    spoken = {str(one.capability) for one in classes}
    left = tuple(row for row in revoked if row.capability not in spoken)
    for capability in dict.fromkeys(parse_capability(row.capability) for row in left if row.capability):
        if capability not in {one for one, _ in refused}:
            said = next(row.summary for row in left if row.capability == str(capability))
            refused.append((capability, said))
    return ImageEvidence(classes=tuple(classes), refused=tuple(refused), revoked=left)


def with_predictions(
    grounds: ImageEvidence,
    predicted: Iterable[tuple[str, CellClaim]],
    least_cuda: str = "",
    *,
    faulty: bool = False,
) -> ImageEvidence:
    """The same with what a scan predicts of capabilities of which no verdict speaks.

    Only a scan counts, never a project's page alone, only where nothing else that is known of that capability
    says no, and only where it is known which drivers are new enough. A known fault that some calls meet
    says no too, unless `faulty`. `least_cuda` is what the image needs of any driver (`12.1`, or `12`).
    """
    spoken = {gpu_class.capability for gpu_class in grounds.classes} | {
        capability for capability, _ in grounds.refused
    }
    classes, refused = list(grounds.classes), list(grounds.refused)
    for capability, claims in sorted(_by_capability(predicted).items()):
        faults = tuple(claim for claim in claims if claim.is_fault)
        if capability in spoken:
            classes = [
                replace(one, faults=faults) if one.capability == capability else one for one in classes
            ]
            continue
        if revoked := grounds.revoked_on(capability):
            refused.append((capability, revoked.summary))
            continue
        borne = faults if faulty else ()
        against = next((claim for claim in claims if claim.answer not in _RUNS and claim not in borne), None)
        scan = next((claim for claim in claims if claim.basis is ClaimBasis.PREDICTED), None)
        if against or scan is None:
            claim = against or claims[0]
            refused.append((capability, f"{claim.basis} {claim.answer}: {claim.reason}"))
            continue
        floors = [cuda_of_driver(scan.driver)] if scan.driver else []
        floors += [_shaped(".".join([*least_cuda.split("."), "0"][:2]))] if least_cuda else []
        if not all(floors) or not floors:
            refused.append((capability, f"which drivers are new enough is not known: {scan.reason}"))
            continue
        cuda = max(floors, key=numbers)
        classes.append(GpuClass(capability=capability, cuda=cuda, claim=scan, faults=faults))
    ordered = tuple(sorted(classes, key=lambda gpu_class: gpu_class.capability))
    return replace(grounds, classes=ordered, refused=tuple(refused))


def cuda_of_driver(driver: str) -> str:
    """The lowest CUDA that no driver older than `driver` takes: `530.30.02` -> `12.1`, `545.10` -> `12.3`.

    Empty where the table of drivers does not reach so far, or for what is no driver's version.
    """
    try:
        fitting = [cuda for cuda, first in knowledge.cuda_drivers().items() if not older(first, driver)]
    except ValueError:
        return ""
    return min(fitting, key=numbers, default="")


def all_capabilities() -> tuple[Capability, ...]:
    """All that are known, of GPUs and of what toolkits compile for: a range must not hold one unnoticed."""
    targets = {
        code.architecture
        for codes in knowledge.cuda_targets().values()
        for code in codes
        if code.architecture is not None
    }
    return tuple(sorted(targets | set(knowledge.capabilities())))


def _cudas(judged: Iterable[VerificationResult]) -> Mapping[tuple[Capability, str], str]:
    """The CUDA that each driver takes with which a good verdict ran on each capability."""
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
            cuda = _shaped(report.cuda)
            cudas[key] = max(cuda, cudas.get(key, cuda), key=lambda one: numbers(one or "0"))
    return cudas


def _shaped(cuda: str) -> str:
    """`12.4` as it is; what pools could not be asked for is not known."""
    major, dot, minor = cuda.partition(".")
    whole = dot and all(part.isascii() and part.isdigit() for part in (major, minor))
    return cuda if whole and len(major) <= 2 and len(minor) == 1 else ""


def _by_capability(predicted: Iterable[tuple[str, CellClaim]]) -> Mapping[Capability, list[CellClaim]]:
    found: dict[Capability, list[CellClaim]] = {}
    for text, claim in predicted:
        found.setdefault(parse_capability(text), []).append(claim)
    return found


# --- Which form of an offered image a job takes: layers in a registry, a .sif there, at a path or in the
# OSDF
# Pure. Every address is pinned: layers and artifacts by digest, files by a name that carries 12 hex digits
# of
# their sha256, since the OSDF's caches go by names. A verdict on an image says nothing of a .sif, nor the
# other
# way round, so each form is judged by its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """An image as a job may take it, and what its own verdicts say of it. `fetch` is the command that puts
    the file there where it is missing, empty where no registry has it, or jobs take it from there."""

    image: PoolImage
    grounds: ImageEvidence
    fetch: str = ""


def forms_of(offer: ImageOffer, folder: str) -> tuple[ImageForm, ...]:
    """All forms of an image. `folder` is where its .sif files lie: a path, or `osdf:///...`; empty for here.

    Raises UsageError for a folder that is no such place.
    """
    return tuple(_forms(offer, _checked_directory(folder)))


def expected_grounds(grounds: ImageEvidence, image: CatalogImage, *, faulty: bool = False) -> ImageEvidence:
    """What is proven of a form of an image, and what is predicted of the image where no verdict speaks.

    With `faulty` also where some calls meet a known fault.
    """
    least = "" if image.minor_compat else image.runtime
    return with_predictions(grounds, image.predicted, least, faulty=faulty)


def choose_form(
    forms: Sequence[ImageForm], site: Site, kind: ImageKind | None, *, own: str = ""
) -> ImageForm:
    """Return the form for a site: of those that work there the first that is verified, else the first.

    `own` is the target where it is of the person's own project: the store has its image, so a .sif can be
    made. Raises UsageError for a kind that does not work there, NothingSelectedError where no form does.
    """
    if kind is not None and kind not in site.kinds:
        raise UsageError(
            "image-type-unsupported",
            f"the documentation of {site.title} does not list images of type '{kind}'",
            hint=f"use --image-format {' or '.join(site.kinds)}",
        )
    kinds = site.kinds if kind is None else (kind,)
    fitting = [form for one in kinds for form in forms if form.image.kind is one]
    if fitting:
        return next((form for form in fitting if form.grounds.proven), fitting[0])
    there = ", ".join(dict.fromkeys(form.image.kind.value for form in forms))
    if own and ImageKind.SIF in kinds and not any(form.image.sha256 for form in forms):
        why = (
            f"only available as {there}, which this site does not run"
            if there
            else "not in a registry or file"
        )
        raise NothingSelectedError(
            "image-not-exported",
            f"jobs cannot fetch {own}: it is {why}",
            hint=f"run imagefactory export {own} --format sif, then submit again",
        )
    if not there:
        raise NothingSelectedError(
            "image-not-published",
            "the image is not in a registry or file, so jobs cannot fetch it",
            hint="ask the owner of the project to run imagefactory push, or imagefactory push --format sif",
        )
    raise NothingSelectedError(
        "image-type-not-offered",
        f"no image of type {' or '.join(kinds)}, only {there}",
        hint="use another --image-format; a .sif in the OSDF requires the setting sif-folder = osdf:///...",
    )


def _forms(offer: ImageOffer, folder: str) -> Iterator[ImageForm]:
    image = offer.image
    if _pinned(image.reference) and not image.only_sif:
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
        file_kind = ImageKind.OSDF if folder.startswith("osdf:") else ImageKind.SIF
        places = [(file_kind, f"{folder}/{name}" if folder else name)]
        fetch = ""
        if _pinned(sif.reference):
            places.append((ImageKind.ORAS, f"oras://{sif.reference}"))
            fetch = f"apptainer pull {name} oras://{sif.reference}"
        grounds = verified_evidence(offered.judged, image.revoked_of(sif.subject))
        for kind, address in places:
            made = PoolImage(
                kind=kind,
                address=address,
                subject=sif.subject,
                size=sif.size,
                unpacked=image.unpacked,
                sha256=sif.sha256,
            )
            yield ImageForm(image=made, grounds=grounds, fetch="" if kind is ImageKind.ORAS else fetch)


def _pinned(reference: str) -> bool:
    """Whether it is one with a digest. Raises UsageError for what is no reference at all."""
    return bool(reference) and bool(parse_reference(reference).digest)


def _checked_directory(folder: str) -> str:
    if folder and not SIF_DIRECTORY.fullmatch(folder):
        raise UsageError(
            "sif-folder-invalid",
            f"sif-folder: '{folder[:80]}' is neither an absolute path nor osdf:///...",
            hint="write /staging/gpu/images or osdf:///chtc/staging/gpu/images: letters, digits and . _ + - "
            "without '..'",
        )
    return folder.rstrip("/")


# --- Which GPUs of an inventory a job can get that runs in an image, and which of them are free. Pure
# By values alone, so that it needs none of HTCondor's own readers; `--check` judges the expressions of
# files,
# also those that people wrote. What machines have at most counts, and free is what no job has at the moment.
# Where the inventory does not tell it (START, a machine's attributes) a GPU is counted, and said to be
# unsure.


INVENTORY_FRESHNESS = timedelta(minutes=5)
"""An inventory that is not older tells of now."""
_HOSTS = {"linux/amd64": "amd64", "linux/arm64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What one job asks for: `pool` of one machine at once, each with `gpu_memory`.

    Sizes are bytes, 0 for any. With `mig` slices of GPUs will do. `needs` are attributes that must be true of
    a machine.
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
class AvailableGpu:
    """A GPU that a job can get; `gpu_class` is why. `free`: it and as many more as the job asks for are."""

    gpu: PoolGpu
    gpu_class: GpuClass
    free: bool
    unsure: bool


GpuClassifier = Callable[[PoolGpu], GpuClass | None]
"""Why an image may run on a GPU; None where it may not."""


def by_class(classes: Iterable[GpuClass]) -> GpuClassifier:
    """An image that may run on these classes."""
    by_capability = {str(one.capability): one for one in classes}

    def known(gpu: PoolGpu) -> GpuClass | None:
        found = by_capability.get(gpu.capability)
        return found if found and _new_enough(gpu, found) else None

    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineIndex:
    """A machine, made ready to be asked many times: its attributes in small letters, as ClassAds take them.

    `open`: its START takes any job.
    """

    gpus: tuple[PoolGpu, ...]
    has: Mapping[str, object]
    open: bool


def index_machines(inventory: Inventory) -> tuple[MachineIndex, ...]:
    """The machines of an inventory."""
    return tuple(
        MachineIndex(
            gpus=one.gpus,
            has={name.lower(): value for name, value in one.attributes.items()},
            open=one.start.strip().lower() in ("", "true"),
        )
        for one in inventory.machines
    )


def find_places(
    known: GpuClassifier, wish: ResourceRequest, machines: Iterable[MachineIndex]
) -> tuple[AvailableGpu, ...]:
    """The GPUs of these machines that a job can get in an image."""
    return tuple(place for machine in machines for place in _on(machine, known, wish))


def fits(gpu: PoolGpu, wish: ResourceRequest) -> bool:
    """Whether the GPU itself is what is wished for, whatever runs on it."""
    host = _HOSTS.get(wish.platform, "")
    small = gpu.memory // MB < -(-wish.gpu_memory // MB)
    return not small and (wish.mig or not gpu.mig) and (not gpu.host or gpu.host == host)


def _new_enough(gpu: PoolGpu, gpu_class: GpuClass) -> bool:
    """Pools tell the newest CUDA that a driver takes; a GPU that tells none is not matched."""
    return not gpu_class.cuda or (bool(gpu.cuda) and numbers(gpu.cuda) >= numbers(gpu_class.cuda))


def machine_fits(machine: MachineIndex, wish: ResourceRequest) -> bool | None:
    """Whether a machine is large enough and has what the image needs; None where that is not told."""
    has = machine.has
    for name, amount, unit in (
        ("memory", wish.memory, MB),
        ("disk", wish.disk, 1024),
        ("cpus", wish.cpus, 1),
    ):
        most = has.get(name)
        if isinstance(most, int | float) and not isinstance(most, bool) and most * unit < amount:
            return False
    if has and any(has.get(need.lower()) is not True for need in wish.needs):
        return False
    told = "arch" in has if has else not wish.needs
    return True if told and machine.open else None


def format_places(places: Sequence[AvailableGpu], inventory: Inventory, now: datetime) -> str:
    """`reaches 12 of 40 GPUs, 3 free now`; of an older inventory when they were."""
    total = len(inventory.gpus)
    text = f"reaches {len(places)} of {total} GPU{'s' * (total != 1)}"
    unsure = sum(place.unsure for place in places)
    if when := free_when(inventory, now):
        text += f", {sum(place.free for place in places)} free {when}"
    return text + (f" (of {unsure} of them the machines may refuse)" if unsure else "")


def free_when(inventory: Inventory, now: datetime) -> str:
    """When it was that GPUs were free: `now`, or a time; empty for an inventory that does not say."""
    if now - inventory.taken < INVENTORY_FRESHNESS:
        return "now"
    return f"at {inventory.taken:%Y-%m-%d %H:%M} UTC" if inventory.taken.year > 1970 else ""


def _on(machine: MachineIndex, known: GpuClassifier, wish: ResourceRequest) -> Iterator[AvailableGpu]:
    fitting = [(gpu, found) for gpu in machine.gpus if (found := known(gpu)) and fits(gpu, wish)]
    if not fitting or len(fitting) < wish.gpus:
        return
    taken = machine_fits(machine, wish)
    if taken is False:
        return
    enough = sum(gpu.free for gpu, _ in fitting) >= wish.gpus
    for gpu, gpu_class in fitting:
        yield AvailableGpu(gpu=gpu, gpu_class=gpu_class, free=gpu.free and enough, unsure=taken is None)
