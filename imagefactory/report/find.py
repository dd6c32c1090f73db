"""What was found, as a person reads it and as JSON, and the command to go on with. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from imagefactory.gpu.values import Basis
from imagefactory.schedulers.sizes import format_size
from imagefactory.views.catalog import centers_json, source_json
from imagefactory.report.pool import summary
from imagefactory.views.text import fold, format_table
from imagefactory.views.verdicts import format_ages, revoked_json
from imagefactory.actions.find import Finding
from imagefactory.submit.find import Findable, Found, FoundGpu
from imagefactory.submit.places import free_when

MOST = 20
"""Images in one answer for a person."""
MOST_REVOKED = 4


def format_found(finding: Finding, width: int | None = None) -> str:
    """Where the answer comes from, and a row for each kind of GPU."""
    inventory = finding.ask.inventory
    usable = [one for one in finding.found if one.gpus]
    lines = [*fold(_sources(finding), width), ""]
    if usable:
        header = (
            ("IMAGE", "GPU", "GPUS", "FREE", "KNOWN")
            if inventory
            else ("IMAGE", "GPUS BY CAPABILITY", "KNOWN")
        )
        rows = [row for one in usable[:MOST] for row in (_pool_rows(one) if inventory else _rows(one))]
        lines += [format_table(header, rows, width)]
    if len(usable) > MOST:
        lines.append(f"and {len(usable) - MOST} more: say it with more words")
    for one in finding.found[:MOST]:
        lines += [
            f"{one.findable.name} {row.where}: {row.said}" for row in one.findable.revoked[:MOST_REVOKED]
        ]
    for_cpus = [one.findable for one in finding.found if not one.findable.gpu]
    lines += [f"{one.name} needs no GPU: imagefactory {shlex.join(_use(one))}" for one in for_cpus[:MOST]]
    which = "these GPUs" if inventory else "the known GPUs"
    if unknown := sum(one.unknown for one in finding.found):
        lines.append(f"nothing is known of {unknown} image{'s' * (unknown != 1)} on some of {which}")
    if rest := len(finding.found) - len(usable) - len(for_cpus) - unknown:
        what = "image runs" if rest == 1 else "images run"
        lines.append(f"{rest} {what} on none of {which}")
    if any(row.unsure for one in usable[:MOST] for row in one.gpus):
        lines.append("* some of these machines may refuse such jobs: what they take is not told")
    return "\n".join(lines).rstrip()


def next_command(finding: Finding) -> tuple[str, ...]:
    """What the reader types for the best answer, behind `imagefactory`."""
    best, wish = finding.found[0], finding.ask.wish
    if not best.findable.gpu:
        return _use(best.findable)
    if not best.gpus:
        return ("pool",) if finding.ask.inventory else ("compat", best.findable.family)
    one = best.findable
    if one.ready:
        options = ["--gpus", str(wish.gpus)] if wish.gpus > 1 else []
        options += ["--gpu-memory", format_size(wish.gpu_memory)] if wish.gpu_memory else []
        options += [] if best.gpus[0].basis is Basis.VERIFIED else ["--accept", "predicted"]
        return ("submit", one.argument, *options)
    if one.target:
        return ("build", one.target)
    cuda = ("--cuda", one.cuda) if one.cuda else ()
    gpu = ("--capability", str(best.gpus[0].capability)) if finding.ask.inventory else ()
    return ("compat", f"{one.framework}=={one.version}", *cuda, *gpu)


def _use(one: Findable) -> tuple[str, ...]:
    """What is done with an image that needs no GPU."""
    return ("submit" if one.ready else "build", one.argument)


def _sources(finding: Finding) -> Iterator[str]:
    """Who answers. Said first: without a catalogue nobody has tested anything."""
    if finding.catalogue is None:
        what = f"nothing is built in {finding.place}" if finding.factory else "no catalogue is known here"
        yield f"{what}, so nothing is verified: this is documented, or predicted by a scan"
        if not finding.factory:
            yield "your center may have one: imagefactory join ADDRESS|FILE"
    elif finding.factory:
        yield f"images of the factory {finding.place}"
    else:
        for one in finding.open:
            yield one.center.answers(one.catalogue.made)
    if finding.ages:
        yield format_ages(finding.ages)
    inventory = finding.ask.inventory
    yield (
        f"pool: {summary(inventory)}"
        if inventory
        else "no pool can be asked here (or --inventory FILE): any GPU"
    )


def _pool_rows(one: Found) -> Iterator[tuple[str, ...]]:
    for number, row in enumerate(one.gpus):
        gpu = row.name.removeprefix("NVIDIA ")
        gpu += f" ({row.capability})" if row.name != row.capability else ""
        mark = "*" if row.unsure else ""
        yield _title(one, number), gpu, f"{row.gpus:4}", f"{row.free:4}", f"{row.basis}{mark}"


def _rows(one: Found) -> Iterator[tuple[str, ...]]:
    by_basis: dict[Basis, list[FoundGpu]] = {}
    for row in one.gpus:
        by_basis.setdefault(row.basis, []).append(row)
    for number, (basis, rows) in enumerate(by_basis.items()):
        yield _title(one, number), " ".join(row.capability for row in rows), basis.value


def _title(one: Found, number: int) -> str:
    return "" if number else one.findable.name


def found_json(finding: Finding) -> Mapping[str, object]:
    """`{source, place, made, pool, images: [...], next}`; counts are null where no pool is known.

    Where several centers are joined `place` and `made` are of the first, and `centers` has all.
    """
    inventory, catalogue = finding.ask.inventory, finding.catalogue
    source = "catalogue" if catalogue and not finding.factory else "factory" if catalogue else "knowledge"
    return {
        "source": source,
        "place": finding.place,
        "made": f"{catalogue.made:%Y-%m-%dT%H:%M:%SZ}" if catalogue else None,
        **source_json(catalogue),
        **centers_json(finding.open),
        "proofs": finding.ages,
        "pool": {
            "name": inventory.pool,
            "taken": f"{inventory.taken:%Y-%m-%dT%H:%M:%SZ}",
            "gpus": len(inventory.gpus),
            "free": free_when(inventory, finding.ask.now) or None,
        }
        if inventory
        else None,
        "images": [
            {
                "target": one.findable.target or None,
                "name": one.findable.name,
                **({"center": one.findable.center} if one.findable.center else {}),
                "framework": one.findable.framework,
                "version": one.findable.version,
                "cuda": one.findable.cuda,
                "ready": one.findable.ready,
                "unknown": one.unknown,
                "revoked": [revoked_json(row) for row in one.findable.revoked],
                "gpus": [_gpu_json(row, counted=inventory is not None) for row in one.gpus],
            }
            for one in finding.found
        ],
        "next": shlex.join(("imagefactory", *next_command(finding))),
    }


def _gpu_json(row: FoundGpu, *, counted: bool) -> dict[str, object]:
    return {
        "capability": row.capability,
        "name": row.name,
        "gpus": row.gpus if counted else None,
        "free": row.free if counted else None,
        "unsure": row.unsure if counted else None,
        "known": row.basis.value,
        "why": row.why,
    }
