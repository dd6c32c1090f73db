"""What there is to find: images of the catalogue or the factory, else what is known without any image.

A factory answers first, then the catalogue that the settings name, then the recipes that come along; where
there are none either, all releases of which something is documented.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from imagefactory.actions.centers import CenterCatalog, JoinedCenter, read_centers
from imagefactory.actions.locked import lock_state, read_target_lock, read_unsolvable_reason
from imagefactory.actions.plan import cached_contents
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import NothingSelectedError, StoreError
from imagefactory.gpu import knowledge
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.knowledge import families
from imagefactory.gpu.values import ClaimBasis
from imagefactory.jobs.offer import (
    AvailableGpu,
    GpuClass,
    ImageForm,
    MachineIndex,
    ResourceRequest,
    by_class,
    choose_form,
    expected_grounds,
    find_places,
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
from imagefactory.project import Project, has_catalog, is_project
from imagefactory.recipes.names import few, suggest
from imagefactory.recipes.yaml_tree import show
from imagefactory.schedulers.pool import MACHINE_HAS, Inventory, PoolGpu
from imagefactory.schedulers.sites import Site, find_site
from imagefactory.schedulers.sizes import disk_of, memory_of
from imagefactory.settings.load import Settings
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer
from imagefactory.trust.claims import VerdictAges
from imagefactory.trust.offers import verdict_ages_of, verify_offer
from imagefactory.trust.verdict import RevokedCell
from imagefactory.versions import natural

# --- What somebody looks for in a few words, on the GPUs of his pool, and how well each is known. Pure
#     words + Wish + Findables (+ Inventory) -> find() -> Found, the best first
# A findable is an image of a catalogue, judged by the reader's trust, or a target or release of which there
# is no image: then what is documented and predicted is all that is known.


_NUMBER = re.compile(r"v?([0-9]+(?:\.[0-9]+)*)")
_CUDA = re.compile(r"cu(?:da)?-?([0-9]+(?:\.[0-9]+)?)")
_WEIGHT = {ClaimBasis.VERIFIED: 0, ClaimBasis.PREDICTED: 1, ClaimBasis.DOCUMENTED: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCandidate:
    """Something to find. `target` is empty for a release that no recipe makes; `ready`: there is an image.

    `known` says why it may run on a GPU of a pool, None where it may not; `classes` are those GPUs where no
    pool is known. `wish` is what its jobs ask of machines. `unknown` says whether nothing is known of it on a
    GPU of a pool, or (None) on GPUs at all. `revoked` is what was taken back of it. `center` offers it, where
    several are joined: its `name` begins with that.
    """

    name: str
    target: str
    family: str
    framework: str
    version: str
    cuda: str
    ready: bool
    classes: tuple[GpuClass, ...]
    known: Callable[[PoolGpu], GpuClass | None]
    wish: ResourceRequest
    unknown: Callable[[PoolGpu | None], bool]
    revoked: tuple[RevokedCell, ...] = ()
    center: str = ""

    @property
    def argument(self) -> str:
        """What other commands take for it; empty for a release that no recipe makes."""
        return self.name if self.center else self.target

    @property
    def gpu(self) -> bool:
        """Whether it is for GPUs, not for CPUs alone."""
        return self.cuda != NO_CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMatch:
    """A kind of GPU on which it may run. Without a pool `name` is empty and the counts are 0."""

    capability: str
    name: str
    gpus: int
    free: int
    unsure: int
    basis: ClaimBasis
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindMatch:
    """A findable that the words mean, and the GPUs for it, the best known first.

    `unknown`: there are none, and of some GPU nothing is known, so it may run there.
    """

    findable: FindCandidate
    gpus: tuple[GpuMatch, ...]
    unknown: bool = False

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The lower the better: how well it is known at best, whether that is free, how many such GPUs."""
        best = min((_WEIGHT[gpu.basis] for gpu in self.gpus), default=len(_WEIGHT))
        rows = [gpu for gpu in self.gpus if _WEIGHT[gpu.basis] == best]
        return best, not any(gpu.free for gpu in rows), -sum(gpu.gpus for gpu in rows)


