"""Writes ONNX models of a few nodes: protobuf after onnx.proto (IR 7, operator set 13).

A lock of only ONNX Runtime does not hold the package `onnx`. Element types are TensorProto's.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence

IR_VERSION, OPERATOR_SET = 7, 13
ELEMENT_TYPES = {"float32": 1, "float64": 11}  # TensorProto.DataType
VARINT, BYTES = 0, 2  # protobuf wire types


def varint(number: int) -> bytes:
    """Seven bits a byte, least first, the high bit for more to come."""
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


def value_info(name: str, rank: int, kind: str) -> bytes:
    """ValueInfoProto of a tensor whose `rank` sizes have names only."""
    sizes = b"".join(field(1, field(2, f"{name}{place}")) for place in range(rank))  # dim_param
    tensor = field(1, ELEMENT_TYPES[kind]) + field(2, sizes)
    return field(1, name) + field(2, field(1, tensor))


def model(operator: str, inputs: Mapping[str, int], *, rank: int, kind: str) -> bytes:
    """ModelProto with the node `operator(*inputs) -> y`; `inputs` maps names to ranks, `rank` is y's."""
    node = (
        b"".join(field(1, name) for name in inputs) + field(2, "y") + field(3, operator) + field(4, operator)
    )
    graph = field(1, node) + field(2, "suite")
    graph += b"".join(field(11, value_info(name, of, kind)) for name, of in inputs.items())
    graph += field(12, value_info("y", rank, kind))
    return field(1, IR_VERSION) + field(7, graph) + field(8, field(1, "") + field(2, OPERATOR_SET))


TYPES = {"float32": 1, "int64": 7, "float16": 10, "float64": 11, "bfloat16": 16}
INT, INTS = 2, 7  # AttributeProto.AttributeType


@dataclasses.dataclass(frozen=True)
class Node:
    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, int | Sequence[int]] = dataclasses.field(default_factory=dict)


def write_model(
    nodes: Sequence[Node], inputs: Mapping[str, int], rank: int, constants: Mapping[str, Sequence[int]]
) -> bytes:
    """ModelProto of float32 `inputs` (names to ranks) and the last node's output, of `rank`, float32.

    `constants` are vectors of int64 by name.
    """
    graph = b"".join(field(1, _node(node)) for node in nodes) + field(2, "suite")
    graph += b"".join(field(5, _constant(name, values)) for name, values in constants.items())
    graph += b"".join(field(11, _value(name, of)) for name, of in inputs.items())
    graph += field(12, _value(nodes[-1].output, rank))
    return field(1, IR_VERSION) + field(7, graph) + field(8, field(1, "") + field(2, OPERATOR_SET))


def _node(node: Node) -> bytes:
    data = b"".join(field(1, name) for name in node.inputs) + field(2, node.output)
    data += field(3, node.output) + field(4, node.operator)
    return data + b"".join(field(5, _attribute(name, value)) for name, value in node.attributes.items())


def _attribute(name: str, value: int | Sequence[int]) -> bytes:
    if isinstance(value, int):
        return field(1, name) + field(3, value) + field(20, INT)
    return field(1, name) + b"".join(field(8, number) for number in value) + field(20, INTS)


def _constant(name: str, values: Sequence[int]) -> bytes:
    raw = struct.pack(f"<{len(values)}q", *values)
    return field(1, len(values)) + field(2, TYPES["int64"]) + field(8, name) + field(9, raw)


def _value(name: str, rank: int) -> bytes:
    sizes = b"".join(field(1, field(2, f"{name}{place}")) for place in range(rank))  # dim_param
    tensor = field(1, TYPES["float32"]) + field(2, sizes)
    return field(1, name) + field(2, field(1, tensor))
