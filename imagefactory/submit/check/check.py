"""What is wrong with a submit file for a pool: rules over the file, an inventory and a catalogue. Pure.

    SubmitFile + Surroundings -> check_submit_file() -> Checked: findings with lines, the reach of each queue

A finding is WRONG where jobs would fail, wait for ever, run what was not verified, or what somebody can move
under them; ADVICE where the same can be had better. Nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from imagefactory.catalogue.model import Catalogue, CataloguedImage, Offer
from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.pools.model import ImageKind, Inventory, PoolGpu
from imagefactory.pools.sites import Site
from imagefactory.pools.sizes import format_size, image_disk
from imagefactory.submit.check.asked import JobAsk, read_asked
from imagefactory.submit.check.findings import Severity, SubmitFinding, advice, wrong
from imagefactory.submit.check.image import JobImage, KnownImage, find_known, read_image
from imagefactory.submit.check.image_rules import Moving, image_findings
from imagefactory.submit.check.language import Jobs, SubmitFile
from imagefactory.submit.check.old_gpus import old_gpu_findings, own_name
from imagefactory.submit.check.reach import UNDEFINED, GpuPlace, JobReach, find_reach
from imagefactory.submit.check.rules import command_findings
from imagefactory.submit.check.site_rules import site_findings
from imagefactory.submit.forms import expected_grounds
from imagefactory.submit.proven import Grounds

VERIFIED, PREDICTED, UNTESTED, REFUSED = "verified", "predicted", "not-tested", "refused"
_FEW = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a file is checked for. `inventory` and `catalogue` are None where there is none to be had.

    `offer` judges the verdicts of a catalogued image, by the reader's trust and clock. `digest` asks the
    registry what a reference with a tag points to now; empty where that is not to be had.
    """

    site: Site
    inventory: Inventory | None
    catalogue: Catalogue | None
    offer: Callable[[CataloguedImage], Offer]
    digest: Callable[[str], str] = lambda _: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """GPUs of one capability that the jobs of a `queue` can get, and what is known of the image there.

    `word` is VERIFIED, PREDICTED, UNTESTED or REFUSED, empty where nothing is known of the image at all.
    """

    capability: str
    gpus: int
    free: int
    unsure: int
    word: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJobs:
    """One `queue`: what is wrong, and where its jobs get. `target` is the catalogue's name of its image.

    `total` counts the GPUs of the inventory, `causes` what keeps jobs from how many. `known` is false where
    there was no inventory, `gpu` where the jobs ask for none.
    """

    line: int
    count: int | None
    image: str
    target: str
    known: bool
    total: int
    reached: tuple[Reached, ...]
    causes: tuple[tuple[str, int], ...]
    gpu: bool
    findings: tuple[SubmitFinding, ...]

    @property
    def gpus(self) -> int:
        return sum(one.gpus for one in self.reached)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A whole file. `findings` are those of no single `queue`."""

    name: str
    jobs: tuple[CheckedJobs, ...]
    findings: tuple[SubmitFinding, ...]

    @property
    def all_findings(self) -> tuple[SubmitFinding, ...]:
        """Each once, by line, what is wrong first. What several `queue` lack is told of the first."""
        queues = {jobs.line for jobs in self.jobs}
        found: dict[SubmitFinding, SubmitFinding] = {}
        for one in [*self.findings, *(one for jobs in self.jobs for one in jobs.findings)]:
            found.setdefault(replace(one, line=0) if one.line in queues else one, one)
        return tuple(
            sorted(found.values(), key=lambda one: (one.line, one.severity is not Severity.WRONG, one.rule))
        )

    @property
    def wrong(self) -> bool:
        return any(one.severity is Severity.WRONG for one in self.all_findings)


def check_submit_file(file: SubmitFile, around: Surroundings) -> Checked:
    """All that can be said of a file. Raises UsageError, with its line, where a value cannot be expanded."""
    findings = [advice(line, "note", text) for line, text in file.notes]
    if not file.jobs:
        findings.append(wrong(1, "no-queue", "it has no queue line, so nothing is submitted", "write queue"))
    jobs = []
    for one in file.jobs:
        try:
            jobs.append(_check(one, around))
        except UsageError as error:
            raise UsageError(f"{file.name}:{one.line}: {error.message}", hint=error.hint) from error
    return Checked(name=file.name, jobs=tuple(jobs), findings=tuple(findings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One `queue` with all that is known of it; what `known` and `grounds` are None of is not known."""

    jobs: Jobs
    asked: JobAsk
    image: JobImage | None
    known: KnownImage | None
    grounds: Grounds | None
    reach: JobReach | None
    around: Surroundings