def find_matches(
    words: Sequence[str], findables: Sequence[FindCandidate], inventory: Inventory | None
) -> tuple[FindMatch, ...]:
    """All that the words mean, the best first, also what no GPU is for.

    Raises NothingSelectedError where they mean nothing, with what there is.
    """
    machines = index_machines(inventory) if inventory else None
    matches = [_find_for_candidate(match, machines) for match in _meant(words, findables)]
    newest = sorted(
        matches,
        key=lambda match: (natural(match.findable.version), natural(match.findable.cuda), not _suffix(match)),
        reverse=True,
    )
    return tuple(sorted(newest, key=lambda match: match.rank))


def _find_for_candidate(candidate: FindCandidate, machines: Sequence[MachineIndex] | None) -> FindMatch:
    if machines is None:
        gpus = _on_any_gpu(candidate)
        unknown = candidate.unknown(None)
    else:
        gpus = _on_pool(candidate, machines)
        fitting = (gpu for machine in machines for gpu in machine.gpus if fits(gpu, candidate.wish))
        unknown = any(candidate.unknown(gpu) for gpu in fitting)
    return FindMatch(findable=candidate, gpus=gpus, unknown=candidate.gpu and not gpus and unknown)


def _suffix(match: FindMatch) -> bool:
    """Whether it is not its family's default (`-py313`)."""
    return bool(re.search(r"-(cu[0-9]+|cpu)-", match.findable.target))


# --- what there is ---------------------------------------------------------------------------------


def offered_candidates(
    offer: ImageOffer, site: Site, folder: str, resources: ResourceRequest
) -> FindCandidate | None:
    """An image of a catalogue, in the form that jobs of a site take; None where there is no such form."""
    image = offer.image
    try:
        form = choose_form(forms_of(offer, folder), site, None)
    except NothingSelectedError:
        return None
    grounds = expected_grounds(form.grounds, image)
    classes = grounds.classes
    spoken = {str(gpu_class.capability) for gpu_class in classes} | {
        str(capability) for capability, _ in grounds.refused
    }
    return FindCandidate(
        name=image.target,
        target=image.target,
        family=image.family,
        framework=image.framework,
        version=image.version,
        cuda=image.cuda,
        ready=True,
        classes=classes,
        known=by_class(classes),
        wish=_with_image(resources, image, form, site),
        unknown=lambda gpu: not spoken if gpu is None else gpu.capability not in spoken,
        revoked=form.grounds.revoked,
    )


def _with_image(
    resources: ResourceRequest, image: CatalogImage, form: ImageForm, site: Site
) -> ResourceRequest:
    """As `job write` would ask for it without further options."""
    image_file = form.image
    sizes = (0, 0) if image_file.address.startswith("/") else (image_file.size, image_file.unpacked)
    return ResourceRequest(
        gpus=resources.gpus,
        gpu_memory=resources.gpu_memory,
        cpus=1,
        memory=memory_of(image_file.unpacked, image_file.size),
        disk=disk_of(image_file.kind, *sizes),
        platform=image.platform,
        needs=(MACHINE_HAS[image_file.kind], *site.attributes(image_file.address)),
    )


def candidate(cover: CoverCandidate, resources: ResourceRequest) -> FindCandidate:
    """A target or a release without an image: on a GPU what is predicted and documented of it counts."""
    question = cover.question

    def on(gpu: CompatGpu) -> GpuClass | None:
        if question.cuda == NO_CUDA:
            return None
        answer = cell(cover, gpu)
        if not serves(answer):
            return None
        return GpuClass(capability=gpu.capability, cuda="", claim=answer.claims[0])

    seen: dict[CompatGpu, GpuClass | None] = {}

    def known(gpu: PoolGpu) -> GpuClass | None:
        if not gpu.capability:
            return None
        kind = _release_type(gpu)
        if kind not in seen:
            seen[kind] = on(kind)
        return seen[kind]

    def unknown(gpu: PoolGpu | None) -> bool:
        if gpu is None:
            return any(not cell(cover, kind).claims for kind in columns(amd=bool(rocm_of(question.cuda))))
        return not gpu.capability or not cell(cover, _release_type(gpu)).claims

    return FindCandidate(
        name=cover.title,
        target=cover.name,
        family=next((name for name, of in knowledge.families().items() if of == cover.group), cover.group),
        framework=question.framework,
        version=question.version,
        cuda=question.cuda,
        ready=False,
        classes=tuple(
            gpu_class for gpu in columns(amd=bool(rocm_of(question.cuda))) if (gpu_class := on(gpu))
        ),
        known=known,
        wish=resources,
        unknown=unknown,
    )


