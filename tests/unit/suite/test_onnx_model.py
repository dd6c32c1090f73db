"""A written ONNX model, read back by protobuf's rules and the field numbers of onnx.proto."""

from __future__ import annotations

import struct
from typing import Any

from imagefactory.suite.onnx_model import Node, write_model

Fields = dict[int, list[Any]]


def read(data: bytes) -> Fields:
    """Field number to values: numbers, or bytes of what has a length (wire types 0 and 2 of protobuf)."""
    found: Fields = {}
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            number |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 0x80:
                return number

    while at < len(data):
        key = varint()
        value: Any = varint()
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        else:
            assert key & 7 == 0
        found.setdefault(key >> 3, []).append(value)
    assert at == len(data)
    return found


def tensor(data: bytes) -> tuple[bytes, int, list[bytes]]:
    """Name, element type and names of the sizes of a ValueInfoProto."""
    value = read(data)
    ((kind,), (shape,)) = (read(read(value[2][0])[1][0])[number] for number in (1, 2))
    return value[1][0], kind, [read(size)[2][0] for size in read(shape).get(1, [])]


def test_a_model_says_what_was_asked() -> None:
    nodes = (
        Node("MatMul", ("a", "b"), "ab"),
        Node("ReduceSum", ("ab", "axes"), "y", {"keepdims": 0, "pads": (1, 300)}),
    )
    model = read(write_model(nodes, {"a": 2, "b": 2}, 1, constants={"axes": (1, -1)}))
    assert (sorted(model), model[1]) == ([1, 7, 8], [7])  # ir_version 7
    assert read(model[8][0]) == {1: [b""], 2: [13]}  # ONNX's own operators, set 13
    graph = read(model[7][0])
    assert (sorted(graph), graph[2]) == ([1, 2, 5, 11, 12], [b"suite"])

    first, second = map(read, graph[1])
    assert first == {1: [b"a", b"b"], 2: [b"ab"], 3: [b"ab"], 4: [b"MatMul"]}
    assert (second[1], second[2], second[4]) == ([b"ab", b"axes"], [b"y"], [b"ReduceSum"])
    assert [read(one) for one in second[5]] == [
        {1: [b"keepdims"], 3: [0], 20: [2]},  # INT
        {1: [b"pads"], 8: [1, 300], 20: [7]},  # INTS
    ]

    (axes,) = map(read, graph[5])
    assert (axes[1], axes[2], axes[8]) == ([2], [7], [b"axes"])  # one size, INT64
    assert struct.unpack("<2q", axes[9][0]) == (1, -1)
    assert [tensor(one) for one in graph[11]] == [(b"a", 1, [b"a0", b"a1"]), (b"b", 1, [b"b0", b"b1"])]
    assert [tensor(one) for one in graph[12]] == [(b"y", 1, [b"y0"])]
