"""All GPUs that the image is given at once: do they see each other, add up, and train as one would.

A process a GPU computes (`ranks.py`); here its answers are judged.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...context import CheckFailure, Finding
from .. import ranks, reference, table, tolerances
from ..context import GpuContext, Refusal
from ..reference import Want
from .driver import driver_words, start
from .numbers import Ledger

SENT = 64 << 20
SIZES = (1 << 10, 1 << 20, 1 << 26)
REHEARSED_SIZES = SIZES[:2]
SEED = 60
ROWS = 512
MOST_PAIRS = 120
"""Of more pairs than sixteen GPUs have a report has no room for the numbers: the slowest alone is told."""


def check_gpus(context: GpuContext) -> Finding:
    """Two at least, of one capability, and the framework counts those that the driver does."""
    count = count_gpus(context)
    if context.asked.rehearsal:
        return Finding(f"{count} processes stand in for GPUs (rehearsed on the CPU)", {"processes": count})
    with driver_words():
        devices = start(context).devices()
    uuids = sorted({device.uuid for device in devices})
    capabilities = sorted({device.capability for device in devices})
    if len(uuids) != count or len(capabilities) != 1:
        text = f"torch counts {count} GPUs, the driver {len(uuids)} of capability {', '.join(capabilities)}"
        raise CheckFailure(text, outcome=table.LOAD_FAILED)
    return Finding(f"{count} of capability {capabilities[0]}: {', '.join(uuids)}", {"gpus": count})


def check_peer_to_peer(context: GpuContext) -> Finding:
    """What one GPU sends another has it to the bit. Without direct access it goes through the host."""
    count = count_gpus(context)
    sent = SENT // 16 if context.asked.rehearsal else SENT
    (said,) = ranks.run_ranks({**job_of(context, "copies"), "gpus": count, "bytes": sent}, 1)
    return judge_copies(said["copies"], sent, rehearsal=context.asked.rehearsal)


def judge_copies(copies: Sequence[Mapping[str, Any]], sent: int, *, rehearsal: bool) -> Finding:
    """Each pair by the slower of its two ways."""
    numbers: dict[str, float] = {"bytes": sent}
    wrong = [f"{one['from']} to {one['to']}" for one in copies if not one["exact"]]
    pairs = sorted({tuple(sorted((one["from"], one["to"]))) for one in copies})
    direct = [pair for pair in pairs if all(one["direct"] for one in _both(copies, pair))]
    rates = {} if rehearsal else {
        pair: sent / max(1e-9, *(one["seconds"] for one in _both(copies, pair))) / 1e9 for pair in pairs
    }  # fmt: skip
    if len(pairs) <= MOST_PAIRS:
        for (start, end), rate in rates.items():
            numbers[f"{start}-{end}-gb-per-s"] = rate
            numbers[f"{start}-{end}-direct"] = float((start, end) in direct)
    elif rates:
        numbers["slowest-gb-per-s"] = min(rates.values())
    if wrong:
        text = f"what GPU {', '.join(wrong)} was sent is not what came"
        raise Refusal(text, outcome=table.WRONG_NUMBERS, numbers=numbers)
    if rehearsal:
        return Finding(f"{len(copies)} copies exact, of tensors of one CPU (rehearsed on the CPU)", numbers)
    how = f"{len(direct)} of {len(pairs)} pairs have direct access, {min(rates.values()):.1f} GB/s at least"
    return Finding(f"{sent >> 20} MiB from each to each, exact; {how}", numbers)


def _both(copies: Sequence[Mapping[str, Any]], pair: tuple[int, ...]) -> list[Mapping[str, Any]]:
    return [one for one in copies if {one["from"], one["to"]} == set(pair)]


def check_all_reduce(context: GpuContext) -> Finding:
    """Whole numbers, whose sum float32 has exactly in any order: every process must have all of it."""
    count = count_gpus(context)
    sizes = REHEARSED_SIZES if context.asked.rehearsal else SIZES
    said = ranks.run_ranks({**job_of(context, "all-reduce"), "sizes": sizes, "seed": SEED}, count)
    return judge_sums(
        [one["sums"] for one in said], sizes, worker(context), rehearsal=context.asked.rehearsal
    )


def judge_sums(
    said: Sequence[Sequence[Mapping[str, Any]]], sizes: Sequence[int], works: Any, *, rehearsal: bool
) -> Finding:
    """`said` is by rank and size, with the digest of what the rank has."""
    numbers: dict[str, float] = {"processes": len(said)}
    wrong = []
    for at, size in enumerate(sizes):
        parts = (reference.integers(SEED + rank, size // 4) for rank in range(len(said)))
        expected = works.digest_of(sum(parts))
        wrong += [
            f"{size} bytes in process {n}" for n, one in enumerate(said) if one[at]["digest"] != expected
        ]
        if not rehearsal:
            numbers[f"all-reduce-{size}-s"] = max(one[at]["seconds"] for one in said)
    if wrong:
        raise Refusal(f"wrong sums: {', '.join(wrong)}", outcome=table.WRONG_NUMBERS, numbers=numbers)
    place = "by gloo (rehearsed on the CPU)" if rehearsal else "by NCCL"
    return Finding(f"sums over {len(said)} processes {place} are exact, up to {sizes[-1]} bytes", numbers)


def check_data_parallel(context: GpuContext) -> Finding:
    """DistributedDataParallel over all of them, against the same steps on one GPU with all of the rows."""
    count = count_gpus(context)
    job = {**job_of(context, "train"), "rows": ROWS // count * count}
    (alone,) = ranks.run_ranks(job, 1)
    together = ranks.run_ranks(job, count)
    ledger, numpy = Ledger(context), reference.numpy
    bound = tolerances.data_parallel(reference.STEPS, job["rows"])
    losses = numpy.mean([one["losses"] for one in together], axis=0)
    ledger.compare("losses", losses, Want(numpy.array(alone["losses"]), alone["losses"][0]), bound)
    for name in ("first", "second"):
        want = numpy.array(alone[name])
        errors = [reference.error(numpy.array(one[name]), Want(want, abs(want).max())) for one in together]
        ledger.note(f"{name}-weights", max(errors), bound)
    before, after = losses[0], losses[-1]
    ledger.numbers.update({"loss-before": before, "loss-after": after})
    if not after < before / 2:
        ledger.wrong.append(f"the loss goes from {before:.4g} to {after:.4g}")
    return ledger.finding(f"{reference.STEPS} steps on {count} give what they give on one")


def worker(context: GpuContext) -> Any:
    """The file of frameworks/ that the processes run."""
    name = context.asked.expected.framework
    return importlib.import_module(f"..frameworks.{name}_ranks", __package__)


def job_of(context: GpuContext, what: str) -> dict[str, Any]:
    return {"framework": context.asked.expected.framework, "what": what, "rehearsal": context.asked.rehearsal}


def count_gpus(context: GpuContext) -> int:
    """How many the framework sees. Raises CheckFailure for fewer than two: what is asked about is not
    there.
    """
    count: int = worker(context).count(context)
    if count < 2:
        raise CheckFailure(f"several GPUs were asked for, this job sees {count}", outcome=table.WRONG_GPU)
    return count