def _release_type(gpu: PoolGpu) -> CompatGpu:
    driver = gpu.driver or (knowledge.native_driver(gpu.cuda) if gpu.cuda else "")
    capability = parse_capability(gpu.capability)
    return CompatGpu(name=str(capability), capability=capability, driver=driver, host=gpu.host)


# --- what the words mean ---------------------------------------------------------------------------


def _meant(words: Sequence[str], findables: Sequence[FindCandidate]) -> tuple[FindCandidate, ...]:
    """Each word must fit: a family, a framework, a target or its beginning, a version, a CUDA (cu121), or
    `cpu` for what needs no GPU."""
    matching = tuple(findables)
    for number, word in enumerate(words):
        fitting = tuple(candidate for candidate in matching if _fits(word.lower(), candidate))
        if not fitting:
            known = {
                candidate.argument or f"{candidate.framework} {candidate.version}": candidate.family
                for candidate in matching
            }
            before = " ".join(words[:number])
            raise NothingSelectedError(
                "target-unknown",
                f"no image matches {before + ' ' if before else ''}{show(word)}",
                hint=f"images of {before}: {few(tuple(known))}" if before else suggest(word, known),
            )
        matching = fitting
    return matching


def _fits(word: str, candidate: FindCandidate) -> bool:
    if version := _NUMBER.fullmatch(word):
        return _name_starts_with(version[1], candidate.version) or _name_starts_with(
            version[1], candidate.cuda
        )
    if cuda := _CUDA.fullmatch(word):
        return candidate.cuda.replace(".", "").startswith(cuda[1].replace(".", ""))
    if word == "cpu":
        return not candidate.gpu
    names = (
        candidate.family,
        candidate.framework,
        candidate.target or candidate.name,
        candidate.argument,
        candidate.center,
    )
    if word and word in names:
        return True
    return any(
        fnmatchcase(name, word) or _name_starts_with(word, name, "-")
        for name in (candidate.target or candidate.name, candidate.argument)
    )


def _name_starts_with(prefix: str, whole: str, mark: str = ".") -> bool:
    return whole == prefix or whole.startswith(prefix + mark)


# --- where it may run ------------------------------------------------------------------------------


def _on_pool(candidate: FindCandidate, machines: Sequence[MachineIndex]) -> tuple[GpuMatch, ...]:
    groups: dict[tuple[str, str, ClaimBasis], list[AvailableGpu]] = {}
    for place in find_places(candidate.known, candidate.wish, machines):
        key = (place.gpu.name, place.gpu.capability, place.gpu_class.claim.basis)
        groups.setdefault(key, []).append(place)
    rows = (
        GpuMatch(
            capability=capability,
            name=name or capability,
            gpus=len(places),
            free=sum(place.free for place in places),
            unsure=sum(place.unsure for place in places),
            basis=basis,
            why=places[0].gpu_class.claim.reason,
        )
        for (name, capability, basis), places in groups.items()
    )
    return _sorted(rows)


def _on_any_gpu(candidate: FindCandidate) -> tuple[GpuMatch, ...]:
    rows = (
        GpuMatch(
            capability=str(gpu_class.capability),
            name="",
            gpus=0,
            free=0,
            unsure=0,
            basis=gpu_class.claim.basis,
            why=gpu_class.claim.reason,
        )
        for gpu_class in candidate.classes
    )
    return _sorted(rows)


def _sorted(rows: Iterable[GpuMatch]) -> tuple[GpuMatch, ...]:
    return tuple(
        sorted(rows, key=lambda row: (_WEIGHT[row.basis], parse_capability(row.capability), row.name))
    )


# --- Targets as `compat` and `search` judge them: by their locks, and what is known of their images


