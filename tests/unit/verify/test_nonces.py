"""Nonces are issued and spent once: unknown, replayed, expired and others' are refused, by its word."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.verify.nonces import (
    LIFETIME,
    RETENTION,
    NonceError,
    NonceStore,
    NonceSubject,
    NonceUse,
    ci_run_of,
    format_nonce,
)
from imagefactory.verify.report import VerifiedImage
from tests.made.errors import fails

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NONCE = format_nonce(bytes(range(16)))
RESULT = f"sha256:{'d' * 64}"
SUBJECT = VerifiedImage(
    target="pytorch-2.3-cu121",
    index=f"sha256:{'a' * 64}",
    manifest=f"sha256:{'b' * 64}",
    config=f"sha256:{'c' * 64}",
)
RUN = NonceSubject(subject=SUBJECT, suite=f"sha256:{'e' * 64}", level="quick", kit=f"sha256:{'f' * 64}")


@pytest.fixture
def nonces(tmp_path: Path) -> NonceStore:
    made = NonceStore(tmp_path / "nonces")
    made.issue(NONCE, RUN, NOW)
    return made


def refused(nonces: NonceStore, run: NonceSubject = RUN, *, nonce: str = NONCE, now: datetime = NOW) -> str:
    with pytest.raises(NonceError) as raised:
        nonces.spend(nonce, run, result=RESULT, now=now)
    return raised.value.code


def test_a_nonce_is_spent_once(nonces: NonceStore) -> None:
    later = NOW + timedelta(days=13)
    spent = nonces.spend(NONCE, RUN, result=RESULT, now=later)
    assert (spent.spent, spent.result, spent.issued) == (later, RESULT, NOW)
    assert refused(nonces, now=later) == "nonce-replayed"
    assert nonces.look(NONCE) == spent


def test_what_was_signed_waits_until_it_has_arrived(nonces: NonceStore) -> None:
    assert nonces.unsettled(NONCE) == b""
    nonces.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"a verdict")
    assert NonceStore(nonces.folder).unsettled(NONCE) == b"a verdict"
    nonces.settle(NONCE)
    assert nonces.unsettled(NONCE) == b""
    assert refused(nonces) == "nonce-replayed"


def test_what_a_loser_signed_is_never_taken_up(nonces: NonceStore) -> None:
    nonces.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"the winner's")
    with fails("nonce-replayed"):
        nonces.spend(NONCE, RUN, result=f"sha256:{'9' * 64}", now=NOW, signed=b"the loser's")
    assert nonces.unsettled(NONCE) == b"the winner's"
    assert nonces.look(NONCE).result == RESULT


@pytest.mark.parametrize("signed", [b"\n}\n", b"{\n}\n\n}\n", bytes(range(256))])
def test_whatever_was_signed_ends_no_entry(nonces: NonceStore, signed: bytes) -> None:
    spent = nonces.spend(NONCE, RUN, result=RESULT, now=NOW, signed=signed)
    assert nonces.unsettled(NONCE) == signed
    nonces.settle(NONCE)
    assert (nonces.look(NONCE), nonces.unsettled(NONCE)) == (spent, b"")


def test_what_is_left_of_something_signed_counts_as_nothing(nonces: NonceStore) -> None:
    """Another process cuts it off while this one reads, or a disk lost its end."""
    spent = nonces.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"a verdict")
    path = nonces.folder / "spent" / f"{NONCE}.json"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: -len(b"a verdict")], whole[:-1] + b"\0", whole + b"more"):
        path.write_bytes(damaged)
        assert (nonces.look(NONCE), nonces.unsettled(NONCE)) == (spent, b"")
    path.write_bytes(whole)
    assert nonces.unsettled(NONCE) == b"a verdict"


def spendings(*nonces: str) -> list[NonceUse]:
    return [NonceUse(nonce=one, run=RUN, result=RESULT, signed=one.encode()) for one in nonces]


def test_many_are_spent_at_once_and_one_that_cannot_be_stops_nobody(nonces: NonceStore) -> None:
    first, second, unknown = "1" * 32, "2" * 32, "3" * 32
    nonces.issue_all({first: RUN, second: RUN}, NOW)
    nonces.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"earlier")
    refusals = nonces.spend_all(spendings(first, NONCE, unknown, second), NOW)
    assert {nonce: error.code for nonce, error in refusals.items()} == {
        NONCE: "nonce-replayed",
        unknown: "nonce-unknown",
    }
    assert [nonces.unsettled(one) for one in (first, NONCE, second)] == [
        first.encode(),
        b"earlier",
        second.encode(),
    ]
    again = nonces.spend_all(spendings(first, second), NOW)
    assert {error.code for error in again.values()} == {"nonce-replayed"}
    nonces.settle_all({first, NONCE})
    assert [nonces.unsettled(one) for one in (first, NONCE, second)] == [b"", b"", second.encode()]
    assert {one.name for one in nonces.folder.iterdir()} == {"spent", f"{second}.json"}
    assert refused(nonces, nonce=first) == refused(nonces, nonce=second) == "nonce-replayed"


def test_a_kill_while_many_are_spent_leaves_each_spent_or_not(
    nonces: NonceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = [str(number) * 32 for number in range(1, 5)]
    nonces.issue_all(dict.fromkeys(issued, RUN), NOW)
    link, calls = os.link, iter((True, True, False))

    def kill(source: Path, target: Path) -> None:
        if not next(calls):
            raise KeyboardInterrupt
        link(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", kill)
        with pytest.raises(KeyboardInterrupt):
            nonces.spend_all(spendings(*issued), NOW)
    left = NonceStore(nonces.folder)
    assert [left.unsettled(one) for one in issued] == [issued[0].encode(), issued[1].encode(), b"", b""]
    refusals = left.spend_all(spendings(*issued), NOW)
    assert {nonce: error.code for nonce, error in refusals.items()} == dict.fromkeys(
        issued[:2], "nonce-replayed"
    )
    assert [left.unsettled(one) for one in issued] == [one.encode() for one in issued]


def test_only_what_is_spent_is_settled(nonces: NonceStore, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("mine\n}\nmine")
    nonces.settle_all({NONCE, "0" * 32, "../../mine", ""})
    assert (tmp_path / "mine.json").read_text() == "mine\n}\nmine"
    assert nonces.look(NONCE).spent is None
    nonces.spend(NONCE, RUN, result=RESULT, now=NOW)


def test_one_of_many_at_once_spends_it(nonces: NonceStore) -> None:
    def spend(_: int) -> str:
        try:
            NonceStore(nonces.folder).spend(NONCE, RUN, result=RESULT, now=NOW)
        except NonceError as error:
            return error.code
        return "spent"

    with ThreadPoolExecutor(12) as pool:
        words = list(pool.map(spend, range(24)))
    assert sorted(words) == ["nonce-replayed"] * 23 + ["spent"]


def test_a_spent_nonce_stays_spent_when_its_file_is_put_back(nonces: NonceStore) -> None:
    path = nonces.folder / f"{NONCE}.json"
    before = path.read_bytes()
    nonces.spend(NONCE, RUN, result=RESULT, now=NOW)
    path.write_bytes(before)
    assert refused(nonces) == "nonce-replayed"
    with fails("nonce-exists"):
        nonces.issue(NONCE, RUN, NOW)


def test_a_nonce_expires(nonces: NonceStore) -> None:
    assert refused(nonces, now=NOW + LIFETIME) == "nonce-expired"


@pytest.mark.parametrize("nonce", ["0" * 32, "", "../../etc/passwd", NONCE.upper(), NONCE + "\n"])
def test_a_nonce_of_somebody_else_is_unknown(nonces: NonceStore, nonce: str) -> None:
    assert refused(nonces, nonce=nonce) == "nonce-unknown"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda run: replace(run, subject=replace(run.subject, index=RESULT)), "nonce-other-subject"),
        (lambda run: replace(run, subject=replace(run.subject, manifest=RESULT)), "nonce-other-subject"),
        (lambda run: replace(run, subject=replace(run.subject, config=RESULT)), "nonce-other-subject"),
        (lambda run: replace(run, suite=RESULT), "nonce-other-suite"),
        (lambda run: replace(run, level="full"), "nonce-other-suite"),
        (lambda run: replace(run, pool="htcondor"), "nonce-other-pool"),
        (lambda run: replace(run, kit=RESULT), "kit-edited"),
    ],
)
def test_a_nonce_is_for_one_image_suite_and_kit(
    nonces: NonceStore, change: Callable[[NonceSubject], NonceSubject], code: str
) -> None:
    assert refused(nonces, change(RUN)) == code
    nonces.spend(NONCE, RUN, result=RESULT, now=NOW)  # and a refusal spends nothing


@pytest.mark.parametrize("change", [{"format": 2}, {"nonce": "0" * 32}, {"spent": "now"}, {"level": "all"}])
def test_a_damaged_entry_is_refused(nonces: NonceStore, change: dict[str, object]) -> None:
    path = nonces.folder / f"{NONCE}.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with fails("nonce-store-corrupt") as caught:
        nonces.look(NONCE)
    assert NONCE in caught.value.message
    path.write_bytes(b"{")
    with fails("nonce-store-corrupt") as caught:
        nonces.look(NONCE)
    assert NONCE in caught.value.message


def test_old_entries_are_forgotten_and_stay_refused(nonces: NonceStore) -> None:
    nonces.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"never arrived")
    for name in (".nonce-killed", "mine.txt"):
        (nonces.folder / name).write_text("")
    much_later = datetime.now(UTC) + LIFETIME + RETENTION + timedelta(days=1)
    nonces.issue("1" * 32, RUN, much_later)
    assert refused(nonces, now=much_later) == "nonce-unknown"
    left = {path.name for path in nonces.folder.rglob("*") if path.is_file()}
    assert left == {f"{'1' * 32}.json", "mine.txt"}


def test_a_nonce_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with fails("cannot-write-file"):
        NonceStore(tmp_path / "file" / "nonces").issue(NONCE, RUN, NOW)


KEY = "what a GPU job does not see"
CI_RUN = "lab/images/7/1"


@pytest.fixture
def keyed(tmp_path: Path) -> NonceStore:
    made = NonceStore(tmp_path / "keyed", KEY, ci_run=CI_RUN)
    made.issue(NONCE, RUN, NOW)
    return made


def test_a_nonce_store_with_a_key_is_spent_by_who_has_it(keyed: NonceStore) -> None:
    again = NonceStore(keyed.folder, KEY, ci_run=CI_RUN)
    again.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"a verdict")
    assert (again.look(NONCE).result, again.unsettled(NONCE)) == (RESULT, b"a verdict")
    again.settle(NONCE)
    assert again.look(NONCE).spent == NOW


@pytest.mark.parametrize(
    "change", ["subject", "level", "kit", "pool", "expires", "ci_run", "mac", "no mac", "other key"]
)
def test_what_somebody_else_wrote_into_a_nonce_store_is_refused(keyed: NonceStore, change: str) -> None:
    path = keyed.folder / f"{NONCE}.json"
    value = json.loads(path.read_text())
    if change == "subject":
        value["subject"]["index"] = f"sha256:{'9' * 64}"
    elif change == "no mac":
        del value["mac"]
    elif change == "other key":
        path.unlink()
        NonceStore(keyed.folder, "another key", ci_run=CI_RUN).issue(NONCE, RUN, NOW)
        value = json.loads(path.read_text())
    else:
        value[change] = {"level": "full", "expires": "2100-01-01T00:00:00+00:00", "ci_run": CI_RUN[:-1]}.get(
            change, "0" * 64
        )
    path.write_text(json.dumps(value, indent=1) + "\n")
    with fails("nonce-key-mismatch") as caught:
        keyed.look(NONCE)
    assert NONCE in caught.value.message


def test_a_key_that_is_forgotten_is_told(keyed: NonceStore) -> None:
    with fails("nonce-key-missing") as raised:
        NonceStore(keyed.folder).look(NONCE)
    assert "IMAGEFACTORY_NONCE_KEY" in (raised.value.hint or "")


@pytest.mark.parametrize(
    "ci_run", ["", "lab/images/7/2", "lab/images/8/1", "lab/images/7", "lab/images/71", "fork/images/7/1"]
)
@pytest.mark.parametrize("key", [KEY, ""])
def test_a_nonce_store_counts_in_the_attempt_of_the_run_that_issued_it(
    tmp_path: Path, ci_run: str, key: str
) -> None:
    mine = NonceStore(tmp_path / "mine", key, ci_run=CI_RUN)
    mine.issue(NONCE, RUN, NOW)
    other = NonceStore(mine.folder, key, ci_run=ci_run)
    assert refused(other) == "nonce-other-run"
    mine.spend(NONCE, RUN, result=RESULT, now=NOW, signed=b"a verdict")
    for look in (other.look, other.unsettled):
        with fails("nonce-other-run"):
            look(NONCE)


def test_an_entry_that_spends_is_no_entry_that_issues(keyed: NonceStore, tmp_path: Path) -> None:
    """Both are signed with the key, and everybody can read both."""
    issued = (keyed.folder / f"{NONCE}.json").read_bytes()
    keyed.spend(NONCE, RUN, result=RESULT, now=NOW)
    spent = (keyed.folder / "spent" / f"{NONCE}.json").read_bytes()
    again = NonceStore(tmp_path / "again", KEY, ci_run=CI_RUN)
    (again.folder / "spent").mkdir(parents=True)
    for path, data in ((f"{NONCE}.json", spent), (f"spent/{NONCE}.json", issued)):
        (again.folder / path).write_bytes(data)
        with fails("nonce-store-corrupt") as caught:
            again.look(NONCE)
        assert NONCE in caught.value.message


def test_a_run_of_github_has_a_repository_a_number_and_an_attempt() -> None:
    environ = {"GITHUB_REPOSITORY": "lab/images", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1"}
    assert ci_run_of(environ) == ""
    assert ci_run_of({**environ, "GITHUB_ACTIONS": "true"}) == CI_RUN
    for name in environ:
        for value in ({}, {name: ""}):
            rest = {key: text for key, text in environ.items() if key != name}
            with fails("ci-variable-missing") as caught:
                ci_run_of({**rest, **value, "GITHUB_ACTIONS": "true"})
            assert name in caught.value.message


def test_a_pipeline_of_gitlab_has_a_project_and_a_number() -> None:
    environ = {"CI_PROJECT_URL": "https://gitlab.example.org/lab/images", "CI_PIPELINE_ID": "7"}
    assert ci_run_of(environ) == ""
    assert ci_run_of({**environ, "GITLAB_CI": "true"}) == "https://gitlab.example.org/lab/images/7"
    for name in environ:
        with fails("ci-variable-missing") as caught:
            ci_run_of({**environ, name: "", "GITLAB_CI": "true"})
        assert name in caught.value.message
