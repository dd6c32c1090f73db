"""On which GPUs an image may run: verdicts, and predictions where somebody accepts them, as classes of GPUs.

Pure. A class is a compute capability and the lowest driver, told as the newest CUDA that it takes, since that
is what pools tell of every GPU (`DriverVersion`); the driver's own version many do not tell. So two drivers
that take the same CUDA are one here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.drivers import older, parse_driver
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.gpu.values import Answer, Basis, Claim
from imagefactory.trust.claims import verified_claims
from imagefactory.trust.verdict import Judged, RevokedCell, Standing

_RUNS = (Answer.YES, Answer.PTX)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClass:
    """GPUs of one capability whose driver takes `cuda` (`12.4`) or newer, any where it is empty.

    `claim` is why: its basis is VERIFIED or PREDICTED. `faults` are known ones that some calls meet there.
    """

    capability: Capability
    cuda: str
    claim: Claim
    faults: tuple[Claim, ...] = ()

    @property
    def proven(self) -> bool:
        return self.claim.basis is Basis.VERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
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


def proven_grounds(judged: Sequence[Judged], revoked: Iterable[RevokedCell] = ()) -> Grounds:
    """What verdicts that can be relied on say of one image, and what was taken back of it.

    A class begins at the lowest driver from which on every verdict says verified: a pass holds for its
    driver and newer ones until a newer one fails (verdicts/claims.py).
    """
    cudas = _cudas(judged)
    classes, refused = [], []
    for capability in sorted({capability for capability, _ in cudas}):
        drivers = sorted((driver for of, driver in cudas if of == capability), key=parse_driver, reverse=True)
        passed: list[tuple[str, Claim]] = []
        against: Claim | None = None
        for driver in drivers:
            claim, cuda = verified_claims(judged, driver)[capability], cudas[capability, driver]
            if claim.answer is not Answer.YES:
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
            said = next(row.said for row in left if row.capability == str(capability))
            refused.append((capability, said))
    return Grounds(classes=tuple(classes), refused=tuple(refused), revoked=left)


def with_predictions(
    grounds: Grounds, predicted: Iterable[tuple[str, Claim]], least_cuda: str = "", *, faulty: bool = False
) -> Grounds:
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
            refused.append((capability, revoked.said))
            continue
        borne = faults if faulty else ()
        against = next((claim for claim in claims if claim.answer not in _RUNS and claim not in borne), None)
        scan = next((claim for claim in claims if claim.basis is Basis.PREDICTED), None)
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


def known_capabilities() -> tuple[Capability, ...]:
    """All that are known, of GPUs and of what toolkits compile for: a range must not hold one unnoticed."""
    targets = {
        code.architecture
        for codes in knowledge.cuda_targets().values()
        for code in codes
        if code.architecture is not None
    }
    return tuple(sorted(targets | set(knowledge.capabilities())))


def _cudas(judged: Iterable[Judged]) -> Mapping[tuple[Capability, str], str]:
    """The CUDA that each driver takes with which a good verdict ran on each capability."""
    cudas: dict[tuple[Capability, str], str] = {}
    for judgement in judged:
        verdict = judgement.verdict
        if judgement.standing is not Standing.GOOD or verdict is None:
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


def _by_capability(predicted: Iterable[tuple[str, Claim]]) -> Mapping[Capability, list[Claim]]:
    found: dict[Capability, list[Claim]] = {}
    for text, claim in predicted:
        found.setdefault(parse_capability(text), []).append(claim)
    return found
