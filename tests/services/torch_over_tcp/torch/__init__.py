"""The few functions of torch that the suite uses on several nodes. Its GPU is the memory of the process."""

from __future__ import annotations

import array
import operator
from typing import Any

float32 = "float32"


class device:
    def __init__(self, type: str, index: int = 0) -> None:
        self.type, self.index = type, index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))


class Tensor:
    def __init__(self, data: bytes, place: device) -> None:
        self.data, self.device = data, place

    def to(self, place: device) -> Tensor:
        return Tensor(self.data, place)

    def detach(self) -> Tensor:
        return self

    cpu = numpy = detach

    def tobytes(self) -> bytes:
        return self.data

    def add(self, data: bytes) -> None:
        if data:
            rows = array.array("f", self.data), array.array("f", data)
            self.data = array.array("f", map(operator.add, *rows)).tobytes()


def frombuffer(buffer: bytearray, dtype: str) -> Tensor:
    assert dtype == float32
    return Tensor(bytes(buffer), device("cpu"))


def zeros_like(tensor: Tensor) -> Tensor:
    return Tensor(bytes(len(tensor.data)), tensor.device)


class cuda:
    @staticmethod
    def set_device(index: int) -> None:
        assert index == 0

    @staticmethod
    def synchronize(place: Any) -> None:
        assert place.type == "cuda"


class backends:
    class cuda:
        class matmul:
            allow_tf32 = True
