"""The nodes of a sweep: for each cell a job, a fresh nonce, and the files that say what is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from imagefactory.serialize import format_time
from imagefactory.project import Factory
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.cells import ask as question_of
from imagefactory.gpu.cells import scanned_contents
from imagefactory.gpu.platforms import AMD64, MACHINES, architecture
from imagefactory.matrix.plan import TargetStatus
from imagefactory.model import Definition
from imagefactory.schedulers.pool import PoolImage, SweepNode
from imagefactory.schedulers.sizes import disk_of, memory_of
from imagefactory.progress import Progress
from imagefactory.actions.definition import define_target
from imagefactory.stages.scan import inspect_made
from imagefactory.stages.stored import stored_image
from imagefactory.suite.gpu.context import Predicted
from imagefactory.schedulers.cells import QueuedCell
from imagefactory.verify.gpu_run import GpuAsk, ask_gpu, suite_argv, timeout_of
from imagefactory.verify.kit.program import EXPECTATIONS, FORMAT, KIT
from imagefactory.verify.nonces import LIFETIME, NONCE_BYTES, AskedRun, format_nonce
from imagefactory.verify.predicted import predict_coverage
from imagefactory.verify.suite_files import digest_of, suite_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKit:
    """A node with the files that say what is asked of its image, and what its nonce is spent on."""

    node: SweepNode
    run: AskedRun
    texts: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """What all nodes of a sweep share; `random` gives the bytes of their nonces."""

    level: str
    now: datetime
    random: Callable[[int], bytes]


def make_nodes(
    factory: Factory, cells: Sequence[QueuedCell], image: PoolImage, order: NodeOrder, progress: Progress
) -> tuple[NodeKit, ...]:
    """The nodes of one target. Raises LockError and StaleError where its lock no longer holds."""
    definition = define_target(factory, cells[0].stage.target)
    predicted = predict_stage(factory, cells[0].stage, definition, progress)
    kits: list[NodeKit] = []
    for cell in cells:
        nonce = format_nonce(order.random(NONCE_BYTES))
        node = make_node(cell, image, definition, (nonce, order.level))
        ask = GpuAsk(nonce=nonce, level=order.level, capability=node.capability, predicted=predicted)
        kits.append(make_node_kit(node, definition, ask, order.now))
    return tuple(kits)


def node_name(target: str, capability: Capability, part: str = "") -> str:
    """`pytorch-2_3-cu121-sm80`, of a slice `...-sm80-1g_10gb`.

    DAGMan takes neither `.` nor `+`. Names of targets have no `_`.
    """
    slice_of = f"-{part}" if part else ""
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{target}-{capability.sm.replace('_', '')}{slice_of}")


def make_node(
    cell: QueuedCell, image: PoolImage, definition: Definition, asked: tuple[str, str]
) -> SweepNode:
    """The job of a cell; `asked` are its nonce and the suite's level. Pure."""
    nonce, level = asked
    return SweepNode(
        name=node_name(definition.target.name, cell.capability, cell.part),
        target=definition.target.name,
        capability=str(cell.capability),
        image=image,
        nonce=nonce,
        cuda=cell.cuda,
        memory=memory_of(image.unpacked),
        disk=disk_of(image.kind, image.size, image.unpacked),
        timeout=timeout_of(level),
        python=suite_argv(definition)[0],
        part=cell.part,
        first=cell.first,
        only=cell.only,
        processor="" if (platform := definition.target.platform) == AMD64 else architecture(platform),
    )


def make_node_kit(node: SweepNode, definition: Definition, ask: GpuAsk, now: datetime) -> NodeKit:
    """kit.json and expectations.json of a node, as those of a kit that a person carries. Pure."""
    suite = suite_digest()
    kit = {
        "format": FORMAT,
        "nonce": node.nonce,
        "subject": asdict(node.image.subject),
        "diff_ids": [],  # the pool starts the image, by its digest
        "machine": MACHINES[definition.target.platform],
        "size": node.image.size,
        "reference": "",
        "sif": bool(node.image.sha256),
        "sifs": [],
        "plain_http": False,
        "suite": suite,
        "level": ask.level,
        "capability": node.capability,
        "waive": list(definition.target.waive),
        "argv": list(suite_argv(definition)),
        "timeout": node.timeout,
        "expires": format_time((now + LIFETIME).replace(microsecond=0)),
    }
    texts = {KIT: _text(kit), EXPECTATIONS: _text(ask_gpu(definition, ask))}
    run = AskedRun(subject=node.image.subject, suite=suite, level=ask.level, kit=digest_of(texts))
    return NodeKit(node=node, run=run, texts=texts)


def _text(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def predict_stage(
    factory: Factory, stage: TargetStatus, definition: Definition, progress: Progress
) -> dict[str, Predicted]:
    """What a scan lets one expect: of the image, or of the wheels where this machine never had it."""
    image = stored_image(factory, stage.target)
    if image is not None and stage.image in ("", image.digest):
        with factory.layout.in_use(progress):
            return predict_coverage(inspect_made(factory, image, progress).contents)
    contents = scanned_contents(question_of(definition.target, definition.lock, Capability(8, 0)))
    return predict_coverage(contents) if contents is not None else {}
