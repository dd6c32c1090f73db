"""What is wrong with a batch script for a Slurm cluster: rules over it, an inventory and a catalogue. Pure.

    BatchScript + Surroundings -> check_batch() -> Checked, as of HTCondor's files

Images are judged by the same rules. Slurm tells the types that a site gave its GPUs, and no drivers: that a
driver is new enough is taken for granted here, and looked at by the scripts that `submit` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from imagefactory.gpu.values import slice_of
from imagefactory.schedulers.pool import PoolGpu
from imagefactory.extras.lint.batch_job import BatchAsk, capability_of, read_batch_asked
from imagefactory.submit.check.batch.reach import find_batch_reach, looked_for
from imagefactory.extras.lint.batch_reader import BatchScript
from imagefactory.submit.check.batch.rules import BatchCase, script_findings
from imagefactory.submit.check.batch.starts import PYXIS, as_pyxis, find_starts, misread_by_pyxis
from imagefactory.extras.lint.findings import PREDICTED, REFUSED, REVOKED, VERIFIED, Checked, CheckedJobs, Surroundings
from imagefactory.submit.check.findings import Spot, SubmitFinding, advice, wrong
from imagefactory.extras.lint.image import KnownImage, find_known
from imagefactory.submit.check.image_rules import Moving, moving
from imagefactory.submit.check.known import (
    catalogue_findings,
    grounds_of,
    known_on,
    narrow,
    no_use,
    nowhere,
    reached_by,
    told_causes,
    unverified,
)
from imagefactory.extras.lint.reach import JobReach
from imagefactory.jobs.offer import Grounds

SITE = " --site slurm"
_FEW = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """What the job can get, as far as it is known: `reach` is None without an inventory."""

    grounds: Grounds | None
    reach: JobReach | None
    around: Surroundings


def check_batch(script: BatchScript, around: Surroundings) -> Checked:
    """All that can be said of a script."""
    starts, asked = find_starts(script), read_batch_asked(script)
    images = around.catalogue.images if around.catalogue else ()
    named = [start.named for start in starts if start.named]
    known = next((found for image in named if (found := find_known(image, images))), None)
    case = BatchCase(script=script, asked=asked, starts=starts, known=known)
    inventory = around.inventory
    reach = find_batch_reach(script, asked, inventory) if inventory is not None else None
    place = _Reach(
        grounds=_whatever_driver(grounds_of(known, around), inventory is None or _no_drivers(inventory.gpus)),
        reach=reach,
        around=around,
    )
    reached = tuple(reached_by(reach.reached if reach else (), place.grounds))
    findings = [*script_findings(case), *_image_findings(case, around), *_gpu_findings(case, place)]
    jobs = CheckedJobs(
        line=asked.at.at.line if asked.at else 1,
        count=asked.jobs,
        image=named[0].address if named else "",
        target=known.image.target if known else "",
        known=reach is not None,
        total=len(reach.places) if reach else 0,
        reached=reached,
        causes=tuple(reach.causes.items()) if reach else (),
        gpu=case.asks_gpus,
        findings=tuple(findings),
        title="the script, in any partition" if script.option("partition") else "the script",
    )
    return Checked(name=script.name, jobs=(jobs,), findings=())


def _no_drivers(gpus: tuple[PoolGpu, ...]) -> bool:
    return not any(gpu.cuda for gpu in gpus)


def _whatever_driver(grounds: Grounds | None, untold: bool) -> Grounds | None:
    if grounds is None or not untold:
        return grounds
    return replace(grounds, classes=tuple(replace(one, cuda="") for one in grounds.classes))


# --- the image -----------------------------------------------------------------------------------


def _image_findings(case: BatchCase, around: Surroundings) -> Iterator[SubmitFinding]:
    images = around.catalogue.images if around.catalogue else ()
    told: set[str] = set()
    for start in case.starts:
        image, word = start.named, start.image
        if image is None or word is None or image.address in told:
            continue
        told.add(image.address)
        at = Spot(word.where.line, word.where.column)
        misread = misread_by_pyxis(word.text) if start.verb == PYXIS else None
        if misread:
            yield wrong(at.line, "pyxis", *misread, column=at.column)
        elif (
            image.kind is not None
            and not image.hexes
            and not image.repository
            and image.address[-4:] != ".sif"
        ):
            text = f"'{image.address[:60]}' is not an image reference"
            yield wrong(at.line, "reference", text, "write HOST/NAME@sha256:...", column=at.column)
        elif image.kind is None and "://" in image.address:
            text = f"no verdict can apply to '{image.address[:60]}'"
            hint = "write docker:// or oras://HOST/NAME@sha256:..., or a .sif"
            yield advice(at.line, "reference", text, hint, column=at.column)
        elif image.kind is None:
            text = f"the name of the file or directory '{image.address[:60]}' does not identify its content"
            suffix = ".sqsh" if start.verb == PYXIS else ".sif"
            hint = f"use a {suffix} with digits of its sha256 in its name"
            if suffix not in image.address or not re.search(r"[0-9a-f]{12}", image.address):
                yield advice(at.line, "sandbox", text, hint, column=at.column)
        elif image.pinned:
            known = find_known(image, images)
            yield from catalogue_findings(image, known, around.catalogue, at, SITE)
        else:
            written = as_pyxis if start.verb == PYXIS else None
            around_name = Moving(site=around.site, images=images, digest=around.digest)
            yield from moving(image, at, around_name, written)


# --- the GPUs ------------------------------------------------------------------------------------


def _gpu_findings(case: BatchCase, place: _Reach) -> Iterator[SubmitFinding]:
    asked, known, grounds = case.asked, case.known, place.grounds
    if asked.at is None:
        return
    at = asked.at.at
    if known is not None and not known.image.gpu:
        yield no_use(known, at, asked.at.written)
        return
    if place.reach is None:
        if known is not None and grounds is not None:
            yield from _by_names(case, known, grounds)
        return
    if not place.reach.reached:
        yield _no_match(place, asked, at)
    if known is not None:
        yield from unverified(known, tuple(reached_by(place.reach.reached, grounds)), at, SITE)
        yield from narrow(known, grounds, place.reach.places, at, SITE)


def _no_match(place: _Reach, asked: BatchAsk, at: Spot) -> SubmitFinding:
    assert place.reach is not None
    why = told_causes(place.reach.causes.items()) or "the inventory has none"
    types = sorted({one.gpu.name for one in place.reach.places if one.gpu.name})
    unknown = [kind for kind in asked.kinds if kind not in types]
    text = f"none of {len(place.reach.places)} GPUs matches, so the job never starts: {why}"
    if unknown:
        there = ", ".join(types[:_FEW]) or "no type"
        text = f"no node has a GPU of type {unknown[0][:40]}, only {there}"
    return wrong(
        at.line, "no-match", text, "list the GPUs of the cluster: imagefactory pool", column=at.column
    )


def _by_names(case: BatchCase, known: KnownImage, grounds: Grounds) -> Iterator[SubmitFinding]:
    """Without an inventory names alone tell which GPUs a script asks for."""
    asked, target = case.asked, known.image.target
    assert asked.at is not None
    at, written = asked.at.at, asked.at.written
    names = asked.kinds
    if not names and asked.alternatives and all(capability_of(name) for name in asked.alternatives):
        names, option = asked.alternatives, case.script.options["constraint"]
        at, written = option.at, option.written
    hint = f"write a script that requests only verified GPUs: imagefactory submit {target}{SITE}"
    if not grounds.proven:
        yield nowhere(known, grounds, at)
    elif not names and looked_for(case.script) is None:
        proven = ", ".join(str(one.capability) for one in grounds.classes if one.proven)
        text = f"Slurm may assign any GPU of the cluster, but {target} is verified only on {proven}"
        yield advice(at.line, "any-gpu", text, hint, column=at.column)
    for name in names if grounds.proven else ():
        capability = capability_of(name)
        if not capability:
            text = f"no GPU is known by the name '{name[:40]}'"
            where = "run this on a login node or with --inventory FILE; see imagefactory pool"
            yield advice(at.line, "type", text, where, column=at.column)
            continue
        word, why = known_on(_named(name, capability, part=asked.part or bool(slice_of(name))), grounds)
        if word != VERIFIED:
            says = f"fails on {name}" if word == REFUSED else f"is not verified on {name}"
            says = f"was revoked on {name}" if word == REVOKED else says
            why = f"predicted: {why}" if word == PREDICTED else why
            text = f"{target} {says} ({capability}), which {written} requests: {why}"
            rule = word if word in (REFUSED, REVOKED) else "unverified"
            yield wrong(at.line, rule, text, hint, column=at.column)


def _named(name: str, capability: str, *, part: bool) -> PoolGpu:
    return PoolGpu(
        id="", uuid="", name=name, capability=capability, memory=0, driver="", cuda="", mig=part, free=True
    )  # fmt: skip
