"""Tables of combinations: what is valid, what is not and why, what is left open, and ranges of versions."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from imagefactory.extras.site.tables import (
    HEADER,
    TableData,
    format_csv,
    format_markdown,
    format_summary,
    tables_json,
)
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.matrix.combos import (
    ComboCell,
    ComboEntry,
    ComboState,
    SweepNodeState,
    columns,
    make_combos,
    make_ranges,
    neighbours,
    unite,
)
from imagefactory.matrix.plan import CellRuling
from imagefactory.model import Outcome
from imagefactory.trust.claims import REFUSALS
from imagefactory.trust.verdict import VerdictStatus
from tests.made.claims import NOW, judged

VOLTA, AMPERE, HOPPER = Capability(7, 0), Capability(8, 0), Capability(9, 0)
NO = CellClaim(
    basis=ClaimBasis.PREDICTED,
    answer=Compatibility.NO,
    rule="no-code",
    reason="only sm_50 | sm_80",
    source="scan",
)
YES = replace(NO, answer=Compatibility.YES, rule="code", reason="has sm_80 code")


def entry(version: str = "2.3", cuda: str = "12.1", **changes: object) -> ComboEntry:
    made = ComboEntry(
        target=f"pytorch-{version}-cu{cuda.replace('.', '')}",
        framework="torch",
        version=version,
        cuda=cuda,
        images=frozenset({"sha256:a"}),
        judged=(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def told(outcome: Outcome, days: int = 0, **changes: object) -> SweepNodeState:
    made = SweepNodeState(
        target="pytorch-2.3-cu121",
        capability=AMPERE,
        outcome=outcome,
        reason=f"why {outcome}",
        sweep=f"sweep-{days}",
        made=NOW - timedelta(days=days),
        images=frozenset({"sha256:a"}),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def one(made: ComboEntry, *sweeps: SweepNodeState) -> ComboCell:
    (combo,) = make_combos([made], sweeps, [AMPERE])
    return combo


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_a_good_verdict_makes_it_valid_for_its_capability_alone() -> None:
    combos = make_combos([entry(judged=((judged(),),))], (), [AMPERE, HOPPER])
    assert [(combo.capability, combo.status) for combo in combos] == [
        (AMPERE, ComboState.VALID),
        (HOPPER, ComboState.NOT_TESTED),
    ]
    assert (combos[0].framework, combos[0].driver, combos[0].cause) == ("pytorch", "535.54.03", "")
    assert "passed the full suite" in combos[0].reason


@pytest.mark.parametrize("standing", [one for one in VerdictStatus if one is not VerdictStatus.GOOD])
def test_no_verdict_that_cannot_be_relied_on_counts(standing: VerdictStatus) -> None:
    combo = one(entry(judged=((judged(standing=standing),),)), told(Outcome.VERIFIED))
    assert combo.status is ComboState.NOT_TESTED
    assert standing.value in combo.reason


def test_a_sweep_that_says_verified_without_a_verdict_proves_nothing() -> None:
    combo = one(entry(), told(Outcome.VERIFIED))
    assert (combo.status, combo.cause) == (ComboState.NOT_TESTED, Outcome.NOT_TESTED)
    assert "there is none" in combo.reason


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.WRONG_NUMBERS, ComboState.FAILED),
        (Outcome.NO_KERNEL, ComboState.FAILED),
        (Outcome.LOAD_FAILED, ComboState.FAILED),
        (Outcome.DRIVER_TOO_OLD, ComboState.FAILED),
        (Outcome.TIMEOUT, ComboState.UNDECIDED),
    ],
)
def test_a_signed_no_has_its_own_word(outcome: Outcome, state: ComboState) -> None:
    combo = one(entry(judged=((judged(outcome),),)), told(Outcome.HELD))
    assert (combo.status, combo.cause, combo.basis) == (state, outcome, "verified")
    assert "535.54.03" in combo.reason


@pytest.mark.parametrize(
    "outcome", [one for one in Outcome if one not in (Outcome.VERIFIED, Outcome.NOT_TESTED)]
)
def test_every_outcome_of_a_sweep_keeps_its_word(outcome: Outcome) -> None:
    combo = one(entry(), told(outcome))
    assert combo.status in (ComboState.FAILED, ComboState.UNDECIDED)
    assert (combo.cause, combo.basis, combo.source) == (outcome, "reported", "sweep sweep-0")
    invalid = [["pytorch", "8.0", "12.1", "2.3", outcome.value]] if outcome in REFUSALS else []
    assert rows(format_csv([combo]))[1:] == invalid


def test_the_newest_sweep_of_this_image_counts() -> None:
    other = told(Outcome.NO_KERNEL, images=frozenset({"sha256:other"}))
    assert one(entry(), told(Outcome.HELD, 2), told(Outcome.TIMEOUT, 1), other).cause == Outcome.TIMEOUT
    assert one(entry(), other).status is ComboState.NOT_TESTED
    assert (
        one(entry(images=frozenset()), told(Outcome.NO_MATCH, images=frozenset())).cause == Outcome.NO_MATCH
    )


def test_a_removed_job_is_not_tested() -> None:
    assert one(entry(), told(Outcome.NOT_TESTED)).status is ComboState.NOT_TESTED


def test_what_is_foretold_is_called_so() -> None:
    rulings: Mapping[Capability, CellRuling] = {AMPERE: CellRuling(claim=NO, against=(NO,))}
    combo = one(entry(rulings=rulings))
    assert (combo.status, combo.cause, combo.basis) == (ComboState.RULED_OUT, "no-code", "predicted")
    assert rows(format_csv([combo]))[1][-1] == "no-code (predicted)"
    unsolvable = replace(NO, rule="unsolvable", basis=ClaimBasis.DOCUMENTED)
    combo = one(entry(rulings={AMPERE: CellRuling(claim=unsolvable, against=(unsolvable,))}, block="no lock"))
    assert rows(format_csv([combo]))[1][-1] == "unsolvable"
    combo = one(entry(rulings={AMPERE: CellRuling(claim=YES)}))
    assert (combo.status, combo.basis) == (ComboState.NOT_TESTED, "predicted")


def test_a_verdict_weighs_more_than_what_is_foretold() -> None:
    rulings = {AMPERE: CellRuling(claim=NO, against=(NO,))}
    assert one(entry(rulings=rulings, judged=((judged(),),))).status is ComboState.VALID


def test_columns_are_what_anybody_asks_requires_tries_or_proves() -> None:
    entries = [entry(required=(VOLTA,), judged=((judged(capability="8.9"),),))]
    assert [str(found) for found in columns(entries, [told(Outcome.HELD)], [HOPPER])] == [
        "7.0",
        "8.0",
        "8.9",
        "9.0",
    ]
    odd = judged(capability="none")
    assert columns([entry(judged=((odd,),))]) == ()
    assert one(entry(judged=((odd,),))).status is ComboState.NOT_TESTED


def test_what_is_proven_of_one_image_is_not_of_another() -> None:
    old, new = (judged(days=9),), (judged(Outcome.NO_KERNEL),)
    combo = one(entry(judged=(new, old)))
    assert (combo.status, "2026-11-13" in combo.reason) == (ComboState.VALID, True)
    assert one(entry(judged=((*new, *old),))).status is ComboState.FAILED


def test_the_headers_are_the_old_ones() -> None:
    assert HEADER == "Framework, Compute Capability, Cuda Library, Framework Version, Failure Cause"
    combos = make_combos([entry(judged=((judged(),),))], (), [AMPERE, HOPPER])
    assert format_csv(combos) == f"{HEADER}\npytorch,8.0,12.1,2.3,\n"


def test_several_targets_of_one_combination_are_one_line() -> None:
    proven = entry(judged=((judged(),),))
    other = entry(target="mylab-2.3-cu121", judged=((judged(Outcome.NO_KERNEL),),))
    conda = entry(target="pytorch-conda-2.3-cu121", framework="pytorch")
    combos = make_combos([other, conda, proven], (), [AMPERE])
    assert len(combos) == 3
    assert [found.status for found in unite(combos)] == [ComboState.VALID]
    assert [found.cause for found in unite(combos[:2])] == [Outcome.NO_KERNEL]
    held = make_combos([replace(proven, judged=()), conda], [told(Outcome.HELD)], [AMPERE])
    assert [found.status for found in unite(held)] == [ComboState.NOT_TESTED]


@pytest.mark.parametrize(
    ("package", "family"),
    [
        *((name, "pytorch") for name in ("torch", "pytorch", "pytorch-gpu", "pytorch-cpu", "libtorch")),
        *((name, "tensorflow") for name in ("tensorflow", "tensorflow-gpu", "tensorflow-base")),
        *((name, "jax") for name in ("jax", "jaxlib")),
        *((name, "onnxruntime") for name in ("onnxruntime-gpu", "onnxruntime", "onnxruntime-cpp")),
        ("cupy", "cupy"),
    ],
)
def test_a_framework_has_one_name_whatever_its_package_is_called(package: str, family: str) -> None:
    combos = make_combos([entry(framework=package)], (), [AMPERE])
    assert [found.framework for found in combos] == [family]


@pytest.mark.parametrize(
    "word", [Outcome.NO_GPU, Outcome.NO_MATCH, Outcome.TIMEOUT, Outcome.HELD, Outcome.INFRASTRUCTURE]
)
def test_a_fault_of_a_machine_is_no_invalid_combination(word: Outcome) -> None:
    combos = make_combos([entry()], [told(word)], [AMPERE])
    assert [(found.status, found.cause) for found in combos] == [(ComboState.UNDECIDED, word)]
    assert format_csv(combos) == f"{HEADER}\n"
    page = format_markdown(TableData(made=NOW, place="here", combos=combos, ranges=make_ranges(combos)))
    undecided = page.partition("## Undecided")[2].partition("## ")[0]
    assert f"| {word} |" in undecided


@pytest.mark.parametrize("later", [Outcome.NO_MATCH, Outcome.NOT_TESTED])
def test_a_timeout_stays_one_when_its_machine_goes_away(later: Outcome) -> None:
    """`told` counts days back: the job that was stopped is the older one."""
    away = replace(told(later, 0), images=frozenset())
    assert one(entry(), told(Outcome.TIMEOUT, 9), away).cause == Outcome.TIMEOUT
    assert one(entry(), told(Outcome.TIMEOUT, 9), told(Outcome.HELD, 0)).cause == Outcome.HELD


def test_lines_are_sorted_by_number() -> None:
    entries = [entry(version, judged=((judged(),),)) for version in ("2.10", "2.9", "1.13")]
    assert [row[3] for row in rows(format_csv(make_combos(entries, (), [AMPERE])))[1:]] == [
        "1.13",
        "2.9",
        "2.10",
    ]


def test_markdown_keeps_strangers_text_in_its_cell() -> None:
    reason = "a | b\n<script>`x`[y](z)"
    combos = make_combos([entry()], [told(Outcome.HELD, reason=reason)], [AMPERE])
    text = format_markdown(TableData(made=NOW, place="here", combos=combos, ranges=make_ranges(combos)))
    (line,) = [line for line in text.splitlines() if "script" in line]
    assert "a \\| b &lt;script&gt;\\`x\\`\\[y\\](z)" in line


def test_summary_and_json_count_states() -> None:
    combos = make_combos([entry(judged=((judged(),),))], (), [AMPERE, HOPPER])
    tables = TableData(made=NOW, place="here", combos=combos, ranges=make_ranges(combos))
    assert format_summary(tables).endswith("2 combinations in here: 1 valid, 1 not-tested")
    told = tables_json(tables)
    assert told["counts"] == {"valid": 1, "failed": 0, "ruled-out": 0, "undecided": 0, "not-tested": 1}
    assert "No key is trusted here" in format_summary(replace(tables, trusted=False))
    nothing = TableData(made=NOW, place="here", combos=(), ranges=())
    assert format_summary(nothing) == "0 combinations in here: nothing"
    assert "None." in format_markdown(nothing)


def ranges(*proven: str, other: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    entries = [entry(version, judged=((judged(),),)) for version in proven]
    entries += [entry(version) for version in other]
    return [(found.versions, found.status.value) for found in make_ranges(make_combos(entries, (), [AMPERE]))]


def test_ranges_have_no_gaps() -> None:
    assert ranges("2.1", "2.2", "2.3") == [("2.1-2.3", "valid")]
    assert ranges("2.1", "2.3") == [("2.1", "valid"), ("2.3", "valid")]
    assert ranges("2.9", "2.10") == [("2.9-2.10", "valid")]
    assert ranges("2.1", "2.3", other=("2.2",)) == [("2.1", "valid"), ("2.2", "not-tested"), ("2.3", "valid")]


def test_a_range_names_the_cuda_that_is_proven() -> None:
    entries = [
        entry("2.2", "11.8", judged=((judged(),),)),
        entry("2.2", "12.1"),
        entry("2.3", "12.1", judged=((judged(),),)),
    ]
    made = make_ranges(make_combos(entries, (), [AMPERE]))
    assert [(found.versions, found.cuda) for found in made] == [("2.2-2.3", ("11.8", "12.1"))]


@pytest.mark.parametrize(
    ("framework", "lower", "upper", "near"),
    [
        ("pytorch", "2.3", "2.4", True),
        ("pytorch", "2.3", "2.5", False),
        ("pytorch", "2.3", "2.3.1", True),
        ("tensorflow", "2.15", "2.16", True),
        ("unheard-of", "1.2", "1.3", True),
        ("unheard-of", "1.2", "1.4", False),
        ("unheard-of", "1.9", "2.0", False),
    ],
)
def test_neighbours(framework: str, lower: str, upper: str, near: bool) -> None:
    assert neighbours(framework, lower, upper) is near
