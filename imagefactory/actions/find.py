"""Search images by words: in the project, the catalogs or the bundled recipes, else documented releases.

    words, ResourceRequest (and Inventory) -> find_images() -> FindResult, the best first

A candidate is an image of a catalog, verified with the reader's trust, or a target or release without an
image. Without an image only documentation and predictions are used.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from imagefactory.actions.centers import CenterCatalog, CenterCatalogs, JoinedCenter, read_centers
from imagefactory.actions.locked import lock_state, read_target_lock, read_unsolvable_reason
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import NothingSelectedError, StoreError
from imagefactory.gpu import knowledge
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.knowledge import families
from imagefactory.gpu.values import Cell, ClaimBasis
from imagefactory.jobs.offer import (
    AvailableGpu,
    GpuClass,
    MachineIndex,
    ResourceRequest,
    choose_form,
    classifier_for,
    expected_grounds,
    find_available_gpus,
    fits,
    forms_of,
    index_machines,
)
from imagefactory.matrix.compat import (
    CompatGpu,
    CoverCandidate,
    TargetEvidence,
    candidate_of,
    cell,
    columns,
    releases,
    serves,
)
from imagefactory.model import NO_CUDA, Outcome, Target
from imagefactory.oci.layout import Layout, reference
from imagefactory.project import Project, uses_catalog
from imagefactory.recipes.names import few, suggest
from imagefactory.recipes.yaml_tree import show
from imagefactory.scan.layers import cached_contents
from imagefactory.schedulers.pool import MACHINE_HAS, Inventory, PoolGpu
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.sizes import disk_of, memory_of
from imagefactory.settings.load import Settings
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer
from imagefactory.trust.claims import VerdictAges
from imagefactory.trust.offers import empty_catalog_error, verdict_ages_of, verify_offer
from imagefactory.trust.verdict import RevokedCell
from imagefactory.versions import natural

_NUMBER = re.compile(r"v?([0-9]+(?:\.[0-9]+)*)")
_CUDA = re.compile(r"cu(?:da)?-?([0-9]+(?:\.[0-9]+)?)")
_WEIGHT = {ClaimBasis.VERIFIED: 0, ClaimBasis.PREDICTED: 1, ClaimBasis.DOCUMENTED: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCandidate:
    """An image, target or release. `target` is empty if no recipe builds it. `ready` is true for an image.

    `known` returns the evidence that the candidate runs on a GPU of a pool; without a pool `classes` returns
    those GPUs. It takes time, so only selected candidates are asked. `resources` is the request of its jobs.
    `unknown` returns whether evidence is missing for a GPU of a pool, or (None) for some GPU. With several
    joined centers, `name` begins with its `center`.
    """

    name: str
    target: str
    family: str
    framework: str
    version: str
    cuda: str
    ready: bool
    classes: Callable[[], tuple[GpuClass, ...]]
    known: Callable[[PoolGpu], GpuClass | None]
    resources: ResourceRequest
    unknown: Callable[[PoolGpu | None], bool]
    revoked: tuple[RevokedCell, ...] = ()
    center: str = ""

    @property
    def argument(self) -> str:
        """The name for other commands; empty for a release that no recipe builds."""
        return self.name if self.center else self.target

    @property
    def gpu(self) -> bool:
        """Whether the candidate is for GPUs, not only for CPUs."""
        return self.cuda != NO_CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMatch:
    """A type of GPU that may run the candidate. Without a pool there are no name and counts."""

    capability: str
    basis: ClaimBasis
    why: str
    name: str = ""
    gpus: int = 0
    free: int = 0
    unsure: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindMatch:
    """A matching candidate and its GPUs, the best evidence first.

    `unknown` is true if there is no such GPU, but evidence is missing for some GPU: the image may run there.
    """

    candidate: FindCandidate
    gpus: tuple[GpuMatch, ...]
    unknown: bool = False

    @property
    def rank(self) -> tuple[int, bool, int]:
        """A sort key, lower is better: the best basis, whether such a GPU is free, how many there are."""
        best = min((_WEIGHT[gpu.basis] for gpu in self.gpus), default=len(_WEIGHT))
        rows = [gpu for gpu in self.gpus if _WEIGHT[gpu.basis] == best]
        return best, not any(gpu.free for gpu in rows), -sum(gpu.gpus for gpu in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRequest:
    """The words to search, for jobs that request `resources`, on the pool of an inventory if there is one.

    `site` is the site of the jobs, empty for the setting.
    """

    words: tuple[str, ...]
    resources: ResourceRequest
    inventory: Inventory | None
    now: datetime
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindResult:
    """The matches, the best first. `open` are the centers with images, none if nothing is verified.

    `own_project` is true if no catalog was searched. `place` is the path of the project, or of the only
    catalog, and empty for the bundled recipes. `ages` are the ages of the verdicts.
    """

    matches: tuple[FindMatch, ...]
    request: FindRequest
    open: tuple[CenterCatalog, ...]
    own_project: bool
    place: str
    ages: VerdictAges | None = None
    notes: tuple[str, ...] = ()

    @property
    def catalog(self) -> Catalog | None:
        """The catalog of the first center with images."""
        return self.open[0].catalog if self.open else None


def find_images(
    settings: Settings,
    environ: Mapping[str, str],
    recipes: Callable[[], Project | None],
    request: FindRequest,
) -> FindResult:
    """Return the matches. Raises NothingSelectedError without a match, and the errors of read_catalog.

    `recipes` loads the project of the settings, or the bundled recipes, and returns None without either.
    """
    own_project = not uses_catalog(settings)
    project = recipes() if own_project else None
    opened = None if own_project and project is None else read_centers(settings, environ, request.now)
    offers: list[ImageOffer] = []
    candidates: list[FindCandidate] = []
    unavailable: list[tuple[FindCandidate, NothingSelectedError]] = []
    for row in opened.open if opened else ():
        for image in row.catalog.images:
            offers.append(verify_offer(row.catalog, image, row.center.trust, request.now))
            named = _named_candidate(image, row.center, request.resources)
            try:
                candidates.append(_offered_candidate(named, offers[-1], row.center, request))
            except NothingSelectedError as error:
                unavailable.append((named, error))
    if own_project:
        targets = {row.target for row in candidates}
        covers = (
            read_candidates(project, project.targets)
            if project
            else [cover for groups in families().values() for cover in releases(groups)]
        )
        candidates += [
            _candidate(row, request.resources) for row in covers if not row.name or row.name not in targets
        ]
        unavailable = []  # the project builds them
    place = _place(settings, opened, own_project=own_project)
    for named, reason in unavailable:
        only = _matches_any(request.words, [named]) and not _matches_any(request.words, candidates)
        if only or not candidates:
            raise NothingSelectedError(reason.code, f"{named.name}: {reason.message}", hint=reason.hint)
    if not candidates:
        raise (
            NothingSelectedError(
                "recipes-missing", f"{place} has no recipes", hint="run imagefactory recipe new FAMILY"
            )
            if own_project
            else empty_catalog_error()
        )
    return FindResult(
        matches=_find_matches(request.words, candidates, request.inventory),
        request=request,
        open=tuple(row for row in opened.open if row.catalog.images) if opened else (),
        own_project=own_project,
        place=place,
        ages=verdict_ages_of(offers, request.now) if offers else None,
        notes=(
            *(opened.notes if opened else ()),
            *(f"skipped {named.name}: {error.message}" for named, error in unavailable),
        ),
    )


def _place(settings: Settings, opened: CenterCatalogs | None, *, own_project: bool) -> str:
    """Return the project, or the place of the catalog; empty for the bundled recipes."""
    if own_project:
        return "" if settings.shipped else str(settings.root_path)
    return opened.open[0].center.place if opened else ""


def _find_matches(
    words: Sequence[str], candidates: Sequence[FindCandidate], inventory: Inventory | None
) -> tuple[FindMatch, ...]:
    """Return all matches, the best first, including those without a GPU."""
    machines = index_machines(inventory) if inventory else None
    matches = [_match(candidate, machines) for candidate in _select(words, candidates)]

    def order(match: FindMatch) -> tuple[object, ...]:
        row = match.candidate
        default = not re.search(r"-(cu[0-9]+|cpu)-", row.target)  # no suffix such as `-py313`
        return natural(row.version), natural(row.cuda), default

    newest = sorted(matches, key=order, reverse=True)
    return tuple(sorted(newest, key=lambda match: match.rank))


def _match(candidate: FindCandidate, machines: Sequence[MachineIndex] | None) -> FindMatch:
    if machines is None:
        rows = [
            GpuMatch(capability=str(row.capability), basis=row.claim.basis, why=row.claim.reason)
            for row in candidate.classes()
        ]
    else:
        rows = _on_pool(candidate, machines)
    rows.sort(key=lambda row: (_WEIGHT[row.basis], parse_capability(row.capability), row.name))
    unknown = candidate.gpu and not rows and _may_run(candidate, machines)
    return FindMatch(candidate=candidate, gpus=tuple(rows), unknown=unknown)


def _may_run(candidate: FindCandidate, machines: Sequence[MachineIndex] | None) -> bool:
    """Return whether evidence is missing for some GPU, of a pool with enough of them on one machine."""
    if machines is None:
        return candidate.unknown(None)
    resources = candidate.resources
    fitting = ([gpu for gpu in machine.gpus if fits(gpu, resources)] for machine in machines)
    enough = (gpu for gpus in fitting if len(gpus) >= resources.gpus for gpu in gpus)
    return any(candidate.unknown(gpu) for gpu in enough)


def _on_pool(candidate: FindCandidate, machines: Sequence[MachineIndex]) -> list[GpuMatch]:
    groups: dict[tuple[str, str, ClaimBasis], list[AvailableGpu]] = {}
    for gpu_place in find_available_gpus(candidate.known, candidate.resources, machines):
        key = (gpu_place.gpu.name, gpu_place.gpu.capability, gpu_place.gpu_class.claim.basis)
        groups.setdefault(key, []).append(gpu_place)
    return [
        GpuMatch(
            capability=capability,
            name=name or capability,
            gpus=len(places),
            free=sum(gpu_place.free for gpu_place in places),
            unsure=sum(gpu_place.unsure for gpu_place in places),
            basis=basis,
            why=places[0].gpu_class.claim.reason,
        )
        for (name, capability, basis), places in groups.items()
    ]


# --- Candidates


def _named_candidate(image: CatalogImage, center: JoinedCenter, resources: ResourceRequest) -> FindCandidate:
    """Return an image of a catalog before its formats and GPUs are known."""
    return FindCandidate(
        name=f"{center.prefix}{image.target}",
        target=image.target,
        family=image.family,
        framework=image.framework,
        version=image.version,
        cuda=image.cuda,
        ready=False,
        classes=tuple,
        known=lambda _: None,
        resources=resources,
        unknown=lambda _: True,
        center=center.name if center.several else "",
    )


def _offered_candidate(
    named: FindCandidate, offer: ImageOffer, center: JoinedCenter, request: FindRequest
) -> FindCandidate:
    """Return an image of a catalog in the format for jobs of the site.

    Raises NothingSelectedError if there is no such format.
    """
    image, site = offer.image, find_site(request.site or center.settings.site.value)
    form = choose_form(forms_of(offer, center.settings.sif_folder.value), site, None)
    grounds = expected_grounds(form.grounds, image)
    revoked = form.grounds.revoked
    known = {str(row.capability) for row in grounds.classes}
    known |= {str(capability) for capability, _ in grounds.refused}
    known |= {row.capability for row in revoked}
    everywhere = "" in known  # a revocation without a capability is for all GPUs
    file = form.image
    sizes = (0, 0) if file.address.startswith("/") else (file.size, file.unpacked)
    return replace(
        named,
        ready=True,
        classes=lambda: grounds.classes,
        known=classifier_for(grounds.classes),
        # As `job write` would request it without further options.
        resources=ResourceRequest(
            gpus=request.resources.gpus,
            gpu_memory=request.resources.gpu_memory,
            cpus=1,
            memory=memory_of(file.unpacked, file.size),
            disk=disk_of(file.kind, *sizes),
            platform=image.platform,
            needs=(MACHINE_HAS[file.kind], *site.attributes(file.address)),
        ),
        unknown=lambda gpu: not everywhere and (not known if gpu is None else gpu.capability not in known),
        revoked=revoked,
    )


def _candidate(cover: CoverCandidate, resources: ResourceRequest) -> FindCandidate:
    """Return a candidate for a target or release without an image, from predictions and documentation."""
    question = cover.question
    gpus = columns(amd=bool(rocm_of(question.cuda)))

    @functools.cache
    def answer_on(gpu: CompatGpu) -> Cell:
        return cell(cover, gpu)

    def on(gpu: CompatGpu) -> GpuClass | None:
        answer = answer_on(gpu)
        if question.cuda == NO_CUDA or not serves(answer):
            return None
        return GpuClass(capability=gpu.capability, cuda="", claim=answer.claims[0])

    def unknown(gpu: PoolGpu | None) -> bool:
        if gpu is None:
            return any(not answer_on(column).claims for column in gpus)
        return not gpu.capability or not answer_on(_release_type(gpu)).claims

    return FindCandidate(
        name=cover.title,
        target=cover.name,
        family=next((name for name, group in families().items() if group == cover.group), cover.group),
        framework=question.framework,
        version=question.version,
        cuda=question.cuda,
        ready=False,
        classes=lambda: tuple(row for gpu in gpus if (row := on(gpu))),
        known=lambda gpu: on(_release_type(gpu)) if gpu.capability else None,
        resources=resources,
        unknown=unknown,
    )


def _release_type(gpu: PoolGpu) -> CompatGpu:
    driver = gpu.driver or (knowledge.native_driver(gpu.cuda) if gpu.cuda else "")
    capability = parse_capability(gpu.capability)
    return CompatGpu(name=str(capability), capability=capability, driver=driver, host=gpu.host)


def _select(words: Sequence[str], candidates: Iterable[FindCandidate]) -> tuple[FindCandidate, ...]:
    """Return the candidates that match each word.

    A word is a family, a framework, a target or its beginning, a version, a CUDA version (cu121), or `cpu`.
    """
    matching = tuple(candidates)
    for number, word in enumerate(words):
        fitting = tuple(row for row in matching if _fits(word.lower(), row))
        if not fitting:
            known = {row.argument or f"{row.framework} {row.version}": row.family for row in matching}
            before = " ".join(words[:number])
            raise NothingSelectedError(
                "target-unknown",
                f"no image matches {before + ' ' if before else ''}{show(word)}",
                hint=f"images of {before}: {few(tuple(known))}" if before else suggest(word, known),
            )
        matching = fitting
    return matching


def _matches_any(words: Sequence[str], candidates: Sequence[FindCandidate]) -> bool:
    return any(all(_fits(word.lower(), row) for word in words) for row in candidates)


def _fits(word: str, row: FindCandidate) -> bool:
    def begins(text: str, prefix: str, mark: str) -> bool:
        return text == prefix or text.startswith(prefix + mark)

    if version := _NUMBER.fullmatch(word):
        return begins(row.version, version[1], ".") or begins(row.cuda, version[1], ".")
    if cuda := _CUDA.fullmatch(word):
        return row.cuda.replace(".", "").startswith(cuda[1].replace(".", ""))
    if word == "cpu":
        return not row.gpu
    names = (row.target or row.name, row.argument)
    if word and word in (row.family, row.framework, row.center, *names):
        return True
    return any(fnmatchcase(name, word) or begins(name, word, "-") for name in names)


def read_candidates(project: Project | None, targets: Sequence[Target]) -> list[CoverCandidate]:
    """Return targets with their locks. An outdated or malformed lock is ignored."""
    if project is None:
        return []
    tags, judge = project.layout.tags(), VerdictReader(project, datetime.now(UTC))
    candidates = []
    for target in targets:
        state = lock_state(project, target)
        reason = read_unsolvable_reason(project, target) if state == Outcome.UNSOLVABLE else None
        lock = read_target_lock(project, target) if state == "ok" else None
        known = TargetEvidence(lock=lock, state=state, unsolvable=reason.reason if reason else "")
        if lock and reference(target) in tags:
            known = _with_cached_scan(project.layout, target, known, judge)
        candidates.append(candidate_of(target, known))
    return candidates


def _with_cached_scan(
    layout: Layout, target: Target, known: TargetEvidence, judge: VerdictReader
) -> TargetEvidence:
    """Add an earlier scan of the target's image, unless one of its layers was never scanned."""
    try:
        image = layout.image(reference(target))
        contents = cached_contents(layout, image) if image else None
        verdicts = judge.stored(image) if image and contents else ()
    except StoreError:
        return known  # corrupt: `image check` reports that, and the locked wheels still count
    return replace(known, image=contents, verdicts=verdicts)
