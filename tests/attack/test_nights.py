"""What strangers may leave on GitHub for the job that signs: runs of their own, and other nonce stores."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import ImagefactoryError
from imagefactory.verify.nonces import IssuedNonce, NonceStore, NonceSubject
from tests.made.kit import NONCE, SUBJECT
from tests.made.mutants import changed_bytes, changed_text

NOW = datetime(2026, 11, 22, tzinfo=UTC)
KEY, CI_RUN = "k" * 32, "lab/images/7/2"
RUN = NonceSubject(subject=SUBJECT, suite=f"sha256:{'e' * 64}", level="quick", kit=f"sha256:{'f' * 64}")
OURS = {"id": 1, "full_name": "lab/images"}
# What strangers can choose in a run of their own, each value beside the true one.
FIELDS: dict[str, list[Any]] = {
    "event": [
        "schedule",
        "workflow_dispatch",
        "pull_request",
        "pull_request_target",
        "push",
        "workflow_run",
        "",
    ],
    "path": [
        ".github/workflows/nightly.yml",
        ".github/workflows/nightly.yml@main",
        ".github/workflows/nightly.yml@refs/tags/main",
        ".github/workflows/nightly.yml@refs/pull/7/merge",
        ".github/workflows/Nightly.yml",
        ".github/workflows/promote.yml",
        "nightly.yml",
    ],
    "head_branch": ["main", "Main", "refs/heads/main", "", None],
    "repository": [OURS, {"id": 2, "full_name": "lab/images"}],
    "head_repository": [OURS, {"id": 2, "full_name": "mallory/images"}, {"id": 1, "full_name": "x/y"}, None],
    "head_sha": ["a" * 40, "b" * 40, "", "HEAD"],
    "run_number": [1, 2, 3, 10**9],
}


@pytest.fixture(scope="module")
def program() -> Any:
    path = Path(__file__).parents[2] / ".github" / "night_run.py"
    spec = importlib.util.spec_from_file_location("night_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(st.lists(st.fixed_dictionaries({name: st.sampled_from(rows) for name, rows in FIELDS.items()})))
def test_the_run_that_is_chosen_is_the_newest_of_our_own(program: Any, runs: list[dict[str, Any]]) -> None:
    repository = {**OURS, "default_branch": "main"}
    chosen = program.choose_night(runs, repository, lambda commit: commit == "a" * 40)
    ours = [
        run["run_number"]
        for run in runs
        if run["event"] in FIELDS["event"][:2]
        and run["path"] in FIELDS["path"][:2]
        and (run["head_branch"], run["head_sha"]) == ("main", "a" * 40)
        and run["repository"] == run["head_repository"] == OURS
    ]
    assert (chosen["run_number"] if chosen else None) == max(ours, default=None)


def looked(nonces: NonceStore) -> tuple[IssuedNonce, bytes] | None:
    try:
        return nonces.look(NONCE), nonces.unsettled(NONCE)
    except ImagefactoryError:
        return None


@given(st.data())
def test_an_entry_that_was_changed_says_what_it_said_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """By whoever has no key, and with every other entry of that nonce store at hand."""
    nonces = NonceStore(tmp_path_factory.mktemp("nonces"), KEY, ci_run=CI_RUN)
    nonces.issue(NONCE, RUN, NOW)
    issued = nonces.folder / f"{NONCE}.json"
    texts = [issued.read_bytes()]
    if spent := data.draw(st.booleans()):
        nonces.spend(NONCE, RUN, result=SUBJECT.index, now=NOW + timedelta(hours=1), signed=b"a verdict")
        texts.append((nonces.folder / "spent" / issued.name).read_bytes())
    before = looked(nonces)
    assert before is not None
    path = nonces.folder / "spent" / issued.name if spent else issued
    whole = data.draw(st.sampled_from(texts))
    text = changed_text(whole.decode()).map(lambda text: text.encode("utf-8", "replace"))
    path.write_bytes(data.draw(st.just(whole) | changed_bytes(whole) | text))
    after = looked(nonces)
    assert after in (None, before, (before[0], b""))  # the rest of a verdict that was cut off counts as none


@given(st.sampled_from(["lab/images/7/1", "lab/images/8/2", "mallory/images/7/2", ""]) | st.text())
def test_a_nonce_store_of_another_run_says_nothing(
    tmp_path_factory: pytest.TempPathFactory, ci_run: str
) -> None:
    nonces = NonceStore(tmp_path_factory.mktemp("nonces"), KEY, ci_run=CI_RUN)
    nonces.issue(NONCE, RUN, NOW)
    there = looked(NonceStore(nonces.folder, KEY, ci_run=ci_run))
    assert (there is not None) == (ci_run == CI_RUN)