def _check(jobs: Jobs, around: Surroundings) -> CheckedJobs:
    image = read_image(jobs)
    asked = read_asked(jobs, (image.needs,) if image and image.needs else ())
    images = around.catalogue.images if around.catalogue else ()
    known = find_known(image, images) if image else None
    case = _Case(
        jobs=jobs,
        asked=asked,
        image=image,
        known=known,
        grounds=_grounds(known, around),
        reach=find_reach(asked, around.inventory) if around.inventory is not None else None,
        around=around,
    )
    reached = tuple(_reached(case))
    findings = [
        *command_findings(jobs, asked),
        *_old_gpus(case),
        *site_findings(jobs, around.site),
        *_image_findings(case),
        *_reach_findings(case),
        *_unverified(case, reached),
    ]
    return CheckedJobs(
        line=jobs.line,
        count=jobs.count,
        image=image.address if image else "",
        target=known.image.target if known else "",
        known=case.reach is not None,
        total=len(case.reach.places) if case.reach else 0,
        reached=reached,
        causes=tuple(case.reach.causes.items()) if case.reach else (),
        gpu=jobs.asks_gpus,
        findings=tuple(findings),
    )


# --- the image -----------------------------------------------------------------------------------


def _grounds(known: KnownImage | None, around: Surroundings) -> Grounds | None:
    if known is None:
        return None
    return expected_grounds(known.grounds(around.offer(known.image)), known.image)


def _old_gpus(case: _Case) -> Iterator[SubmitFinding]:
    """Machines may still tell of GPUs as they did once; where it is known that they do not, that is wrong."""
    inventory = case.around.inventory
    has = {name.lower() for one in (inventory.machines if inventory else ()) for name in one.attributes}
    known = case.around.site.nested or bool(has)
    severity = Severity.WRONG if known else Severity.ADVICE
    yield from old_gpu_findings(case.jobs, severity, frozenset(has))


def _image_findings(case: _Case) -> Iterator[SubmitFinding]:
    image, jobs, catalogue = case.image, case.jobs, case.around.catalogue
    yield from image_findings(
        jobs,
        image,
        Moving(
            site=case.around.site, images=catalogue.images if catalogue else (), digest=case.around.digest
        ),
    )
    if image is None or not image.pinned:
        return
    line = jobs.settings[image.key].line
    if catalogue is not None and case.known is None:
        text = "the catalogue does not have this image: nothing is known of it on any GPU"
        yield wrong(line, "unknown-image", text, "take one that `imagefactory submit TARGET` writes")
    elif catalogue is None:
        text = "there is no catalogue here, so nothing is known of this image on any GPU"
        yield advice(line, "no-catalogue", text, "join your centre: imagefactory join ADDRESS|FILE")
    sent = jobs.value("transfer_container").lower() not in ("false", "no", "0")
    if case.known and case.asked.disk and sent:
        size = case.known.sif.size if case.known.sif else case.known.image.size
        needed = image_disk(image.kind or ImageKind.SIF, size, case.known.image.unpacked)
        if image.kind in (ImageKind.SIF, ImageKind.OSDF, ImageKind.ORAS) and case.asked.disk < needed:
            asked = format_size(case.asked.disk)
            text = f"request_disk is {asked}, and the image alone takes {format_size(needed)}"
            where = jobs.settings["request_disk"].line
            yield wrong(where, "disk", text, "the job would be held; ask for that and what it writes")


# --- where it gets -------------------------------------------------------------------------------


def _reached(case: _Case) -> Iterator[Reached]:
    groups: dict[tuple[Capability, str, str], list[GpuPlace]] = {}
    for place in case.reach.reached if case.reach else ():
        word, why = known_on(place.gpu, case.grounds)
        groups.setdefault((parse_capability(place.gpu.capability), word, why), []).append(place)
    for (capability, word, why), places in sorted(groups.items()):
        yield Reached(
            capability=str(capability),
            gpus=len(places),
            free=sum(place.gpu.free for place in places),
            unsure=sum(bool(place.unsure) for place in places),
            word=word,
            why=why,
        )


