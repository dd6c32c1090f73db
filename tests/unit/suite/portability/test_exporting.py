"""A person's file of models: what is taken, and what is told of what is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from imagefactory.suite.context import CheckFailure
from imagefactory.suite.portability import exporting
from imagefactory.suite.portability.case import TOLERANCE


@pytest.fixture(autouse=True)
def _jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A JAX that has arrays of 32 bits alone, as the real one; no other framework."""
    jax, jnp = ModuleType("jax"), ModuleType("jax.numpy")
    kinds = {"int64": "int32", "float64": "float32"}
    jnp.asarray = lambda array: array.astype(kinds.get(str(array.dtype), array.dtype))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.numpy", jnp)
    for name in ("torch", "tensorflow", "models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("models", None)


def read(folder: Path, text: str) -> Any:
    path = folder / "models.py"
    path.write_text(f"import numpy\nzeros = lambda *s, t='float32': numpy.zeros(s, t)\n{text}\n")
    return exporting.read_models(str(path))


def of(folder: Path, row: str) -> Any:
    return read(folder, f"def models():\n    return [{row}]")


GOOD = "{'name': 'net', 'model': abs, 'sample': {'x': zeros(2, 3)}}"


def test_a_model_with_what_it_needs(tmp_path: Path) -> None:
    (case,) = of(tmp_path, GOOD)
    assert (case.name, case.network, case.tolerance, case.batched) == ("net", abs, TOLERANCE, True)
    assert case.exporter.NAME == "jax"
    assert case.held_out.keys() == case.sample.keys() == {"x"}


def test_a_model_with_all_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text(
        "class Net:\n    def calm(self, x): return x\n    def __call__(self): ...\n"
    )
    (case,) = read(
        tmp_path,
        "import weights\n"
        "def models():\n"
        "    yield {'name': 'a-1', 'model': weights.Net(), 'override': 'calm', 'batched': False,\n"
        "           'sample': {'x': zeros(3, t='int64')}, 'held_out': {'x': zeros(3, t='int64') + 1},\n"
        "           'tolerance': 1e-3}",
    )
    assert case.network.__name__ == "calm"
    assert (case.tolerance, case.batched) == (1e-3, False)
    assert case.sample["x"].dtype == numpy.int32  # as the exported model takes it
    assert case.held_out["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "models.py has no function models()"),
        ("def models(:", "models.py:3: SyntaxError"),
        ("import nothing_of_that_name", "models.py:3: ModuleNotFoundError"),
        ("def models():\n    return numpy.nothing", "models.py:4: AttributeError"),
        ("def models():\n    yield 1 / 0", "models.py:4: ZeroDivisionError"),
        ("raise SystemExit(3)", "models.py:3: SystemExit: 3"),
        ("def models(): return None", "models() gives a NoneType: let it give a list"),
        ("def models(): return []", "models() gives a list: let it give a list"),
        ("def models(): return {}", "models() gives a dict"),
        (f"def models(): return [{GOOD}, {GOOD}]", "two models are called 'net'"),
    ],
)
def test_a_file_that_gives_no_models(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CheckFailure) as caught:
        read(tmp_path, text)
    assert said in caught.value.detail


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("3", "models()[0] is a int: write a dict with name, model, sample"),
        ("{}", "has no 'name'"),
        ("{'nam': 1}", "has 'nam', which means nothing: it may have name"),
        (GOOD.replace("'net'", "'../net'"), "'../net' is not a valid name"),
        (GOOD.replace("abs", "3"), "model is of type int: give a torch.nn.Module"),
        (GOOD.replace("zeros(2, 3)", "[1]"), "'x' is a list: write a NumPy array"),
        (GOOD.replace("'x'", "'x y'"), "'x y' is not the name of an input"),
        (GOOD.replace("{'x': zeros(2, 3)}", "zeros(2)"), "sample is a ndarray: write a dict"),
        (GOOD.replace("zeros(2, 3)", "zeros()"), "'x' has no rows"),
        (GOOD.replace("zeros(2, 3)", "zeros(0, 3)"), "'x' has no rows"),
        (GOOD.replace("zeros(2, 3)", "zeros(2), 'y': zeros(3)"), "different numbers of rows"),
        (GOOD.replace("}}", "}, 'tolerance': 0}"), "tolerance is 0"),
        (GOOD.replace("}}", "}, 'tolerance': True}"), "tolerance is True"),
        (GOOD.replace("}}", "}, 'batched': 1}"), "batched is 1"),
        (GOOD.replace("}}", "}, 'override': 'calm'}"), "override is 'calm': name a method"),
        (GOOD.replace("}}", "}, 'held_out': {'y': zeros(2, 3)}}"), "held_out has y, and sample x"),
        (GOOD.replace("}}", "}, 'held_out': {'x': zeros(2, 4)}}"), "'x' is float32[2, 4] in held_out"),
        (GOOD.replace("}}", "}, 'held_out': {'x': zeros(9, 3, t='int8')}}"), "'x' is int8[9, 3] in held_out"),
    ],
)
def test_a_model_that_is_none(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(CheckFailure) as caught:
        of(tmp_path, change)
    assert caught.value.detail.startswith("models.py: models()[0]")
    assert said in caught.value.detail


def test_more_rows_may_be_held_out_than_a_model_is_exported_with(tmp_path: Path) -> None:
    (case,) = of(tmp_path, GOOD.replace("}}", "}, 'held_out': {'x': zeros(9, 3)}}"))
    assert case.held_out["x"].shape == (9, 3)