def read_candidates(factory: Project | None, targets: Sequence[Target]) -> list[CoverCandidate]:
    """Targets with their locks. One that is stale or malformed is judged by its recipe alone."""
    if factory is None:
        return []
    tags, judge = factory.layout.tags(), VerdictReader(factory, datetime.now(UTC))
    candidates = []
    for target in targets:
        state = lock_state(factory, target)
        why = read_unsolvable_reason(factory, target) if state == Outcome.UNSOLVABLE else None
        lock = read_target_lock(factory, target) if state == "ok" else None
        known = TargetEvidence(lock=lock, state=state, unsolvable=why.reason if why else "")
        if lock and reference(target) in tags:
            known = _with_cached_scan(factory.layout, target, known, judge)
        candidates.append(candidate_of(target, known))
    return candidates


def _with_cached_scan(
    layout: Layout, target: Target, known: TargetEvidence, judge: VerdictReader
) -> TargetEvidence:
    """With what an earlier scan of the target's image found, unless a layer of it was never scanned."""
    try:
        image = layout.image(reference(target))
        contents = cached_contents(layout, image) if image else None
        verdicts = judge.stored(image) if image and contents else ()
    except StoreError:
        return known  # damaged: `store` tells that, and here the locked wheels still speak
    return replace(known, image=contents, verdicts=verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRequest:
    """What to search, for jobs that request `wish`, on the pool of an inventory if there is one.

    `site` is that of the jobs, empty for the setting.
    """

    words: tuple[str, ...]
    wish: ResourceRequest
    inventory: Inventory | None
    now: datetime
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindResult:
    """What was found, the best first. `open` are the centers with images, none where nothing is verified.

    `factory` says that it is this factory's own, `place` where that or the only catalogue lies, `ages` how
    old the catalogues' proofs are, and `notes` how they were had.
    """

    found: tuple[FindMatch, ...]
    ask: FindRequest
    open: tuple[CenterCatalog, ...]
    factory: bool
    place: str
    ages: VerdictAges | None = None
    notes: tuple[str, ...] = ()

    @property
    def catalogue(self) -> Catalog | None:
        """That of the first center with images."""
        return self.open[0].catalogue if self.open else None


def find_images(
    settings: Settings, environ: Mapping[str, str], recipes: Callable[[], Project | None], ask: FindRequest
) -> FindResult:
    """Raises NothingSelectedError where the words mean nothing, and what read_catalogue raises.

    `recipes` reads the factory of the settings, or the recipes that come along: None where there are none.
    """
    own = is_project(settings)
    opened = read_centers(settings, environ, ask.now) if own or has_catalog(settings) else None
    offers: list[ImageOffer] = []
    findables: list[FindCandidate] = []
    for row in opened.open if opened else ():
        judged = _verified_images(row, ask.now)
        offers += judged
        findables += _catalog_offers(row.center, judged, ask)
    if own or opened is None:
        targets = {row.target for row in findables}
        findables += [
            row for row in _candidates(recipes(), ask) if row.target not in targets or not row.target
        ]
    return FindResult(
        found=find_matches(ask.words, findables, ask.inventory),
        ask=ask,
        open=tuple(row for row in opened.open if row.catalogue.images) if opened else (),
        factory=own,
        place=str(settings.root_path) if own else opened.open[0].center.place if opened else "",
        ages=verdict_ages_of(offers, ask.now) if offers else None,
        notes=opened.notes if opened else (),
    )


def _verified_images(row: CenterCatalog, now: datetime) -> list[ImageOffer]:
    return [verify_offer(row.catalogue, image, row.center.trust, now) for image in row.catalogue.images]


def _catalog_offers(
    center: JoinedCenter, offers: Sequence[ImageOffer], ask: FindRequest
) -> Iterator[FindCandidate]:
    site, folder = find_site(ask.site or center.settings.site.value), center.settings.sif_folder.value
    for offer in offers:
        candidate_image = offered_candidates(offer, site, folder, ask.wish)
        if candidate_image is not None:
            yield (
                replace(candidate_image, name=f"{center.prefix}{candidate_image.name}", center=center.name)
                if center.several
                else candidate_image
            )


def _candidates(factory: Project | None, ask: FindRequest) -> Sequence[FindCandidate]:
    if factory:
        return [candidate(cover, ask.wish) for cover in read_candidates(factory, factory.targets)]
    names = dict(families())
    return [candidate(cover, ask.wish) for family in names for cover in releases(names[family])]
