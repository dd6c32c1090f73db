"""What lies in the folder of any pool's sweep, beside sweep.json: a folder a node, with what is asked there.

DIR/nodes/<node>/    kit.json and expectations.json, and what the pool's jobs write
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagefactory.serialize import parse_json
from imagefactory.errors import StatementError, UsageError
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import NodeFound, NodeResult, Sweep
from imagefactory.verify.kit.program import EXPECTATIONS, KIT, read_report
from imagefactory.verify.model import GpuReport
from imagefactory.verify.suite_report import clean

NODES = "nodes"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


def checked_name(name: str) -> str:
    """The name of a node. Raises UsageError for one that could be more than that."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            "node-name-invalid",
            f"{name!r} is not a node name",
            hint=f"use a name that matches {_NAME.pattern}",
        )
    return name


def node_folder(folder: Path, name: str) -> Path:
    """Raises UsageError for a name that could leave the folder."""
    return folder / NODES / checked_name(name)


def judged(
    folder: Path, found: NodeFound, job_report: Callable[[Any, Any, NodeFound], GpuReport]
) -> NodeResult:
    """What is known of a node, with the word of a run that came back, as `job_report` of its pool has it.

    What it signs is collect's to say: here its files are believed to be as they were written.
    """
    if found.run is None:
        return found.result
    place = node_folder(folder, found.result.node)
    try:
        kit, asked = (parse_json(read_report(place, name) or b"") for name in (KIT, EXPECTATIONS))
        report = job_report(kit, asked, found)
    except (StatementError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = error.message if isinstance(error, StatementError) else "its files were changed"
        return replace(found.result, outcome=Outcome.INFRASTRUCTURE, reason=clean(said))
    return replace(found.result, outcome=report.outcome, reason=report.reason)


def write_nodes(folder: Path, sweep: Sweep, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Each node's folder; `texts` are per node kit.json and expectations.json. Raises OSError."""
    for node in sweep.nodes:
        place = node_folder(folder, node.name)
        place.mkdir(parents=True, exist_ok=True)
        for name in (KIT, EXPECTATIONS):
            (place / name).write_bytes(texts[node.name][name])