def known_on(gpu: PoolGpu, grounds: Grounds | None) -> tuple[str, str]:
    """What is known of an image on one GPU, as a word of this room and why; two empty texts for nothing.

    Pools tell the newest CUDA that a driver takes, so that decides; a GPU that tells none is not known.
    A slice (MIG) is a class of its own, of which no verdict speaks.
    """
    if grounds is None:
        return "", ""
    capability = parse_capability(gpu.capability)
    refused = next((why for one, why in grounds.refused if one == capability), "")
    gpu_class = next((one for one in grounds.classes if one.capability == capability), None)
    if gpu_class is None:
        return (REFUSED, refused) if refused else (UNTESTED, "nobody has tested it there")
    if gpu.mig:
        return UNTESTED, "a slice of a GPU (MIG) is a class of its own"
    if gpu_class.cuda and not gpu.cuda:
        return UNTESTED, f"its driver is not told; it holds from CUDA {gpu_class.cuda} on"
    if gpu_class.cuda and numbers(gpu.cuda) < numbers(gpu_class.cuda):
        return UNTESTED, f"its driver takes CUDA {gpu.cuda}; it holds from {gpu_class.cuda} on"
    return (VERIFIED if gpu_class.proven else PREDICTED), gpu_class.claim.reason


def told_causes(causes: Iterable[tuple[str, int]]) -> str:
    """What keeps jobs from GPUs in a line, with how many where there are several causes."""
    every = tuple(causes)
    return "; ".join(cause if len(every) == 1 else f"{cause} ({count})" for cause, count in every)


def _reach_findings(case: _Case) -> Iterator[SubmitFinding]:
    reach, inventory = case.reach, case.around.inventory
    if reach is None or inventory is None or not case.jobs.asks_gpus:
        return
    yield from _unheard(case, inventory)
    if not reach.places:
        yield advice(case.jobs.line, "no-match", "the inventory has no GPU at all")
    elif not reach.reached:
        why = told_causes(reach.causes.items())
        text = f"no GPU of {len(reach.places)} matches, and the jobs wait for ever: {why}"
        yield wrong(case.jobs.line, "no-match", text, "see imagefactory pool for what there is")


def _unheard(case: _Case, inventory: Inventory) -> Iterator[SubmitFinding]:
    """Attributes in `requirements` that no machine with GPUs has, and whose absence decides."""
    has = {name.lower() for machine in inventory.machines for name in machine.attributes}
    expression = case.asked.requirements
    if expression is None or not has or not case.reach:
        return
    if not any(place.cause == UNDEFINED for place in case.reach.places):
        return
    own = {*has, *(name.lower() for name in case.asked.ad)}
    names = [name for name in expression.names if name.lower() not in own]
    names = [name for name in names if not own_name(name)]  # these have a finding of their own
    if names and "requirements" in case.jobs.settings:
        text = f"no machine with GPUs tells {', '.join(names[:_FEW])}: it is undefined there"
        line = case.jobs.settings["requirements"].line
        yield wrong(line, "unheard", text, "take it out of requirements, or ask the site for its name")


def _unverified(case: _Case, reached: Sequence[Reached]) -> Iterator[SubmitFinding]:
    """GPUs that the jobs may get and where the image is not proven; and proven ones that they leave out.

    An image for CPUs alone is proven on none, and should get none.
    """
    if case.known is None or case.image is None:
        return
    line, target = case.jobs.settings[case.image.key].line, case.known.image.target
    if not case.known.image.gpu:
        if case.jobs.asks_gpus:
            text = f"{target} is for CPUs alone, and the job takes a GPU that it does not use"
            yield wrong(case.jobs.settings["request_gpus"].line, "no-use", text, "take request_gpus out")
        return
    for word, severity in ((REFUSED, "fails"), (UNTESTED, "is not verified"), (PREDICTED, "is not verified")):
        found = [one for one in reached if one.word == word]
        if found:
            where = "; ".join(f"{one.gpus} of {one.capability} ({word}: {one.why})" for one in found[:_FEW])
            text = f"{target} {severity} on {sum(one.gpus for one in found)} GPUs that match: {where}"
            hint = f"imagefactory submit {target} writes what matches proven GPUs only"
            yield wrong(line, "refused" if word == REFUSED else "unverified", text, hint)
    if case.reach is None:
        if case.grounds is not None and not case.grounds.proven:
            yield wrong(
                line, "unverified", f"{target} is verified on no GPU", "take one that is: imagefactory find"
            )
        return
    missed = [place.gpu for place in case.reach.places if place.unasked]
    more = [gpu.capability for gpu in missed if known_on(gpu, case.grounds)[0] == VERIFIED]
    if more:
        kinds = ", ".join(sorted(set(more), key=parse_capability))
        text = f"it is verified on {len(more)} GPUs more, of {kinds}, which these jobs leave out"
        yield advice(case.jobs.line, "narrow", text, f"imagefactory submit {target} writes all of them")
