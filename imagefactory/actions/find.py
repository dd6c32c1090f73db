"""Search images by words: in the project, the catalogs or the bundled recipes, else documented releases.

    words, ResourceRequest (and Inventory) -> find_images() -> FindResult, the best first

A candidate is an image of a catalog, verified with the reader's trust, or a target or release without an
image. Without an image only documentation and predictions are used.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from heapq import heapify, heappop, heappush

from imagefactory.actions.centers import CenterCatalog, CenterCatalogs, JoinedCenter, read_centers
from imagefactory.actions.locked import lock_state, read_target_lock, read_unsolvable_reason
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import NothingSelectedError, StoreError
from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.knowledge import families
from imagefactory.gpu.values import Cell, ClaimBasis, rocm_of
from imagefactory.jobs.offer import (
    AvailableGpus,
    GpuClass,
    MachineGroup,
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
from imagefactory.trust.catalog import Catalog, CatalogEntry, ImageOffer
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

    `site` is the site of the jobs, empty for the setting. `most` limits the images of the result, 0 for all.
    """

    words: tuple[str, ...]
    resources: ResourceRequest
    inventory: Inventory | None
    now: datetime
    site: str = ""
    most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindResult:
    """The matches, the best first. `more` is the number of other images that match the words.

    `open` are the centers with images, none if nothing is verified.
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
    more: int = 0

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
    offers: dict[str, ImageOffer] = {}
    rows = [
        _ListedImage(row, number, entry, request, offers)
        for row in (opened.open if opened else ())
        for number, entry in enumerate(row.catalog.entries)
    ]
    place = _place(settings, opened, own_project=own_project)
    search = _Search(index_machines(request.inventory) if request.inventory else None)
    if own_project:
        candidates = search.read(rows)
        search.unavailable = []  # the project builds them
        targets = {row.target for row in candidates}
        covers = (
            read_candidates(project, project.targets)
            if project
            else [cover for groups in families().values() for cover in releases(groups)]
        )
        candidates += [
            _candidate(row, request.resources) for row in covers if not row.name or row.name not in targets
        ]
        if not candidates:
            raise NothingSelectedError(
                "recipes-missing", f"{place} has no recipes", hint="run imagefactory recipe new FAMILY"
            )
        matches, more = search.match(_select(request.words, candidates)), 0
    elif not rows:
        raise empty_catalog_error()
    else:
        selected = {id(row.named): row for row in rows}
        chosen = _select(request.words, [row.named for row in rows])
        matches, more = search.best([selected[id(row)] for row in chosen], request.most)
        if not matches:
            named, reason = search.unavailable[0]
            raise NothingSelectedError(reason.code, f"{named.name}: {reason.message}", hint=reason.hint)
    offered = [offers[match.candidate.name] for match in matches if match.candidate.name in offers]
    return FindResult(
        matches=matches,
        more=more,
        request=request,
        open=tuple(row for row in opened.open if row.catalog.images) if opened else (),
        own_project=own_project,
        place=place,
        ages=verdict_ages_of(offered, request.now) if rows else None,
        notes=(
            *(opened.notes if opened else ()),
            *(f"skipped {named.name}: {error.message}" for named, error in search.unavailable),
        ),
    )


def _place(settings: Settings, opened: CenterCatalogs | None, *, own_project: bool) -> str:
    """Return the project, or the place of the catalog; empty for the bundled recipes."""
    if own_project:
        return "" if settings.shipped else str(settings.root_path)
    return opened.open[0].center.place if opened else ""


class _ListedImage:
    """An image in the index of a catalog. It is read, and its verdicts are verified, when it may be shown."""

    def __init__(
        self,
        row: CenterCatalog,
        number: int,
        entry: CatalogEntry,
        request: FindRequest,
        offers: dict[str, ImageOffer],
    ) -> None:
        self.row, self.number, self.entry, self.request, self.offers = row, number, entry, request, offers
        self.named = _named_candidate(entry, row.center, request.resources)

    def read(self) -> FindCandidate:
        """Return the candidate. Raises NothingSelectedError if the image is not available for the site."""
        catalog, center = self.row.catalog, self.row.center
        offer = verify_offer(catalog, catalog.images[self.number], center.trust, self.request.now)
        self.offers[self.named.name] = offer
        return _offered_candidate(self.named, offer, center, self.request)

    def best_rank(self, counts: Mapping[str, tuple[int, int]] | None) -> tuple[int, bool, int]:
        """Return the best rank that the image can have. `counts` are GPUs by capability, and the free ones.

        Its signer lists its capabilities. Checks of verdicts, drivers and sizes can only remove some.
        """
        for capabilities, basis in (
            (self.entry.verified, ClaimBasis.VERIFIED),
            (self.entry.predicted, ClaimBasis.PREDICTED),
        ):
            if counts is None and capabilities:
                return _WEIGHT[basis], True, 0
            there = [counts[name] for name in capabilities.split() if name in counts] if counts else ()
            if there:
                free = any(number for _, number in there)
                return _WEIGHT[basis], not free, -sum(number for number, _ in there)
        return len(_WEIGHT), True, 0


@dataclass(slots=True)
class _Search:
    """Ranks candidates on the GPUs of `machines`. `unavailable` are images that the site cannot use."""

    machines: Sequence[MachineGroup] | None
    unavailable: list[tuple[FindCandidate, NothingSelectedError]] = field(default_factory=list)

    def read(self, rows: Iterable[_ListedImage]) -> list[FindCandidate]:
        """Return the available candidates."""
        candidates = []
        for row in rows:
            try:
                candidates.append(row.read())
            except NothingSelectedError as error:
                self.unavailable.append((row.named, error))
        return candidates

    def match(self, candidates: Iterable[FindCandidate]) -> tuple[FindMatch, ...]:
        """Return all matches, the best first, including those without a GPU."""
        matches = [_match(row, self.machines) for row in sorted(candidates, key=_newest, reverse=True)]
        return tuple(sorted(matches, key=lambda match: match.rank))

    def best(self, rows: Iterable[_ListedImage], most: int) -> tuple[tuple[FindMatch, ...], int]:
        """Return the best `most` matches, and the number of other images.

        An image is read only if it can be among them. Status and free GPUs decide that, then the number of
        GPUs by capability alone, then the version.
        """
        counts: dict[str, tuple[int, int]] = {}
        for group in self.machines or ():
            for gpu, count, free in group.types:
                total, idle = counts.get(gpu.capability, (0, 0))
                machines = len(group.sizes)
                counts[gpu.capability] = total + count * machines, idle + free * machines
        newest = sorted(rows, key=lambda row: _newest(row.named), reverse=True)
        waiting: list[tuple[tuple[int, bool, int], int, FindMatch | None]]
        known = None if self.machines is None else counts
        waiting = [(row.best_rank(known), number, None) for number, row in enumerate(newest)]
        heapify(waiting)
        matches: list[tuple[tuple[int, bool, int], int, FindMatch]] = []
        while waiting and not 0 < most <= len(matches):
            rank, number, match = heappop(waiting)
            if match:
                matches.append((match.rank, number, match))
                continue
            for candidate in self.read([newest[number]]):
                match = _match(candidate, self.machines)
                as_listed = match.rank[:2] == rank[:2]
                heappush(waiting, (rank if as_listed else match.rank, number, match))
        return tuple(match for *_, match in sorted(matches, key=lambda row: row[:2])), len(waiting)


def _newest(row: FindCandidate) -> tuple[object, ...]:
    """Return a sort key, higher is newer."""
    default = not re.search(r"-(cu[0-9]+|cpu)-", row.target)  # no suffix such as `-py313`
    return natural(row.version), natural(row.cuda), default


def _match(candidate: FindCandidate, machines: Sequence[MachineGroup] | None) -> FindMatch:
    if machines is None:
        rows = [
            GpuMatch(capability=str(row.capability), basis=row.claim.basis, why=row.claim.reason)
            for row in candidate.classes()
        ]
    else:
        rows = _on_pool(candidate, machines)
    rows.sort(key=lambda row: (_WEIGHT[row.basis], parse_capability(row.capability), row.name))
    unknown = candidate.gpu and not rows and _is_unknown(candidate, machines)
    return FindMatch(candidate=candidate, gpus=tuple(rows), unknown=unknown)


def _is_unknown(candidate: FindCandidate, machines: Sequence[MachineGroup] | None) -> bool:
    """Return whether evidence is missing for a GPU that is large enough, or for some GPU without a pool."""
    if machines is None:
        return candidate.unknown(None)
    resources = candidate.resources
    fitting = ([row for row in machine.types if fits(row[0], resources)] for machine in machines)
    enough = (types for types in fitting if sum(count for _, count, _ in types) >= resources.gpus)
    distinct = {id(gpu): gpu for types in enough for gpu, *_ in types}  # machines share them
    return any(map(candidate.unknown, distinct.values()))


def _on_pool(candidate: FindCandidate, machines: Sequence[MachineGroup]) -> list[GpuMatch]:
    groups: dict[tuple[str, str, ClaimBasis], list[AvailableGpus]] = {}
    for gpus in find_available_gpus(candidate.known, candidate.resources, machines):
        key = (gpus.gpu.name, gpus.gpu.capability, gpus.gpu_class.claim.basis)
        groups.setdefault(key, []).append(gpus)
    return [
        GpuMatch(
            capability=capability,
            name=name or capability,
            gpus=sum(gpus.count for gpus in rows),
            free=sum(gpus.free for gpus in rows),
            unsure=sum(gpus.count for gpus in rows if gpus.unsure),
            basis=basis,
            why=rows[0].gpu_class.claim.reason,
        )
        for (name, capability, basis), rows in groups.items()
    ]


# --- Candidates


def _named_candidate(image: CatalogEntry, center: JoinedCenter, resources: ResourceRequest) -> FindCandidate:
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
