"""Writes an ONNX model of one operator: protobuf by hand, after onnx.proto (IR 7, operator set 13)."""

from __future__ import annotations

from collections.abc import Mapping

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
