"""What somebody looks for in a few words, on the GPUs of his pool, and how well each is known. Pure.

    words + Wish + Findables (+ Inventory) -> find() -> Found, the best first

A findable is an image of a catalogue, judged by the reader's trust, or a target or release of which there
is no image: then what is documented and predicted is all that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from imagefactory.catalogue.model import CataloguedImage, Offer
from imagefactory.errors import NothingSelectedError
from imagefactory.gpu import knowledge
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import Basis
from imagefactory.matrix.compat import CompatGpu, CoverCandidate, cell, columns, serves
from imagefactory.model import NO_CUDA
from imagefactory.schedulers.pool import MACHINE_HAS, Inventory, PoolGpu
from imagefactory.schedulers.sites import Site
from imagefactory.schedulers.sizes import disk_of, memory_of
from imagefactory.recipes.names import few, suggest
from imagefactory.recipes.yaml_tree import show
from imagefactory.submit.forms import ImageForm, choose_form, expected_grounds, forms_of
from imagefactory.submit.places import Place, SeenMachine, Wish, by_class, find_places, fits, look
from imagefactory.jobs.offer import GpuClass
from imagefactory.trust.verdict import RevokedCell
from imagefactory.versions import natural

_NUMBER = re.compile(r"v?([0-9]+(?:\.[0-9]+)*)")
_CUDA = re.compile(r"cu(?:da)?-?([0-9]+(?:\.[0-9]+)?)")
_WEIGHT = {Basis.VERIFIED: 0, Basis.PREDICTED: 1, Basis.DOCUMENTED: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findable:
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
    wish: Wish
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
class FoundGpu:
    """A kind of GPU on which it may run. Without a pool `name` is empty and the counts are 0."""

    capability: str
    name: str
    gpus: int
    free: int
    unsure: int
    basis: Basis
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A findable that the words mean, and the GPUs for it, the best known first.

    `unknown`: there are none, and of some GPU nothing is known, so it may run there.
    """

    findable: Findable
    gpus: tuple[FoundGpu, ...]
    unknown: bool = False

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The lower the better: how well it is known at best, whether that is free, how many such GPUs."""
        best = min((_WEIGHT[one.basis] for one in self.gpus), default=len(_WEIGHT))
        rows = [one for one in self.gpus if _WEIGHT[one.basis] == best]
        return best, not any(one.free for one in rows), -sum(one.gpus for one in rows)


def find(
    words: Sequence[str], findables: Sequence[Findable], inventory: Inventory | None
) -> tuple[Found, ...]:
    """All that the words mean, the best first, also what no GPU is for.

    Raises NothingSelectedError where they mean nothing, with what there is.
    """
    machines = look(inventory) if inventory else None
    found = [_find_one(one, machines) for one in _meant(words, findables)]
    newest = sorted(
        found,
        key=lambda one: (natural(one.findable.version), natural(one.findable.cuda), not _suffix(one)),
        reverse=True,
    )
    return tuple(sorted(newest, key=lambda one: one.rank))


def _find_one(one: Findable, machines: Sequence[SeenMachine] | None) -> Found:
    if machines is None:
        gpus = _anywhere(one)
        unknown = one.unknown(None)
    else:
        gpus = _on_pool(one, machines)
        fitting = (gpu for machine in machines for gpu in machine.gpus if fits(gpu, one.wish))
        unknown = any(one.unknown(gpu) for gpu in fitting)
    return Found(findable=one, gpus=gpus, unknown=one.gpu and not gpus and unknown)


def _suffix(one: Found) -> bool:
    """Whether it is not its family's default (`-py313`)."""
    return bool(re.search(r"-(cu[0-9]+|cpu)-", one.findable.target))


# --- what there is ---------------------------------------------------------------------------------


def offered(offer: Offer, site: Site, folder: str, wish: Wish) -> Findable | None:
    """An image of a catalogue, in the form that jobs of a site take; None where there is no such form."""
    image = offer.image
    try:
        form = choose_form(forms_of(offer, folder), site, None)
    except NothingSelectedError:
        return None
    grounds = expected_grounds(form.grounds, image)
    classes = grounds.classes
    spoken = {str(one.capability) for one in classes} | {str(capability) for capability, _ in grounds.refused}
    return Findable(
        name=image.target,
        target=image.target,
        family=image.family,
        framework=image.framework,
        version=image.version,
        cuda=image.cuda,
        ready=True,
        classes=classes,
        known=by_class(classes),
        wish=_with_image(wish, image, form, site),
        unknown=lambda gpu: not spoken if gpu is None else gpu.capability not in spoken,
        revoked=form.grounds.revoked,
    )


