"""GPUs by name: which compute capability each has (`gpus.toml`), and what people and drivers call them.

A name comes as a person types it ("v100", "rtx5090") or as a driver reports it ("Tesla V100-SXM2-32GB",
"NVIDIA A100-SXM4-40GB MIG 1g.5gb"). Brand, socket, memory and MIG slice do not decide the capability and
are left out of the comparison; "Quadro", "Ada" and "Blackwell" decide it and are not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.knowledge.amd_gpus import find_amd
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.values import PROFILE

_SHOWN = 6
# Words that say how a board is built, sold or shared: "with Max-Q Design", "Server Edition", "480GB".
_LEFT_OUT = re.compile(
    r"nvidia|geforce|tesla|grid|gpus?|graphics|cards?|device|laptop|notebook|mobile|generation|edition|design"
    r"|workstation|server|embedded|with|max|q|sxm[0-9]?|pci|pcie|nvl|hgx|dgxs|fhhl|lhr|ls|d|ac|mig|me|collectors"
    r"|hbm[0-9]e?|[0-9]+(gb?|gib)|[0-9]+[abcq]|3e|nvgpu|dev|shared"
)
_AMD = re.compile(r"amd|radeon|instinct|rx|mi[0-9]+[a-z]?|gfx[0-9a-f]+")
_GLUED = re.compile(r"(rtx|gtx|gt|titan|quadro|jetson|super|ti)(?=[a-z]?[0-9])|(?<=[0-9])(?=(?:ti|super)\b)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as NVIDIA or AMD sells it. `memory` are the sizes in GB in which it comes; empty: no source says.

    `host` is the architecture of its machine's processor (`arm64`), empty where it comes with several.
    """

    name: str
    capability: Capability
    memory: tuple[int, ...]
    source: str
    host: str = ""


@cache
def gpus() -> tuple[Gpu, ...]:
    """All known GPUs, the newest capability first."""
    return tuple(
        Gpu(
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


def find_gpu(name: str) -> Gpu:
    """The GPU that `name` means.

    Part of a name is enough where all GPUs of which it is a part have one capability; the one with the
    shortest name stands for them. Raises UsageError for a name that several capabilities share, with those
    GPUs, and for an unknown one, with the nearest spellings. A processor of AMD's (`gfx90a`) is a name too.
    """
    if found_amd := _of_amd(name):
        return found_amd
    words = _words(name)
    known = _known()
    if words in known:
        return known[words]
    shown = ascii(name if len(name) <= 60 else name[:60] + "...")
    asked = set(words)
    meant = sorted(
        (len(key), -gpu.capability.major, -gpu.capability.minor, gpu.name)
        for key, gpu in known.items()
        if asked and asked <= set(key)
    )
    found = [gpu for *_, one in meant for gpu in gpus() if gpu.name == one]
    if len({gpu.capability for gpu in found}) == 1:
        return found[0]
    if found:
        choices = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UsageError(
            "gpu-ambiguous",
            f"{shown} matches GPUs of different compute capabilities: {choices}{more}",
            hint="write the full name, or the compute capability",
        )
    if any(_AMD.fullmatch(word) for word in words):
        raise UsageError(
            "gpu-unknown",
            f"unknown AMD GPU {shown}",
            hint="write its processor, such as gfx90a: `rocminfo` or `rocm_agent_enumerator` prints it",
        )
    near = _nearest(words, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        "gpu-unknown",
        f"unknown GPU {shown}",
        hint=f"{hint}`nvidia-smi --query-gpu=compute_cap --format=csv` prints the compute capability",
    )


def _of_amd(name: str) -> Gpu | None:
    words = re.findall(r"[a-z0-9]+", name[:200].lower())
    if len(words) == 1 and words[0].startswith("gfx"):
        try:
            return Gpu(name=words[0], capability=parse_capability(words[0]), memory=(), source="its own name")
        except ValueError:
            return None
    sold = find_amd(words)
    if sold is None:
        return None
    return Gpu(name=sold.name, capability=sold.processor, memory=(), source=sold.source)


@cache
def _known() -> Mapping[tuple[str, ...], Gpu]:
    return {_words(gpu.name): gpu for gpu in gpus()}


def _words(name: str) -> tuple[str, ...]:
    """What of a name tells GPUs apart: `NVIDIA GeForce RTX3090Ti 24GB` -> `("rtx", "3090", "ti")`."""
    text = _GLUED.sub(lambda found: f"{found[0]} ", PROFILE.sub(" ", name[:200].lower()))
    words = re.findall(r"[a-z0-9]+", text)
    return tuple(word for word in words if not _LEFT_OUT.fullmatch(word))


def _nearest(words: tuple[str, ...], known: Mapping[tuple[str, ...], Gpu]) -> list[str]:
    names = {" ".join(key): gpu.name for key, gpu in known.items()}
    # People leave out what distinguishes nothing to them, so each name is also tried without its first word.
    names |= {" ".join(key[1:]): gpu.name for key, gpu in known.items() if len(key) > 1}
    close = difflib.get_close_matches(" ".join(words), names, n=6, cutoff=0.75)
    return list(dict.fromkeys(names[one] for one in close))[:3]
