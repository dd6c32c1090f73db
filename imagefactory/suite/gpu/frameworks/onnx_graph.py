"""Writes ONNX models of a few nodes: protobuf by hand, after onnx.proto (IR 7, operator set 13).

A lock of ONNX Runtime alone does not hold the package `onnx`. Element types are TensorProto's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...onnx_model import IR_VERSION, OPERATOR_SET
from ...onnx_model import field as entry

TYPES = {"float32": 1, "int64": 7, "float16": 10, "float64": 11, "bfloat16": 16}
INT, INTS = 2, 7  # AttributeProto.AttributeType


@dataclass(frozen=True)
class Node:
    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, int | Sequence[int]] = field(default_factory=dict)


def write_model(
    nodes: Sequence[Node], inputs: Mapping[str, int], rank: int, constants: Mapping[str, Sequence[int]]
) -> bytes:
    """ModelProto of float32 `inputs` (names to ranks) and the last node's output, of `rank`, float32.

    `constants` are vectors of int64 by name.
    """
    graph = b"".join(entry(1, _node(node)) for node in nodes) + entry(2, "suite")
    graph += b"".join(entry(5, _constant(name, values)) for name, values in constants.items())
    graph += b"".join(entry(11, _value(name, of)) for name, of in inputs.items())
    graph += entry(12, _value(nodes[-1].output, rank))
    return entry(1, IR_VERSION) + entry(7, graph) + entry(8, entry(1, "") + entry(2, OPERATOR_SET))


def _node(node: Node) -> bytes:
    data = b"".join(entry(1, name) for name in node.inputs) + entry(2, node.output)
    data += entry(3, node.output) + entry(4, node.operator)
    return data + b"".join(entry(5, _attribute(name, value)) for name, value in node.attributes.items())


def _attribute(name: str, value: int | Sequence[int]) -> bytes:
    if isinstance(value, int):
        return entry(1, name) + entry(3, value) + entry(20, INT)
    return entry(1, name) + b"".join(entry(8, number) for number in value) + entry(20, INTS)


def _constant(name: str, values: Sequence[int]) -> bytes:
    raw = struct.pack(f"<{len(values)}q", *values)
    return entry(1, len(values)) + entry(2, TYPES["int64"]) + entry(8, name) + entry(9, raw)


def _value(name: str, rank: int) -> bytes:
    sizes = b"".join(entry(1, entry(2, f"{name}{place}")) for place in range(rank))  # dim_param
    tensor = entry(1, TYPES["float32"]) + entry(2, sizes)
    return entry(1, name) + entry(2, entry(1, tensor))
