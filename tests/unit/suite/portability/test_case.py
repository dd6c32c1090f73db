"""What is the same, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from imagefactory.suite.context import Failure
from imagefactory.suite.portability import case
from imagefactory.suite.portability.case import Case, agree, check_repeats, of_batch, off


def array(*values: float) -> Any:
    return numpy.array(values)


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([array(1.0, 4.0)], [array(1.0, 4.0)], 0.0),
        ([array(1.0, 4.2)], [array(1.0, 4.0)], 0.05),
        ([array(1.0), array(0.0, 20.0)], [array(1.0), array(0.0, 10.0)], 1.0),
        ([array(0.5)], [array(0.0)], 0.5),  # where nothing is expected it is absolute
        ([array()], [array()], 0.0),
        ([array(1.0, float("nan"))], [array(1.0, 2.0)], float("inf")),
        ([array(1.0, float("inf"))], [array(1.0, 2.0)], float("inf")),
        ([array(1.0)], [array(1.0, 2.0)], float("inf")),
        ([], [array(1.0)], float("inf")),
        (None, [array(1.0)], float("inf")),
    ],
)
def test_how_far_it_is_off(found: Any, expected: Any, error: float) -> None:
    assert off(found, expected) == pytest.approx(error)


def test_what_differs_keeps_its_number() -> None:
    assert agree("tvm", "cpu", [array(1.0)], [array(1.0)], 1e-4) == 0.0
    with pytest.raises(case.Differs, match=r"tvm .*cpu .*0\.5 .*1e-04") as caught:
        agree("tvm", "cpu", [array(1.5)], [array(1.0)], 1e-4)
    assert (caught.value.error, caught.value.outcome) == (0.5, "wrong-numbers")
    with pytest.raises(Failure, match="cuda"):
        agree("torch", "cuda", None, [array(1.0)], 1e-4)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([[array(1.0)], [array(1.1)]], "draws random numbers"),
        ([[array(float("nan"))], [array(float("nan"))]], "values that are no numbers"),
        ([None, None], "did not compute"),
    ],
)
def test_a_model_that_cannot_be_compared(answers: list[Any], said: str) -> None:
    with pytest.raises(Failure, match=said):
        check_repeats(made(answers))


def test_a_model_that_repeats_gives_what_is_expected() -> None:
    (expected,), error = check_repeats(made([[array(2.0)], [array(2.0001)]]))
    assert (expected.tolist(), error) == ([2.0], pytest.approx(5e-5))


def made(answers: list[Any]) -> Case:
    told = iter(answers)
    exporter = SimpleNamespace(NAME="torch", compute=lambda *_: next(told))
    return Case("net", exporter, None, {}, {})


def test_a_batch_is_rows_repeated_or_cut() -> None:
    inputs = {"x": numpy.arange(6.0).reshape(3, 2), "n": numpy.arange(3)}
    assert of_batch(inputs, 2)["x"].tolist() == [[0, 1], [2, 3]]
    large = of_batch(inputs, 5)
    assert large["n"].tolist() == [0, 1, 2, 0, 1]
    assert large["x"].shape == (5, 2)
    assert large["x"].flags["C_CONTIGUOUS"]
