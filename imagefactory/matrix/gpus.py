"""A user's GPUs from a `gpus.yaml`: a list of names or capabilities, with drivers and counts.

    - name: V100            # as a person or nvidia-smi writes it
      driver: 535.129.03    # from nvidia-smi; optional
      count: 4
    - capability: 8.6       # any GPU with it; with a name, the name is yours
    - RTX 5090              # only a name
    - name: H100            # for a GPU sold with several processors, the machine's processor
      arch: arm64

Numbers need no quotes here: the text is read unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.drivers import read_driver
from imagefactory.gpu.knowledge import find_gpu
from imagefactory.model import SourceLocation
from imagefactory.recipes.values import NodeReader
from imagefactory.recipes.yaml_tree import YamlLimits, YamlNode, first_place, parse_tree, recipe_problem, show

LIMITS = YamlLimits(size=256 * 1024, nodes=20_000, depth=4)
MAX_COUNT = 1_000_000
_KEYS = ("name", "capability", "driver", "count", "arch")
_ARCHITECTURES = {"amd64": "amd64", "x86_64": "amd64", "arm64": "arm64", "aarch64": "arm64"}
_NAME = r"[A-Za-z0-9][A-Za-z0-9 ._+()/-]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroup:
    """`count` GPUs of one type. `driver` is empty if unknown.

    `name` is the known GPU's, or the file's next to a capability, or `capability 8.6` without either. `host`
    is the architecture of its machine's processor in OCI's spelling, empty if unknown.
    """

    name: str
    capability: Capability
    driver: str
    count: int
    where: SourceLocation
    host: str = ""

    @property
    def own_name(self) -> str:
        """The name, empty if only the capability is known."""
        return "" if self.name == _unnamed(self.capability) else self.name


def _unnamed(capability: Capability) -> str:
    return f"capability {capability}"


_LIST = 'pass a YAML file with a list such as - {name: "V100", driver: "535", count: 2}'


def parse_gpus(text: str, file: str) -> tuple[GpuGroup, ...]:
    """Return the types of GPU in the text of a `gpus.yaml`; errors name `file`. Raises RecipeError."""
    if all(not line or line.startswith("#") for line in map(str.strip, text.splitlines())):
        raise recipe_problem(first_place(file), "empty-file", "is empty", "write a list: - name: V100")
    reader = NodeReader(file)
    tree = parse_tree(text, file, LIMITS)
    items = reader.items(tree, "gpus.yaml", "a list: - name: V100")
    kinds = tuple(_gpu_group(item, reader) for item in items if tree.kind == "list")
    reader.finish()
    return tuple(kind for kind in kinds if kind)


def _gpu_group(item: YamlNode, reader: NodeReader) -> GpuGroup | None:
    """Return a group, None for an invalid entry, which is reported to the reader."""
    if item.kind == "text":
        values = {"name": item}
    else:
        values = reader.mapping(item, _KEYS, {})
        if item.kind != "map":
            return None
    name, capability = values.get("name"), values.get("capability")
    if not name and not capability:
        message = "has neither name nor capability"
        reader.fault(item.where, "missing-key", message, "write name: V100 or capability: 8.6")
        return None
    called = _text(name, "name", _NAME, reader) if name else ""
    gpu_capability = _capability(capability, reader) if capability else None
    host = ""
    if name and called and not capability:
        try:
            gpu = find_gpu(called)
        except UsageError as error:
            reader.fault(name.where, "gpu-unknown", error.message, _as_capability(called) or error.hint)
        else:
            called, gpu_capability, host = gpu.name, gpu.capability, gpu.host
    driver = _driver(values["driver"], reader) if "driver" in values else ""
    count = _count(values["count"], reader) if "count" in values else 1
    if "arch" in values:
        host = _host(values["arch"], host, reader)
    if gpu_capability is None or (name and not called):
        return None
    return GpuGroup(
        name=called or _unnamed(gpu_capability),
        capability=gpu_capability,
        driver=driver,
        count=count,
        where=item.where,
        host=host,
    )


def _as_capability(text: str) -> str:
    """Return the fix for a name that is a capability, empty for other text."""
    try:
        return f"write capability: {parse_capability(text)}"
    except ValueError:
        return ""


_WRITE = {
    "name": "the GPU's name, as nvidia-smi shows it",
    "driver": "its version, as nvidia-smi shows it: 535.129.03",
    "arch": "amd64 or arm64",
    "capability": "8.6, as nvidia-smi's compute_cap shows, or gfx90a",
    "count": f"a whole number from 1 to {MAX_COUNT}",
}


def _invalid(node: YamlNode, key: str, reader: NodeReader, reason: str = "") -> None:
    value = show(node.text) if node.kind == "text" else node.called
    reader.fault(node.where, "value-invalid", f"'{key}' cannot be {value}{reason}", f"write {_WRITE[key]}")


def _text(node: YamlNode, key: str, pattern: str, reader: NodeReader) -> str:
    if node.kind != "text":
        message = f"'{key}' must be text, not {node.called}"
        reader.fault(node.where, "not-text", message, f"write {_WRITE[key]}")
    elif re.fullmatch(pattern, node.text, re.ASCII) and len(node.text) <= 100:
        return node.text
    else:
        _invalid(node, key, reader)
    return ""


def _host(node: YamlNode, only: str, reader: NodeReader) -> str:
    """Return the architecture in a file. `only` is that of a GPU that is sold with one processor."""
    architecture = _ARCHITECTURES.get(node.text, "") if node.kind == "text" else ""
    if not architecture:
        _invalid(node, "arch", reader)
    elif only and architecture != only:
        message, write = f"that GPU comes only with {only}", f"write arch: {only}, or remove it"
        reader.fault(node.where, "arch-mismatch", message, write)
    return architecture


def _driver(node: YamlNode, reader: NodeReader) -> str:
    written = _text(node, "driver", r"[ -~]+", reader)
    try:
        return read_driver(written) if written else ""
    except ValueError as error:
        _invalid(node, "driver", reader, f": {error}")
    return ""


def _capability(node: YamlNode, reader: NodeReader) -> Capability | None:
    try:
        return parse_capability(node.text)
    except ValueError:
        _invalid(node, "capability", reader)
    return None


def _count(node: YamlNode, reader: NodeReader) -> int:
    if node.kind == "text" and re.fullmatch(r"[1-9][0-9]{0,6}", node.text) and int(node.text) <= MAX_COUNT:
        return int(node.text)
    _invalid(node, "count", reader)
    return 1
