"""sweep.json and collected.json: a sweep as it was asked for, and what became of it. JSON there and back.

sweep.json is written first and never changed, sweep.dag last: a folder that has both can be gone on with
after any kill; one without the DAG was never submitted, and the sweep is made anew in another folder.
collected.json is written anew by each `sweep collect`; what is signed lies with its image, so it can be lost.

The parser takes exactly what the formatter gives, field by field as model.py declares them.
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
"""A sweep's name, and that of its folder in the store: when it was made, in UTC."""
UNSIGNED = "unsigned: "
NO_KEY = f"{UNSIGNED}no key (imagefactory key create NAME)"
"""Why a node has no verdict where this machine holds no key. What else begins so stays as it is."""
VERDICT_MISSING = "its verdict is found nowhere any more: verify it again"
"""How `why` ends where a verdict was signed and attached, and has left since."""
NodeFilter = Callable[[str, str], bool]
"""Whether a node is, by its target and capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedNode:
    """What is known of a node, and its verdict. `why` says in a line who signed it, or why nobody did.

    `nonce` is that of its run; `keyid` and `attached` are empty where nothing was signed. `driver` and `gpu`
    are what the suite's run was on, empty where it met no GPU.
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


# --- files ---------------------------------------------------------------------------------------


def read_sweep(folder: Path, wanted: NodeFilter | None = None) -> SweepSpec:
    """Raises UsageError for a folder that is no sweep's, or whose sweep.json is not whole.

    With `wanted` it has these of its nodes alone and nothing that was left out: the others are not parsed,
    which is most of the time that a sweep of thousands takes.
    """
    data = _read(folder / SWEEP)
    if data is None:
        raise UsageError(
            "sweep-not-found",
            f"{folder} is not a sweep",
            hint="list the sweeps of this store: imagefactory sweep list",
        )

    def narrow(value: object) -> object:
        if not isinstance(value, dict):
            return value
        value = _upgraded(value)
        if wanted is None:
            return value
        return {**value, "nodes": _narrowed(value.get("nodes"), wanted), "left_out": []}

    sweep = _parse(data, folder / SWEEP, ("sweep", SweepSpec), narrow)
    assert isinstance(sweep, SweepSpec)
    return sweep


def _upgraded(value: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep with the fields that it lacks where an older version made it."""

    def rows(name: str, **fields: object) -> object:
        found = value.get(name, [])
        if not isinstance(found, list):
            return found
        return [{**fields, **row} if isinstance(row, dict) else row for row in found]

    nodes = rows("nodes", part="", first="", only=False)
    for node in nodes if isinstance(nodes, list) else ():
        if isinstance(node, dict) and isinstance(slices := node.pop("mig", None), bool) and slices:
            node["part"] = "mig"
    given = {"pool": HTCONDOR, "own": [], "patterns": [], "at_once": 0, **value}
    left_out, machines = rows("left_out", part=""), rows("machines", driver="")
    return {**given, "nodes": nodes, "left_out": left_out, "machines": machines}


def read_pool(folder: Path) -> str:
    """The pool of a sweep, also of one whose file is damaged: to end it, no more of it need be known."""
    try:
        name = json.loads((folder / SWEEP).read_bytes())["sweep"]["pool"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return HTCONDOR
    return name if isinstance(name, str) else HTCONDOR


def write_sweep_file(folder: Path, sweep: SweepSpec) -> None:
    """Raises UsageError where the folder cannot be written."""
    row = _printable(format_value(sweep))
    if sweep.pool == HTCONDOR:  # as all were written before there was another
        del row["pool"]
    write_document(folder / SWEEP, {"format": FORMAT, "sweep": row})


def read_collected(folder: Path, wanted: NodeFilter | None = None) -> tuple[CollectedNode, ...]:
    """What the last `sweep collect` found, by node; empty where nobody collected yet. Raises UsageError.

    `wanted` as `read_sweep` has it.
    """
    data = _read(folder / COLLECTED)
    if data is None:
        return ()

    def narrow(value: object) -> object:
        return value if wanted is None else _narrowed(value, wanted)

    value = _parse(data, folder / COLLECTED, ("nodes", _NODES), narrow)
    assert isinstance(value, tuple)
    return value


def write_collected(folder: Path, nodes: Sequence[CollectedNode]) -> None:
    """Raises UsageError where the folder cannot be written."""
    told = _printable(format_value(tuple(nodes), _NODES))
    write_document(folder / COLLECTED, {"format": FORMAT, "nodes": told})


def format_results(results: tuple[NodeResult, ...]) -> Any:
    """What is known of nodes, as JSON."""
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


def _narrowed(rows: object, wanted: NodeFilter) -> object:
    """The rows that are wanted, and what is none, for the parser to refuse."""
    if not isinstance(rows, list):
        return rows
    return [
        row
        for row in rows
        if not isinstance(row, dict) or wanted(str(row.get("target")), str(row.get("capability")))
    ]


def _parse(data: bytes, path: Path, told: tuple[str, Any], narrow: Callable[[object], object]) -> object:
    """`told` is the one field beside the format, and the kind of its value."""
    name, kind = told
    again = "create a new sweep" if path.name == SWEEP else "delete it and run imagefactory sweep collect"
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise StatementError("sweep-format-unknown", f"its format is not {FORMAT}")
        if set(document) != {"format", name}:
            raise StatementError("sweep-format-unknown", f"its fields are not 'format' and '{name}'")
        return parse_value(narrow(document[name]), kind, name)
    except (ValueError, RecursionError) as error:
        raise UsageError("sweep-file-not-json", f"{path} is not valid JSON", hint=again) from error
    except StatementError as error:
        raise UsageError(
            "sweep-file-invalid",
            f"{path} was changed or is from another version of imagefactory: {error.message}",
            hint=again,
        ) from error


def write_document(path: Path, value: Mapping[str, object]) -> None:
    """Writes JSON beside and renames it. Raises UsageError where the folder cannot be written."""
    write_file(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_file(path: Path, data: str) -> None:
    """Writes text beside and renames it. Raises UsageError where the folder cannot be written."""
    try:
        with explain_full_disk(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, data)
    except OSError as error:
        again = "use another directory: --dir DIR" if path.name == SWEEP else "check its permissions"
        raise UsageError(*os_problem("write", path, error), hint=again) from error


def _printable(value: Any) -> Any:
    """JSON with its texts as one printable line each: a job's log says what it likes."""
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    return clean(value) if isinstance(value, str) else value