def _with_image(wish: Wish, image: CataloguedImage, form: ImageForm, site: Site) -> Wish:
    """As `submit` would ask for it without further options."""
    taken = form.image
    sizes = (0, 0) if taken.address.startswith("/") else (taken.size, taken.unpacked)
    return Wish(
        gpus=wish.gpus,
        gpu_memory=wish.gpu_memory,
        cpus=1,
        memory=memory_of(taken.unpacked, taken.size),
        disk=disk_of(taken.kind, *sizes),
        platform=image.platform,
        needs=(MACHINE_HAS[taken.kind], *site.attributes(taken.address)),
    )


def candidate(one: CoverCandidate, wish: Wish) -> Findable:
    """A target or a release without an image: on a GPU what is predicted and documented of it counts."""
    asked = one.question

    def on(gpu: CompatGpu) -> GpuClass | None:
        if asked.cuda == NO_CUDA:
            return None
        answer = cell(one, gpu)
        if not serves(answer):
            return None
        return GpuClass(capability=gpu.capability, cuda="", claim=answer.claims[0])

    seen: dict[CompatGpu, GpuClass | None] = {}

    def known(gpu: PoolGpu) -> GpuClass | None:
        if not gpu.capability:
            return None
        kind = _kind(gpu)
        if kind not in seen:
            seen[kind] = on(kind)
        return seen[kind]

    def unknown(gpu: PoolGpu | None) -> bool:
        if gpu is None:
            return any(not cell(one, kind).claims for kind in columns(amd=bool(rocm_of(asked.cuda))))
        return not gpu.capability or not cell(one, _kind(gpu)).claims

    return Findable(
        name=one.title,
        target=one.name,
        family=next((name for name, of in knowledge.families().items() if of == one.group), one.group),
        framework=asked.framework,
        version=asked.version,
        cuda=asked.cuda,
        ready=False,
        classes=tuple(found for gpu in columns(amd=bool(rocm_of(asked.cuda))) if (found := on(gpu))),
        known=known,
        wish=wish,
        unknown=unknown,
    )


def _kind(gpu: PoolGpu) -> CompatGpu:
    driver = gpu.driver or (knowledge.native_driver(gpu.cuda) if gpu.cuda else "")
    capability = parse_capability(gpu.capability)
    return CompatGpu(name=str(capability), capability=capability, driver=driver, host=gpu.host)


# --- what the words mean ---------------------------------------------------------------------------


def _meant(words: Sequence[str], findables: Sequence[Findable]) -> tuple[Findable, ...]:
    """Each word must fit: a family, a framework, a target or its beginning, a version, a CUDA (cu121), or
    `cpu` for what needs no GPU."""
    left = tuple(findables)
    for number, word in enumerate(words):
        fitting = tuple(one for one in left if _fits(word.lower(), one))
        if not fitting:
            known = {one.argument or f"{one.framework} {one.version}": one.family for one in left}
            before = " ".join(words[:number])
            raise NothingSelectedError(
                "target-unknown",
                f"no image matches {before + ' ' if before else ''}{show(word)}",
                hint=f"images of {before}: {few(tuple(known))}" if before else suggest(word, known),
            )
        left = fitting
    return left


def _fits(word: str, one: Findable) -> bool:
    if version := _NUMBER.fullmatch(word):
        return _begins(version[1], one.version) or _begins(version[1], one.cuda)
    if cuda := _CUDA.fullmatch(word):
        return one.cuda.replace(".", "").startswith(cuda[1].replace(".", ""))
    if word == "cpu":
        return not one.gpu
    names = (one.family, one.framework, one.target or one.name, one.argument, one.center)
    if word and word in names:
        return True
    return any(
        fnmatchcase(name, word) or _begins(word, name, "-") for name in (one.target or one.name, one.argument)
    )


def _begins(asked: str, whole: str, mark: str = ".") -> bool:
    return whole == asked or whole.startswith(asked + mark)


# --- where it may run ------------------------------------------------------------------------------


def _on_pool(one: Findable, machines: Sequence[SeenMachine]) -> tuple[FoundGpu, ...]:
    groups: dict[tuple[str, str, Basis], list[Place]] = {}
    for place in find_places(one.known, one.wish, machines):
        key = (place.gpu.name, place.gpu.capability, place.gpu_class.claim.basis)
        groups.setdefault(key, []).append(place)
    rows = (
        FoundGpu(
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


def _anywhere(one: Findable) -> tuple[FoundGpu, ...]:
    rows = (
        FoundGpu(
            capability=str(found.capability),
            name="",
            gpus=0,
            free=0,
            unsure=0,
            basis=found.claim.basis,
            why=found.claim.reason,
        )
        for found in one.classes
    )
    return _sorted(rows)


def _sorted(rows: Iterable[FoundGpu]) -> tuple[FoundGpu, ...]:
    return tuple(
        sorted(rows, key=lambda row: (_WEIGHT[row.basis], parse_capability(row.capability), row.name))
    )
