"""Write ONNX models of a few nodes: protobuf according to onnx.proto (IR 7, operator set 13).

A lock with only ONNX Runtime does not have the package `onnx`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence

IR_VERSION, OPERATOR_SET = 7, 13
TYPES = {"float32": 1, "int64": 7, "float16": 10, "float64": 11, "bfloat16": 16}  # TensorProto.DataType
INT, INTS = 2, 7  # AttributeProto.AttributeType
VARINT, BYTES = 0, 2  # protobuf wire types


@dataclasses.dataclass(frozen=True)
class Node:
    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, int | Sequence[int]] = dataclasses.field(default_factory=dict)


def varint(number: int) -> bytes:
    """Encode a number with seven bits in each byte, least significant first; the high bit means that more
    follow.
    """
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def write_model(
    nodes: Sequence[Node],
    inputs: Mapping[str, int],
    rank: int,
    *,
    kind: str = "float32",
    constants: Mapping[str, Sequence[int]] | None = None,
) -> bytes:
    """Return a ModelProto with `inputs` (names to ranks) and the last node's output of `rank`, all of type
    `kind`.

    `constants` are vectors of int64 by name.
    """

    def tensor(name: str, rank: int) -> bytes:
        """Return the ValueInfoProto of a tensor whose sizes have only names."""
        sizes = b"".join(field(1, field(2, f"{name}{place}")) for place in range(rank))  # dim_param
        return field(1, name) + field(2, field(1, field(1, TYPES[kind]) + field(2, sizes)))

    graph = b"".join(field(1, _node(node)) for node in nodes) + field(2, "suite")
    for name, values in (constants or {}).items():
        raw = struct.pack(f"<{len(values)}q", *values)
        vector = field(1, len(values)) + field(2, TYPES["int64"]) + field(8, name) + field(9, raw)
        graph += field(5, vector)
    graph += b"".join(field(11, tensor(name, size)) for name, size in inputs.items())
    graph += field(12, tensor(nodes[-1].output, rank))
    return field(1, IR_VERSION) + field(7, graph) + field(8, field(1, "") + field(2, OPERATOR_SET))


def _node(node: Node) -> bytes:
    data = b"".join(field(1, name) for name in node.inputs) + field(2, node.output)
    data += field(3, node.output) + field(4, node.operator)
    for name, value in node.attributes.items():
        if isinstance(value, int):
            attribute = field(1, name) + field(3, value) + field(20, INT)
        else:
            attribute = field(1, name) + b"".join(field(8, number) for number in value) + field(20, INTS)
        data += field(5, attribute)
    return data
