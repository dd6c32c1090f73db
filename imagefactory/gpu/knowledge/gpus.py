"""GPUs by name: the compute capability of each (`gpus.toml`), and the names that people and drivers use.

A name is user input ("v100", "rtx5090") or comes from a driver ("Tesla V100-SXM2-32GB", "NVIDIA
A100-SXM4-40GB MIG 1g.5gb"). Brand, socket, memory and MIG slice do not affect the capability and are not
compared. "Quadro", "Ada" and "Blackwell" do, and are compared.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.values import PROFILE

# --- AMD GPUs: their processors, their product names, and the known ROCm versions


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdGpuModel:
    """A GPU as AMD sells it."""

    name: str
    processor: Capability
    source: str


@cache
def amd_gpus() -> tuple[AmdGpuModel, ...]:
    """Return all known AMD GPUs in the order of amd.toml, the newest first."""
    return tuple(
        AmdGpuModel(name=name, processor=parse_capability(row["processor"]), source=row["source"])
        for row in read_table("amd")["sold"]
        for name in row["names"]
    )


@cache
def processors() -> tuple[Capability, ...]:
    """Return the processors of AMD GPUs, sorted by number."""
    return tuple(sorted({gpu.processor for gpu in amd_gpus()}))


@cache
def all_processors() -> frozenset[str]:
    """Return all processor names in the tables, with or without a product name."""
    return frozenset({*map(str, processors())}.union(*generic_processors().values()))


@cache
def generic_processors() -> dict[str, frozenset[str]]:
    """Return the processors that run the code of each generic processor: `gfx11-generic` -> gfx1100, gfx1101,
    ...
    """
    return {row["name"]: frozenset(row["processors"]) for row in read_table("amd")["generic"]}


def find_amd(words: Sequence[str]) -> AmdGpuModel | None:
    """Return the GPU whose complete name is in `words` (`("amd", "mi250x")`).

    "RX" may be missing before a number with XT or XTX. If several match, the longest name is used.
    """
    typed = {*words, "rx"} if {"xt", "xtx"} & {*words} else {*words}
    fitting = [gpu for gpu in amd_gpus() if _amd_words(gpu.name) <= typed]
    return max(fitting, key=lambda gpu: len(_amd_words(gpu.name)), default=None)


@cache
def _amd_words(name: str) -> frozenset[str]:
    return frozenset(_AMD_WORD.findall(name.lower()))


def newest_rocm() -> int:
    """Return the newest known major version of ROCm."""
    return int(read_table("amd")["rocm"]["newest_major"])


_MAX_SUGGESTIONS = 6
_AMD_WORD = re.compile(r"rx(?=[0-9])|[0-9]+(?=xtx?\b|gre\b)|[a-z0-9]+")
"""A word of an AMD GPU's name: `RX7900XTX` has three."""
# Words for a board's design, market or sharing: "with Max-Q Design", "Server Edition", "480GB".
_IGNORED_WORDS = re.compile(
    r"nvidia|geforce|tesla|grid|gpus?|graphics|cards?|device|laptop|notebook|mobile|generation|edition|design"
    r"|workstation|server|embedded|developer|kit|with|max|q|sxm[0-9]?|pci|pcie|nvl|hgx|dgxs|fhhl|lhr|ls|d|ac|mig|me|collectors"
    r"|v2|hbm[0-9]e?|[0-9]+(gb?|gib)|[0-9]+[abcq]|3e|nvgpu|dev|shared"
)
_AMD = re.compile(r"amd|radeon|instinct|rx|mi[0-9]+[a-z]?|gfx[0-9a-f]+")
_GLUED = re.compile(
    r"(rtx|gtx|gt|titan|quadro|jetson|super|ti)(?=[a-z]?[0-9])|(?<=[0-9])(?=(?:tis?|super)\b)"
    r"|(?<=[0-9]{4})(?=[sd]\b)"
)
_SPELLINGS = (
    (re.compile(r"\bpg[0-9]{3}-[0-9]{3}\b"), " "),  # a board: `A100-PG509-200`
    (re.compile(r"\b([2-5]0)xx\b|\b([2-5]0)[- ]?series\b"), r"\1\2 series"),
    (re.compile(r"(?<=\b[2-5]0[0-9]0) (?:(ti)s|s)\b"), r" \1 super"),
)
"""What people write for other words, in lower-case names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A GPU model of NVIDIA or AMD. `memory` lists its memory sizes in GB, empty if unknown.

    `host` is the processor architecture of its machines (`arm64`), empty if there are several.
    """

    name: str
    capability: Capability
    memory: tuple[int, ...]
    source: str
    host: str = ""


