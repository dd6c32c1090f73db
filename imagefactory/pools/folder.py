"""What lies in the folder of any pool's sweep, beside sweep.json: a folder a node, with what is asked there.

DIR/nodes/<node>/    kit.json and expectations.json, and what the pool's jobs write
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.pools.model import Sweep
from imagefactory.verify.kit.program import EXPECTATIONS, KIT

NODES = "nodes"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


def checked_name(name: str) -> str:
    """The name of a node. Raises UsageError for one that could be more than that."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name of a node that a DAG may hold", hint=f"it must match {_NAME.pattern}"
        )
    return name


def node_folder(folder: Path, name: str) -> Path:
    """Raises UsageError for a name that could leave the folder."""
    return folder / NODES / checked_name(name)


def write_nodes(folder: Path, sweep: Sweep, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Each node's folder; `texts` are per node kit.json and expectations.json. Raises OSError."""
    for node in sweep.nodes:
        place = node_folder(folder, node.name)
        place.mkdir(parents=True, exist_ok=True)
        for name in (KIT, EXPECTATIONS):
            (place / name).write_bytes(texts[node.name][name])
