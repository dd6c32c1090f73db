"""Nonces are issued and spent once: unknown, replayed, expired and others' are refused, by its word."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.errors import StoreError
from imagefactory.verify.model import Subject
from imagefactory.verify.nonces import KEPT, LIFETIME, Ledger, NonceError, Run, format_nonce

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NONCE = format_nonce(bytes(range(16)))
RESULT = f"sha256:{'d' * 64}"
SUBJECT = Subject(
    target="pytorch-2.3-cu121",
    index=f"sha256:{'a' * 64}",
    manifest=f"sha256:{'b' * 64}",
    config=f"sha256:{'c' * 64}",
)
RUN = Run(subject=SUBJECT, suite=f"sha256:{'e' * 64}", level="quick", kit=f"sha256:{'f' * 64}")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "nonces")
    made.issue(NONCE, RUN, NOW)
    return made


def refused(ledger: Ledger, run: Run = RUN, *, nonce: str = NONCE, now: datetime = NOW) -> str:
    with pytest.raises(NonceError) as raised:
        ledger.spend(nonce, run, result=RESULT, now=now)
    return raised.value.word


def test_a_nonce_is_spent_once(ledger: Ledger) -> None:
    later = NOW + timedelta(days=13)
    spent = ledger.spend(NONCE, RUN, result=RESULT, now=later)
    assert (spent.spent, spent.result, spent.issued) == (later, RESULT, NOW)
    assert refused(ledger, now=later) == "replayed"
    assert ledger.look(NONCE) == spent


def test_what_was_signed_waits_until_it_has_arrived(ledger: Ledger) -> None:
    assert ledger.unsettled(NONCE) == b""
    ledger.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"a verdict")
    assert Ledger(ledger.folder).unsettled(NONCE) == b"a verdict"
    ledger.settle(NONCE)
    assert ledger.unsettled(NONCE) == b""
    assert refused(ledger) == "replayed"


def test_what_a_loser_signed_is_never_taken_up(ledger: Ledger) -> None:
    ledger.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"the winner's")
    other = f"sha256:{'9' * 64}"
    (ledger.folder / "spent" / f"{NONCE}-{other[7:]}.signed").write_bytes(b"the loser's")
    assert ledger.unsettled(NONCE) == b"the winner's"


def test_one_of_many_at_once_spends_it(ledger: Ledger) -> None:
    def spend(_: int) -> str:
        try:
            Ledger(ledger.folder).spend(NONCE, RUN, result=RESULT, now=NOW)
        except NonceError as error:
            return error.word
        return "spent"

    with ThreadPoolExecutor(12) as pool:
        words = list(pool.map(spend, range(24)))
    assert sorted(words) == ["replayed"] * 23 + ["spent"]


def test_a_spent_nonce_stays_spent_when_its_file_is_put_back(ledger: Ledger) -> None:
    path = ledger.folder / f"{NONCE}.json"
    before = path.read_bytes()
    ledger.spend(NONCE, RUN, result=RESULT, now=NOW)
    path.write_bytes(before)
    assert refused(ledger) == "replayed"
    with pytest.raises(StoreError, match="issued before"):
        ledger.issue(NONCE, RUN, NOW)


def test_a_nonce_expires(ledger: Ledger) -> None:
    assert refused(ledger, now=NOW + LIFETIME) == "expired"


@pytest.mark.parametrize("nonce", ["0" * 32, "", "../../etc/passwd", NONCE.upper(), NONCE + "\n"])
def test_a_nonce_of_somebody_else_is_unknown(ledger: Ledger, nonce: str) -> None:
    assert refused(ledger, nonce=nonce) == "unknown"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda run: replace(run, subject=replace(run.subject, index=RESULT)), "other-subject"),
        (lambda run: replace(run, subject=replace(run.subject, manifest=RESULT)), "other-subject"),
        (lambda run: replace(run, subject=replace(run.subject, config=RESULT)), "other-subject"),
        (lambda run: replace(run, suite=RESULT), "other-suite"),
        (lambda run: replace(run, level="full"), "other-suite"),
        (lambda run: replace(run, kit=RESULT), "edited"),
    ],
)
def test_a_nonce_is_for_one_image_suite_and_kit(
    ledger: Ledger, change: Callable[[Run], Run], word: str
) -> None:
    assert refused(ledger, change(RUN)) == word
    ledger.spend(NONCE, RUN, result=RESULT, now=NOW)  # and a refusal spends nothing


@pytest.mark.parametrize("change", [{"format": 2}, {"nonce": "0" * 32}, {"spent": "now"}, {"level": "all"}])
def test_a_damaged_entry_is_refused(ledger: Ledger, change: dict[str, object]) -> None:
    path = ledger.folder / f"{NONCE}.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(StoreError, match="damaged"):
        ledger.look(NONCE)
    path.write_bytes(b"{")
    with pytest.raises(StoreError, match="damaged"):
        ledger.look(NONCE)


def test_old_entries_are_forgotten_and_stay_refused(ledger: Ledger) -> None:
    ledger.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"never arrived")
    for name in (".nonce-killed", "mine.txt"):
        (ledger.folder / name).write_text("")
    much_later = datetime.now(UTC) + LIFETIME + KEPT + timedelta(days=1)
    ledger.issue("1" * 32, RUN, much_later)
    assert refused(ledger, now=much_later) == "unknown"
    left = {path.name for path in ledger.folder.rglob("*") if path.is_file()}
    assert left == {f"{'1' * 32}.json", "mine.txt"}


def test_a_ledger_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Ledger(tmp_path / "file" / "nonces").issue(NONCE, RUN, NOW)