@cache
def gpus() -> tuple[GpuModel, ...]:
    """Return all known GPUs, those with the newest capability first."""
    return tuple(
        GpuModel(
            name=name,
            capability=parse_capability(row["capability"]),
            memory=tuple(row.get("memory", {}).get(name, ())),
            source=row["source"],
            host="arm64" if name in row.get("arm64", ()) else "",
        )
        for row in read_table("gpus")["group"]
        for name in row["names"]
    )


@cache
def capabilities() -> tuple[Capability, ...]:
    """Return the capabilities of known GPUs, the oldest first."""
    return tuple(sorted({gpu.capability for gpu in gpus()}))


@cache
def only_host(capability: Capability) -> str:
    """Return the architecture of the machines of all GPUs with a capability (`arm64`), empty if several."""
    hosts = {gpu.host for gpu in gpus() if gpu.capability == capability}
    return hosts.pop() if len(hosts) == 1 else ""


def find_gpu(name: str) -> GpuModel:
    """Return the GPU with a name.

    Part of a name is enough if all matching GPUs have one capability; then the GPU with the shortest name is
    returned. Raises UsageError if the matching GPUs have several capabilities, or if the name is unknown; the
    error suggests names. An AMD processor (`gfx90a`) is also a name.
    """
    if found_amd := _of_amd(name):
        return found_amd
    words = _words(name)
    known = _known_names()
    if words in known:
        return known[words]
    quoted = ascii(name if len(name) <= 60 else name[:60] + "...")
    fitting = _containing(set(words)) or _containing(
        set(words) - {"rtx", "gtx"}
    )  # a "GTX 3090" is sold as RTX
    if len({gpu.capability for gpu in fitting}) == 1:
        return fitting[0]
    if fitting:
        choices = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in fitting[:_MAX_SUGGESTIONS])
        more = f" and {len(fitting) - _MAX_SUGGESTIONS} more" if len(fitting) > _MAX_SUGGESTIONS else ""
        raise UsageError(
            "gpu-ambiguous",
            f"{quoted} matches GPUs of different compute capabilities: {choices}{more}",
            hint="write the full name, or the compute capability",
        )
    if any(_AMD.fullmatch(word) for word in words):
        raise UsageError(
            "gpu-unknown",
            f"unknown AMD GPU {quoted}",
            hint="write its processor, such as gfx90a: `rocminfo` or `rocm_agent_enumerator` prints it",
        )
    suggestion = _nearest(words, known)
    hint = f"did you mean {' or '.join(suggestion)}? " if suggestion else ""
    raise UsageError(
        "gpu-unknown",
        f"unknown GPU {quoted}",
        hint=f"{hint}`nvidia-smi --query-gpu=compute_cap --format=csv` prints the compute capability",
    )


def _containing(words: set[str]) -> list[GpuModel]:
    """Return the GPUs with all these words in their names, the shortest name first, none for no words."""
    known = _known_names()
    meant = sorted(
        (len(key), -gpu.capability.major, -gpu.capability.minor, gpu.name, key)
        for key, gpu in known.items()
        if words and words <= set(key)
    )
    return [known[key] for *_, key in meant]


def _of_amd(name: str) -> GpuModel | None:
    words = _AMD_WORD.findall(name[:200].lower())
    if len(words) == 1 and words[0].startswith("gfx"):
        try:
            return GpuModel(
                name=words[0], capability=parse_capability(words[0]), memory=(), source="its own name"
            )
        except ValueError:
            return None
    sold = find_amd(words)
    if sold is None:
        return None
    return GpuModel(name=sold.name, capability=sold.processor, memory=(), source=sold.source)


