"""Rows for AMD's GPUs, with rocm in place of cuda: their capabilities are processors, and only theirs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.recipes.reader import Reader
from imagefactory.recipes.values import RULES
from imagefactory.recipes.yaml_tree import YamlNode
from imagefactory.versions import natural

CUDA_CHECK = "compiler"
"""The check of the smoke test that has no meaning without CUDA: it tries what makes code for it."""


def check_rocm_row(
    reader: Reader, node: YamlNode, row: Mapping[str, YamlNode], family: Mapping[str, YamlNode]
) -> None:
    """Tells the reader what is wrong with the keys of `row`, which stands at `node`."""
    rocm, newest = row["rocm"], knowledge.newest_rocm()
    if cuda := row.get("cuda"):
        write = "write a separate row for AMD GPUs, with only rocm"
        reader.fault(cuda.where, "mixed-row", "'cuda' and 'rocm' are in one row", write)
    for item in rocm.items:
        if RULES["rocm"].allows(item.text) and int(item.text.partition(".")[0]) > newest:
            write = f"write a version of ROCm {newest} or older"
            reader.fault(item.where, "rocm-unknown", f"unknown ROCm version {item.text}", write)
    for item in row["checks"].items if "checks" in row else ():
        if item.text == CUDA_CHECK:
            reader.fault(
                item.where,
                "check-not-applicable",
                f"'{CUDA_CHECK}' checks the CUDA compiler",
                "remove it",
            )
    capabilities = row.get("capabilities") or family.get("capabilities")
    if capabilities is None or ("capabilities" not in row and not any(_processors(capabilities))):
        what = "'capabilities' with AMD processors is missing in the row"
        write = "write capabilities: [gfx90a, gfx942] with those that the image must support"
        reader.fault(node.where, "capabilities-missing", what, write)


def check_processors(reader: Reader, capabilities: YamlNode | None, *, rocm: bool) -> None:
    """Tells the reader which `capabilities` are not those of the row's GPUs, and which no GPU has."""
    for item in capabilities.items if capabilities else ():
        if not RULES["capability"].allows(item.text):
            continue
        amd = item.text.startswith("gfx")
        if amd and not rocm:
            write = "write a separate row for AMD GPUs, with rocm instead of cuda"
            reader.fault(
                item.where,
                "capability-mismatch",
                f"'{item.text}' is an AMD processor, and the row is for CUDA",
                write,
            )
        elif rocm and not amd:
            write = "write its processor, such as gfx90a"
            reader.fault(
                item.where,
                "capability-mismatch",
                f"'{item.text}' is not an AMD processor, and the row is for ROCm",
                write,
            )
        elif amd and item.text not in knowledge.known_processors():
            near = _nearest(item.text)
            write = f"did you mean {near}?" if near else "`rocminfo` prints the processor of a GPU"
            reader.fault(item.where, "capability-unknown", f"unknown AMD processor '{item.text}'", write)


def in_order(capabilities: Sequence[str]) -> tuple[str, ...]:
    """By their numbers, gfx908 before gfx90a; what is none, which is told elsewhere, in natural order."""
    return tuple(sorted(capabilities, key=_order))


def _order(text: str) -> tuple[object, ...]:
    try:
        return 0, parse_capability(text), ()
    except ValueError:
        return 1, Capability(0, 0), natural(text)


def _processors(node: YamlNode) -> list[str]:
    return [item.text for item in node.items if item.text.startswith("gfx")]


def _nearest(text: str) -> str:
    """Those that are sold and differ in the last digit alone."""
    return " or ".join(str(one) for one in knowledge.processors() if str(one)[:-1] == text[:-1])
