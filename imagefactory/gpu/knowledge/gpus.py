"""GPUs by name: which compute capability each has (`gpus.toml`), and what people and drivers call them.

A name comes as a person types it ("v100", "rtx5090") or as a driver reports it ("Tesla V100-SXM2-32GB",
"NVIDIA A100-SXM4-40GB MIG 1g.5gb"). Brand, socket, memory and MIG slice do not decide the capability and
are left out of the comparison; "Quadro", "Ada" and "Blackwell" decide it and are not.
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

# --- GPUs of AMD's: their processors, the names they are sold by, and which ROCm is known


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdGpuModel:
    """A GPU as AMD sells it."""

    name: str
    processor: Capability
    source: str


@cache
def amd_gpus() -> tuple[AmdGpuModel, ...]:
    """All known GPUs of AMD's, in the order of amd.toml: the newest first."""
    return tuple(
        AmdGpuModel(name=name, processor=parse_capability(row["processor"]), source=row["source"])
        for row in read_table("amd")["sold"]
        for name in row["names"]
    )


@cache
def processors() -> tuple[Capability, ...]:
    """The processors of GPUs that AMD sells, in the order of their numbers."""
    return tuple(sorted({gpu.processor for gpu in amd_gpus()}))


@cache
def all_processors() -> frozenset[str]:
    """The names of all processors that a table here knows, sold by a name or not."""
    return frozenset({*map(str, processors())}.union(*generic_processors().values()))


@cache
def generic_processors() -> dict[str, frozenset[str]]:
    """The processors that run the code of each generic one: `gfx11-generic` -> gfx1100, gfx1101, ..."""
    return {row["name"]: frozenset(row["processors"]) for row in read_table("amd")["generic"]}


def find_amd(words: Sequence[str]) -> AmdGpuModel | None:
    """The GPU all of whose name is among `words` (`("amd", "mi250x")`); of several the longest name's."""
    typed = set(words)
    fitting = [gpu for gpu in amd_gpus() if _amd_words(gpu.name) <= typed]
    return max(fitting, key=lambda gpu: len(_amd_words(gpu.name)), default=None)


@cache
def _amd_words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def newest_rocm() -> int:
    """The newest major version of ROCm that is known."""
    return int(read_table("amd")["rocm"]["newest_major"])


_MAX_SUGGESTIONS = 6
# Words that say how a board is built, sold or shared: "with Max-Q Design", "Server Edition", "480GB".
_IGNORED_WORDS = re.compile(
    r"nvidia|geforce|tesla|grid|gpus?|graphics|cards?|device|laptop|notebook|mobile|generation|edition|design"
    r"|workstation|server|embedded|with|max|q|sxm[0-9]?|pci|pcie|nvl|hgx|dgxs|fhhl|lhr|ls|d|ac|mig|me|collectors"
    r"|hbm[0-9]e?|[0-9]+(gb?|gib)|[0-9]+[abcq]|3e|nvgpu|dev|shared"
)
_AMD = re.compile(r"amd|radeon|instinct|rx|mi[0-9]+[a-z]?|gfx[0-9a-f]+")
_GLUED = re.compile(r"(rtx|gtx|gt|titan|quadro|jetson|super|ti)(?=[a-z]?[0-9])|(?<=[0-9])(?=(?:ti|super)\b)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A GPU as NVIDIA or AMD sells it. `memory` are the sizes in GB in which it comes; empty: no source says.

    `host` is the architecture of its machine's processor (`arm64`), empty where it comes with several.
    """

    name: str
    capability: Capability
    memory: tuple[int, ...]
    source: str
    host: str = ""


@cache
def gpus() -> tuple[GpuModel, ...]:
    """All known GPUs, the newest capability first."""
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
    """The capabilities that known GPUs have, the oldest first."""
    return tuple(sorted({gpu.capability for gpu in gpus()}))


def find_gpu(name: str) -> GpuModel:
    """The GPU that `name` means.

    Part of a name is enough where all GPUs of which it is a part have one capability; the one with the
    shortest name stands for them. Raises UsageError for a name that several capabilities share, with those
    GPUs, and for an unknown one, with the nearest spellings. A processor of AMD's (`gfx90a`) is a name too.
    """
    if found_amd := _of_amd(name):
        return found_amd
    words = _words(name)
    known = _known_names()
    if words in known:
        return known[words]
    quoted = ascii(name if len(name) <= 60 else name[:60] + "...")
    typed = set(words)
    meant = sorted(
        (len(key), -gpu.capability.major, -gpu.capability.minor, gpu.name)
        for key, gpu in known.items()
        if typed and typed <= set(key)
    )
    fitting = [gpu for *_, name_of in meant for gpu in gpus() if gpu.name == name_of]
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
    near = _nearest(words, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        "gpu-unknown",
        f"unknown GPU {quoted}",
        hint=f"{hint}`nvidia-smi --query-gpu=compute_cap --format=csv` prints the compute capability",
    )


def _of_amd(name: str) -> GpuModel | None:
    words = re.findall(r"[a-z0-9]+", name[:200].lower())
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
    return {_words(gpu.name): gpu for gpu in gpus()}


def _words(name: str) -> tuple[str, ...]:
    """What of a name tells GPUs apart: `NVIDIA GeForce RTX3090Ti 24GB` -> `("rtx", "3090", "ti")`."""
    text = _GLUED.sub(lambda match: f"{match[0]} ", PROFILE.sub(" ", name[:200].lower()))
    words = re.findall(r"[a-z0-9]+", text)
    return tuple(word for word in words if not _IGNORED_WORDS.fullmatch(word))


def _nearest(words: tuple[str, ...], known: Mapping[tuple[str, ...], GpuModel]) -> list[str]:
    names = {" ".join(key): gpu.name for key, gpu in known.items()}
    # People leave out what distinguishes nothing to them, so each name is also tried without its first word.
    names |= {" ".join(key[1:]): gpu.name for key, gpu in known.items() if len(key) > 1}
    close = difflib.get_close_matches(" ".join(words), names, n=6, cutoff=0.75)
    return list(dict.fromkeys(names[spelling] for spelling in close))[:3]


# --- What data sheets say of GPUs (`data_sheets.toml`): how fast each could be, and how much memory is seen


GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """One GPU as it is sold. `memory` are bytes that a program sees, `flops` operations a second by type of
    number (fp64, fp32, tf32, fp16, bf16); bytes a second of its memory (`bandwidth`), from the host (`link`)
    and to another GPU of the machine (`peer`).
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
    """All rows of data_sheets.toml, in its order."""
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
    """The one that a name means, and others that it could mean too: `A100`, `a100-80gb`, `Tesla T4`.

    Of several the first in the table whose name has all of the asked words. Raises UsageError for an unknown
    one."""
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
