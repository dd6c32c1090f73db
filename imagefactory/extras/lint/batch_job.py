"""What a batch script asks Slurm for: GPUs by type and count, features of nodes, memory, time. Pure.

Source: Slurm's manual, sbatch(1): --gres, --gpus, --constraint, --mem, --time, --array.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta

from imagefactory.errors import UsageError
from imagefactory.gpu.knowledge.gpus import find_gpu
from imagefactory.schedulers.sizes import parse_size
from imagefactory.settings.own_commands import parse_time
from imagefactory.extras.lint.batch_reader import BatchOption, BatchScript
from imagefactory.submit.check.findings import Spot

GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
_GPU = re.compile(r"(?:gres[/:])?(?P<name>gpu|shard|mps)(?:[:=](?P<rest>.*))?")
_COUNT = re.compile(r"[0-9]+[kKmM]?")
_FEATURE = re.compile(r"[A-Za-z0-9_.+:=/-]+")
_CAPABILITY = re.compile(r"(?:gpu_?)?(?:cc|sm|compute)[:_-]?([0-9]{1,2})\.?([0-9])", re.IGNORECASE)
_ARRAY = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")
_UNLIMITED = ("infinite", "unlimited", "-1")
_MOST_TERMS = 100

Names = Callable[[Collection[str]], bool]
"""Whether a node of these features will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAsk:
    """What one job asks for. `at` is the option that asks for GPUs, None where none does.

    `gpus` are of one node; `kinds` the types by name, empty for any. `features` judges a node's, None where
    none are asked for; `alternatives` are the feature names where they are joined by `|` alone. `memory` is
    of one node in bytes, 0 where it is not told. `jobs` counts an array, None where it cannot be read.
    `faults` are (where, what is wrong, what to write).
    """

    at: BatchOption | None
    gpus: int
    kinds: tuple[str, ...]
    part: bool
    features: Names | None
    alternatives: tuple[str, ...]
    memory: int
    cpus: int
    time: timedelta | None
    jobs: int | None
    faults: tuple[tuple[Spot, str, str], ...]


def read_batch_asked(script: BatchScript) -> BatchAsk:
    """What the options ask for. What cannot be read is a fault, and as if it was not there."""
    reader = _Reader(script)
    gpus = list(reader.gpus())
    memory, cpus = reader.memory(sum(count for _, count, _ in gpus)), reader.number("cpus-per-task")
    features, alternatives = reader.features()
    asking = [script.options[name] for name in GPU_OPTIONS if name in script.options]
    at = next((one for one in asking if any(option is one for _, _, option in gpus)), None)
    return BatchAsk(
        at=at,
        gpus=max(1, sum(count for _, count, option in gpus if option is at)) if at else 0,
        kinds=tuple(dict.fromkeys(kind for kind, _, _ in gpus if kind)),
        part=any(option.value.startswith(("shard", "mps")) for _, _, option in gpus),
        features=features,
        alternatives=alternatives,
        memory=memory,
        cpus=cpus,
        time=reader.time(),
        jobs=reader.jobs(),
        faults=tuple(reader.faults),
    )


def capability_of(name: str) -> str:
    """The capability that a site's name of a type or feature tells (`a100`, `GPU_SKU:A100_SXM4`, `sm80`);
    empty where it tells none."""
    if found := _CAPABILITY.fullmatch(name):
        return f"{found[1]}.{found[2]}"
    short = name.rpartition(":")[2].replace("_", " ")
    if not any(letter.isdigit() for letter in short):
        return ""
    try:
        return str(find_gpu(short).capability)
    except UsageError:
        return ""


