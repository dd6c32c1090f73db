"""A kernel is asked for as each Triton takes it: of each kind of API, one that refuses all others."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from imagefactory.suite import triton_build

NAMED = {"x": "*fp32", "y": "*fp32", "z": "*fp32", "count": "i32"}
NUMBERED = dict(enumerate(NAMED.values()))
CUBIN = b"\x7fELF of a kernel"


class Made:
    def __init__(self) -> None:
        self.asm = {"cubin": CUBIN}


class GPUTarget:
    """From 3.0 on; 2.x takes a tuple."""

    def __init__(self, *given: object) -> None:
        assert given == ("cuda", 80, 32)


class NumberedSource:
    """2.2 and 2.3."""

    def __init__(self, fn: object, signature: Mapping[Any, str], constants: Mapping[Any, int]) -> None:
        assert (dict(signature), dict(constants)) == (NUMBERED, {4: 128})


class NamedSource:
    """3.2: "Signature keys must be string"; 3.0 and 3.1 take both."""

    def __init__(self, fn: object, signature: Mapping[Any, str], constants: Mapping[Any, int]) -> None:
        assert (dict(signature), dict(constants)) == (NAMED, {"BLOCK": 128})


class WholeSource:
    """From 3.3 on constants are in the signature too."""

    def __init__(self, fn: object, signature: Mapping[Any, str], constexprs: Mapping[Any, int]) -> None:
        assert dict(signature) == {**NAMED, "BLOCK": "constexpr"}
        assert dict(constexprs) == {"BLOCK": 128}


def compile_by_numbers(kernel: object, **asked: Any) -> Made:
    """2.0 and 2.1."""
    assert asked == {"signature": NUMBERED, "constants": {4: 128}, "cc": 80}
    return Made()


def compile_source(source: object, target: Any) -> Made:
    assert isinstance(target, GPUTarget) or target == ("cuda", 80)
    return Made()


@pytest.mark.parametrize(
    ("source", "backends"),
    [
        (None, False),
        (NumberedSource, False),
        (NamedSource, True),
        (WholeSource, True),
    ],
)
def test_each_triton_is_asked_in_its_own_way(
    source: type | None, monkeypatch: pytest.MonkeyPatch, *, backends: bool
) -> None:
    def add(name: str, **content: object) -> Any:
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    triton = add("triton", compile=compile_source if source else compile_by_numbers, __path__=[])
    add("triton.compiler", **({"ASTSource": source} if source else {}))
    add("imagefactory_suite", __path__=[])
    add("imagefactory_suite.triton_kernel", add=object())
    if backends:
        add("triton.backends", __path__=[])
        add("triton.backends.compiler", GPUTarget=GPUTarget)
    assert triton_build.compile_kernel(triton) == len(CUBIN)
