"""A row for CUDA has capabilities; a row for CPUs, with cuda: [none], has nothing that speaks of GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from imagefactory.model import NO_CUDA
from imagefactory.recipes.reader import Reader
from imagefactory.recipes.values import GPU_CHECKS
from imagefactory.recipes.yaml_tree import YamlNode


def check_gpu_row(
    reader: Reader, node: YamlNode, row: Mapping[str, YamlNode], family: Mapping[str, YamlNode]
) -> None:
    """Tells the reader what is wrong with the keys of `row`, which stands at `node`."""
    if "capabilities" not in row and "capabilities" not in family:
        write = 'write capabilities: ["8.0"] with those that the image must support'
        reader.fault(
            node.where,
            "capabilities-missing",
            "'capabilities' is missing in the row and in the family",
            write,
        )
    if named := row.get("framework"):
        what = "'framework' in a row requires cuda: [none] or rocm"
        reader.fault(
            named.where, "framework-in-gpu-row", what, "remove it: CUDA rows use the family's framework"
        )


def check_cpu_row(reader: Reader, row: Mapping[str, YamlNode]) -> None:
    """Tells the reader what is wrong with the keys of a row for CPUs."""
    versions = row["cuda"].items
    for item in versions:
        if item.text == NO_CUDA and len(versions) > 1:
            write = "write a separate row for CPUs, with cuda: [none]"
            reader.fault(item.where, "mixed-row", "'none' and CUDA versions are in one row", write)
    about = [(key, row[key].where) for key in ("capabilities", "waive") if key in row]
    if "virtual" in row:
        about += [("virtual.cuda", key.where) for key, _ in row["virtual"].pairs if key.text == "cuda"]
    if "checks" in row:
        about += [(item.text, item.where) for item in row["checks"].items if item.text in GPU_CHECKS]
    for key, where in about:
        reader.fault(where, "gpu-only-key", f"'{key}' is for GPUs, and cuda: [none] is for CPUs", "remove it")