class _Reader:
    """Reads the options of one script; what is wrong is kept, so that all of it can be told."""

    def __init__(self, script: BatchScript) -> None:
        self.script = script
        self.faults: list[tuple[Spot, str, str]] = []

    def fault(self, option: BatchOption, what: str, hint: str) -> None:
        self.faults.append((option.at, f"{option.written}={option.value[:40]}: {what}", hint))

    def gpus(self) -> Iterator[tuple[str, int, BatchOption]]:
        """Types, counts on a node, and the option that asks."""
        for name in GPU_OPTIONS:
            option = self.script.options.get(name)
            if option is None or "$" in option.value:
                continue
            for part in option.value.split(","):
                text = part.strip()
                if name not in ("gres", "tres-per-task"):
                    text = f"gpu:{text}"
                found = _GPU.fullmatch(text)
                if found is None:
                    if re.match(r"(?:gres[/:])?gpus?\b|.*\bgpu\b", text):
                        self.fault(option, "that requests no GPU", "write --gres=gpu:TYPE:1")
                    continue
                words = [word for word in re.split(r"[:=]", found["rest"] or "") if word]
                count = words.pop() if words and _COUNT.fullmatch(words[-1]) else "1"
                if len(words) > 1:
                    self.fault(option, "it accepts only a type and a count", "write --gres=gpu:TYPE:1")
                    continue
                number = int(count.rstrip("kKmM"))
                if name == "gpus":
                    number = -(-number // max(1, self.nodes()))
                elif name in ("gpus-per-task", "tres-per-task"):
                    number *= self.tasks()
                if number:
                    yield (words[0] if words else ""), (1 if found["name"] != "gpu" else number), option

    def nodes(self) -> int:
        text = self.script.value("nodes").partition("-")[0]
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1

    def tasks(self) -> int:
        """Of one node."""
        if "ntasks-per-node" in self.script.options:
            return self.number("ntasks-per-node")
        return -(-self.number("ntasks") // max(1, self.nodes()))

    def number(self, name: str) -> int:
        text = self.script.value(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1

    def memory(self, gpus: int) -> int:
        for name in MEMORY_OPTIONS:
            option = self.script.options.get(name)
            if option is None or "$" in option.value:
                continue
            text = option.value.strip()
            if text == "0":
                continue
            try:
                size = parse_size(text)
            except UsageError:
                self.fault(option, "that is not a size", "write a number and its unit: --mem=16G")
                continue
            times = {"mem": 1, "mem-per-cpu": self.number("cpus-per-task"), "mem-per-gpu": max(1, gpus)}
            return size * times[name]
        return 0

    def time(self) -> timedelta | None:
        option = self.script.options.get("time")
        if option is None or "$" in option.value or option.value.lower() in _UNLIMITED:
            return None
        time = parse_time(option.value)
        if time is None:
            self.fault(
                option, "that is not a time", "write hours:minutes:seconds or days-hours: 12:00:00, 2-00"
            )
        return time

    def jobs(self) -> int | None:
        option = self.script.options.get("array")
        if option is None:
            return 1
        count = 0
        for part in option.value.partition("%")[0].split(","):
            found = _ARRAY.fullmatch(part.strip())
            if found is None or any(len(one or "") > 7 for one in found.groups()):
                return None
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1) or 1
            count += len(range(first, last + 1, step))
        return count

    def features(self) -> tuple[Names | None, tuple[str, ...]]:
        option = self.script.options.get("constraint")
        if option is None or "$" in option.value:
            return None, ()
        try:
            return parse_features(option.value)
        except ValueError:
            what = "imagefactory cannot read that, so it is not checked"
            self.fault(option, what, "features are joined by & and |, and by brackets: (a100|h100)&new")
            return None, ()


def parse_features(text: str) -> tuple[Names, tuple[str, ...]]:
    """`(a100|h100)&new` as a test of a node's features, and the names where `|` alone joins them.

    Raises ValueError for what is none. A count (`a100*2`) and `[...]` (all nodes of one) ask a node the same.
    """
    tokens = re.findall(r"[A-Za-z0-9_.+:=/-]+(?:\*[0-9]+)?|\S", text.replace("[", "(").replace("]", ")"))
    if not tokens or len(tokens) > _MOST_TERMS:
        raise ValueError(text)
    judge, rest = _any_of(tokens)
    if rest:
        raise ValueError(text)
    names = [token.partition("*")[0] for token in tokens if _FEATURE.match(token)]
    return judge, () if "&" in tokens or "," in tokens else tuple(names)


def _any_of(tokens: list[str]) -> tuple[Names, list[str]]:
    first, rest = _all_of(tokens)
    judges = [first]
    while rest[:1] == ["|"]:
        another, rest = _all_of(rest[1:])
        judges.append(another)
    return (lambda names: any(judge(names) for judge in judges)), rest


def _all_of(tokens: list[str]) -> tuple[Names, list[str]]:
    first, rest = _one(tokens)
    judges = [first]
    while rest[:1] in (["&"], [","]):
        another, rest = _one(rest[1:])
        judges.append(another)
    return (lambda names: all(judge(names) for judge in judges)), rest


def _one(tokens: list[str]) -> tuple[Names, list[str]]:
    if not tokens:
        raise ValueError("a feature is missing")
    if tokens[0] == "(":
        judge, rest = _any_of(tokens[1:])
        if rest[:1] != [")"]:
            raise ValueError("a bracket is missing")
        return judge, rest[1:]
    name = tokens[0].partition("*")[0]
    if not _FEATURE.fullmatch(name):
        raise ValueError(name)
    return (lambda names: name in names), tokens[1:]


def memory_in_mb(option: BatchOption) -> int:
    """The MB of an amount without a unit; 0 for one with a unit."""
    return int(option.value) if option.value.isascii() and option.value.isdigit() else 0