@cache
def _known_names() -> Mapping[tuple[str, ...], GpuModel]:
    others = [
        GpuModel(name=name, capability=parse_capability(row["capability"]), memory=(), source=row["source"])
        for row in read_table("gpus")["group"]
        for name in row.get("also", ())
    ]
    return {_words(gpu.name): gpu for gpu in (*gpus(), *others)}


def _words(name: str) -> tuple[str, ...]:
    """Return the words that distinguish GPUs: `NVIDIA GeForce RTX3090Ti 24GB` -> `("rtx", "3090", "ti")`."""
    text = _GLUED.sub(lambda match: f"{match[0]} ", PROFILE.sub(" ", name[:200].lower()))
    for spelling, usual in _SPELLINGS:
        text = spelling.sub(usual, text)
    words = re.findall(r"[a-z0-9]+", text)
    return tuple(word for word in words if not _IGNORED_WORDS.fullmatch(word))


def _nearest(words: tuple[str, ...], known: Mapping[tuple[str, ...], GpuModel]) -> list[str]:
    names = {" ".join(key): gpu.name for key, gpu in known.items()}
    # People omit words that seem redundant, so each name is also compared without its first word.
    names |= {" ".join(key[1:]): gpu.name for key, gpu in known.items() if len(key) > 1}
    close = difflib.get_close_matches(" ".join(words), names, n=6, cutoff=0.75)
    return list(dict.fromkeys(names[spelling] for spelling in close))[:3]


# --- Data sheets of GPUs (`data_sheets.toml`): their peak speed, and the memory that programs see


GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """The speed and memory of a GPU model.

    `memory` is the memory in bytes that a program sees. `flops` are operations per second by number type
    (fp64, fp32, tf32, fp16, bf16). `bandwidth` is bytes per second of its memory, `link` from the host, and
    `peer` to another GPU in the machine.
    """

    name: str
    device: str
    gpu: str
    capability: Capability
    processors: int
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    peer: float
    source: str


@cache
def data_sheets() -> tuple[DataSheet, ...]:
    """Return all rows of data_sheets.toml, in the order of the file."""
    known = {gpu.name: gpu.capability for gpu in gpus()}
    return tuple(
        DataSheet(
            name=row["name"],
            device=row["device"],
            gpu=row["gpu"],
            capability=known[row["gpu"]],
            processors=row["processors"],
            memory=int(row["seen"] * GIB),
            flops={kind: rate * 1e12 for kind, rate in row["tflops"].items()},
            bandwidth=row["bandwidth"] * 1e9,
            link=row["link"] * 1e9,
            peer=row.get("peer", row["link"]) * 1e9,
            source=row["source"],
        )
        for row in read_table("data_sheets")["sheet"]
    )


def find_data_sheet(name: str) -> tuple[DataSheet, tuple[DataSheet, ...]]:
    """Return the data sheet for a name (`A100`, `a100-80gb`, `Tesla T4`), and the other data sheets that
    match.

    The first row that contains all words of the name is returned. Raises UsageError for an unknown name.
    """
    words = set(re.findall(r"[a-z0-9]+", name[:100].lower())) - {"nvidia", "tesla", "geforce"}
    sheets = data_sheets()
    whole = [sheet for sheet in sheets if name.lower() in (sheet.name.lower(), sheet.device.lower())]
    fitting = whole or [sheet for sheet in sheets if words and words <= _sheet_words(sheet)]
    known = "known are " + ", ".join(sheet.name for sheet in sheets)
    if not fitting:
        try:
            gpu = find_gpu(name)
        except UsageError as error:
            error.hint = known
            raise
        fitting = [sheet for sheet in sheets if sheet.gpu == gpu.name]
    if not fitting:
        raise UsageError("data-sheet-unknown", f"no data sheet for {name[:60]!a}", hint=known)
    return fitting[0], tuple(fitting[1:])


def _sheet_words(sheet: DataSheet) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", f"{sheet.name} {sheet.gpu} {sheet.device}".lower()))
