"""Read and write sweep.json and collected.json: a sweep as requested, and its results.

sweep.json is written first and never changes; the file of the pool is written last. A directory with both can
be continued after a crash. A directory without the second file was never submitted, and the sweep is created
again elsewhere. Each `sweep collect` rewrites collected.json. Losing it is harmless, since verdicts are
stored next to their images.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from imagefactory.errors import StatementError, UsageError, os_problem
from imagefactory.fs import explain_full_disk, replace_text
from imagefactory.schedulers.pool import MOST_NODES, NodeResult, SweepSpec
from imagefactory.serialize import MaxRows, format_value, parse_value
from imagefactory.settings.choices import HTCONDOR
from imagefactory.verify.outcome import clean

FORMAT = 1
SWEEP, COLLECTED = "sweep.json", "collected.json"
LARGEST = 64 << 20
ID = re.compile(r"([0-9]{8}-[0-9]{6})-[0-9a-f]{4}")
"""The name of a sweep and of its directory in the store: its creation time in UTC."""
UNSIGNED = "unsigned: "
NO_KEY = f"{UNSIGNED}no key (imagefactory key create NAME)"
"""The reason of a missing verdict if there is no key. Other reasons that begin with UNSIGNED are final."""
VERDICT_MISSING = "its verdict is found nowhere any more: verify it again"
"""The end of `why` if a verdict was signed and attached but no longer exists."""
NodeFilter = Callable[[str, str], bool]
"""A filter of nodes by target and capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedNode:
    """The result of a node, and its verdict. `why` is a line with the signer, or why it is not signed.

    `nonce` is the nonce of the run. `keyid` and `attached` are empty without a verdict. The suite ran on
    `gpu` with `driver`, empty if it found no GPU.
    """

    result: NodeResult
    target: str
    capability: str
    nonce: str
    why: str = ""
    keyid: str = ""
    gpu: str = ""
    driver: str = ""
    attached: tuple[str, ...] = ()


_NODES = Annotated[tuple[CollectedNode, ...], MaxRows(MOST_NODES)]


def read_sweep(directory: Path, selected: NodeFilter | None = None) -> SweepSpec:
    """Return the sweep of a directory. Raises UsageError without a valid sweep.json.

    With `selected`, the sweep has only these nodes and no skipped cells. The others are not parsed, which
    takes most of the time for a sweep of thousands of nodes.
    """
    data = _read(directory / SWEEP)
    if data is None:
        raise UsageError(
            "sweep-not-found",
            f"{directory} is not a sweep",
            hint="list the sweeps of this store: imagefactory sweep list",
        )

    def narrow(value: object) -> object:
        if selected is None or not isinstance(value, dict):
            return value
        return {**value, "nodes": _narrowed(value.get("nodes"), selected), "skipped": []}

    sweep = _parse(data, directory / SWEEP, "sweep", SweepSpec, narrow)
    assert isinstance(sweep, SweepSpec)
    return sweep


def read_scheduler(directory: Path) -> str:
    """Return the scheduler of a sweep.

    The rest of the file may be corrupt, so that such a sweep can be canceled.
    """
    try:
        name = json.loads((directory / SWEEP).read_bytes())["sweep"]["scheduler"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return HTCONDOR
    return name if isinstance(name, str) else HTCONDOR


def write_sweep_file(directory: Path, sweep: SweepSpec) -> None:
    """Write sweep.json. Raises UsageError."""
    write_document(directory / SWEEP, {"format": FORMAT, "sweep": _printable(format_value(sweep))})


def read_collected(directory: Path, selected: NodeFilter | None = None) -> tuple[CollectedNode, ...]:
    """Return the nodes in the last collected.json, empty without one. Raises UsageError.

    `selected` has the same meaning as in `read_sweep`.
    """
    data = _read(directory / COLLECTED)
    if data is None:
        return ()

    def narrow(value: object) -> object:
        return value if selected is None else _narrowed(value, selected)

    value = _parse(data, directory / COLLECTED, "nodes", _NODES, narrow)
    assert isinstance(value, tuple)
    return value


def write_collected(directory: Path, nodes: Sequence[CollectedNode]) -> None:
    """Write collected.json. Raises UsageError."""
    rows = _printable(format_value(tuple(nodes), _NODES))
    write_document(directory / COLLECTED, {"format": FORMAT, "nodes": rows})


def format_results(results: tuple[NodeResult, ...]) -> Any:
    """Return the results of nodes as JSON."""
    return _printable(format_value(results, tuple[NodeResult, ...]))


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check its permissions") from error
    if len(data) > LARGEST:
        raise UsageError(
            "sweep-file-too-large",
            f"{path} is larger than {LARGEST >> 20} MB",
            hint="pass the directory of a sweep",
        )
    return data


def _narrowed(rows: object, selected: NodeFilter) -> object:
    """Return the selected rows. Invalid rows are included, so that the parser rejects them."""
    if not isinstance(rows, list):
        return rows
    return [
        row
        for row in rows
        if not isinstance(row, dict) or selected(str(row.get("target")), str(row.get("capability")))
    ]


def _parse(data: bytes, path: Path, name: str, schema: Any, narrow: Callable[[object], object]) -> object:
    """Return the field `name` of a document, whose only other field is the format. Raises UsageError."""
    again = "start a new sweep" if path.name == SWEEP else "delete it and run imagefactory sweep collect"
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise StatementError("sweep-format-unknown", f"expected format {FORMAT}")
        if set(document) != {"format", name}:
            raise StatementError("sweep-format-unknown", f"expected the fields 'format' and '{name}'")
        return parse_value(narrow(document[name]), schema, name)
    except (ValueError, RecursionError) as error:
        raise UsageError("sweep-file-not-json", f"{path} is not valid JSON", hint=again) from error
    except StatementError as error:
        raise UsageError(
            "sweep-file-invalid",
            f"{path} was changed or is from another version of imagefactory: {error.message}",
            hint=again,
        ) from error


def write_document(path: Path, value: Mapping[str, object]) -> None:
    """Write JSON atomically. Raises UsageError."""
    write_file(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_file(path: Path, data: str) -> None:
    """Write text atomically. Raises UsageError."""
    try:
        with explain_full_disk(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, data)
    except OSError as error:
        again = "use another directory: --dir DIR" if path.name == SWEEP else "check its permissions"
        raise UsageError(*os_problem("write", path, error), hint=again) from error


def _printable(value: Any) -> Any:
    """Return JSON in which each string is one printable line: logs of jobs are untrusted."""
    if isinstance(value, dict):
        return {name: _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return clean(value) if isinstance(value, str) else value
