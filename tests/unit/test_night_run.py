"""Which run promote.yml takes results of: never one that a fork, a branch or another workflow started."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / ".github" / "night_run.py"
Row = dict[str, Any]
REPOSITORY = {"id": 1, "full_name": "lab/images", "default_branch": "main"}
FORK = {"id": 2, "full_name": "mallory/images"}
TRUNK = "c" * 40
NIGHT = {
    "id": 700,
    "run_number": 70,
    "run_attempt": 1,
    "run_started_at": "2026-11-22T02:20:00Z",
    "updated_at": "2026-11-22T09:00:00Z",
    "event": "schedule",
    "status": "in_progress",
    "conclusion": None,
    "path": ".github/workflows/nightly.yml",
    "head_branch": "main",
    "head_sha": "a" * 40,
    "repository": {"id": 1, "full_name": "lab/images"},
    "head_repository": {"id": 1, "full_name": "lab/images"},
}
# As GitHub lists it for `nightly.yml` and the branch `main`: newer, and with artifacts that the fork made.
OF_A_FORK = {**NIGHT, "id": 900, "run_number": 90, "event": "pull_request", "head_repository": FORK}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("night_run", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"event": "workflow_dispatch"},
        {"run_attempt": 3},
        {"path": ".github/workflows/nightly.yml@main"},
        {"path": ".github/workflows/nightly.yml@refs/heads/main"},
        {"status": "completed", "conclusion": "failure"},
        {"status": "completed", "conclusion": "cancelled"},
    ],
)
def test_a_night_of_the_default_branch_is_trusted(program: ModuleType, change: Row) -> None:
    assert program.is_trusted(NIGHT | change, REPOSITORY, program.NIGHTLY)


@pytest.mark.parametrize(
    "change",
    [
        {"event": "pull_request", "head_repository": FORK},
        {"event": "pull_request"},
        {"event": "pull_request_target"},
        {"event": "push"},
        {"event": "workflow_run"},
        {"event": "issue_comment"},
        {"event": "repository_dispatch"},
        {"event": ""},
        {"head_repository": FORK},
        {"head_repository": {"id": 2, "full_name": "lab/images"}},
        {"head_repository": {"id": 1, "full_name": "mallory/images"}},
        {"head_repository": None},
        {"repository": FORK},
        {"path": ".github/workflows/evil.yml"},
        {"path": ".github/workflows/promote.yml"},
        {"path": ".github/workflows/sub/nightly.yml"},
        {"path": "mallory/images/.github/workflows/nightly.yml"},
        {"path": ".github/workflows/nightly.yml@refs/pull/7/merge"},
        {"path": ".github/workflows/nightly.yml@refs/tags/main"},
        {"path": ".github/workflows/nightly.yml.yml"},
        {"path": ""},
        {"head_branch": "topic"},
        {"head_branch": "refs/heads/main"},
        {"head_branch": None},
    ],
)
def test_any_other_run_is_not(program: ModuleType, change: Row) -> None:
    assert not program.is_trusted(NIGHT | change, REPOSITORY, program.NIGHTLY)
    assert program.choose_night([NIGHT | change], REPOSITORY, lambda _: True) is None


def test_a_workflow_that_took_the_name_is_another_file(program: ModuleType) -> None:
    renamed = NIGHT | {"id": 901, "run_number": 91, "name": "nightly", "path": ".github/workflows/x.yml"}
    assert program.choose_night([renamed, NIGHT], REPOSITORY, lambda _: True) == NIGHT


def test_a_newer_run_of_a_fork_hides_no_night(program: ModuleType) -> None:
    assert program.choose_night([OF_A_FORK, NIGHT], REPOSITORY, lambda _: True) == NIGHT


def test_a_commit_must_be_on_the_default_branch(program: ModuleType) -> None:
    """A tag may be called as the branch is, and history may have been rewritten."""
    elsewhere = NIGHT | {"id": 902, "run_number": 92, "head_sha": "b" * 40}
    chosen = program.choose_night([elsewhere, NIGHT], REPOSITORY, lambda commit: commit == "a" * 40)
    assert chosen == NIGHT
    assert program.choose_night([elsewhere], REPOSITORY, lambda commit: commit == "a" * 40) is None


def test_the_newest_night_counts_whatever_the_order(program: ModuleType) -> None:
    older = NIGHT | {"id": 1, "run_number": 9, "run_started_at": "2026-11-22T08:00:00Z"}  # run again
    for runs in ([older, NIGHT], [NIGHT, older]):
        assert program.choose_night(runs, REPOSITORY, lambda _: True) == NIGHT


def test_what_was_spent_last_counts(program: ModuleType) -> None:
    def artifact(run: int, hour: int, *, expired: bool = False) -> Row:
        created = f"2026-11-22T{hour:02}:00:00Z"
        return {"expired": expired, "created_at": created, "workflow_run": {"id": run}}

    assert program.choose_spent([]) == ""
    assert program.choose_spent([artifact(1, 7), artifact(2, 13), artifact(3, 9)]) == "2"
    assert program.choose_spent([artifact(1, 7), artifact(2, 13, expired=True)]) == "1"


# --- the whole program ---------------------------------------------------------------------------

GH = """\
#!{python}
import json, pathlib, sys
with open("{calls}", "a") as file:
    file.write(sys.argv[2] + "\\n")
answers = json.loads(pathlib.Path("{answers}").read_text())
path = sys.argv[2]
if path not in answers:
    sys.exit("gh: Not Found (HTTP 404)")
if answers[path] is None:
    sys.exit("gh: error connecting to api.github.com")
print(json.dumps(answers[path]))
"""
PREFIX = "repos/lab/images"
RUNS = PREFIX + "/actions/workflows/{}.yml/runs?event={}&branch=main&per_page=100"


def answers_of(nights: list[Row], promoters: list[Row] = [], artifacts: Row | None = None) -> Row:  # noqa: B006
    rows: Row = {
        PREFIX: REPOSITORY,
        f"{PREFIX}/git/ref/heads/main": {"object": {"sha": TRUNK}},
        f"{PREFIX}/compare/{'a' * 40}...{TRUNK}?per_page=1": {"merge_base_commit": {"sha": "a" * 40}},
        f"{PREFIX}/compare/{'b' * 40}...{TRUNK}?per_page=1": {"merge_base_commit": {"sha": "a" * 40}},
    }
    for name, runs in (("nightly", nights), ("promote", promoters)):
        for event in ("schedule", "workflow_dispatch"):
            mine = [run for run in runs if run["event"] == event]
            rows[RUNS.format(name, event)] = {"workflow_runs": mine}
    for (run, name), found in (artifacts or {}).items():
        rows[f"{PREFIX}/actions/runs/{run}/artifacts?name={name}&per_page=100"] = {"artifacts": found}
    return rows


def run_program(tmp_path: Path, answers: Row) -> subprocess.CompletedProcess[str]:
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    gh = tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    calls, known = tmp_path / "calls", tmp_path / "answers.json"
    gh.write_text(GH.format(python=sys.executable, calls=calls, answers=known))
    gh.chmod(0o755)
    environ = {"PATH": f"{gh.parent}:{os.environ['PATH']}", "GITHUB_REPOSITORY": "lab/images"}
    return subprocess.run([sys.executable, PROGRAM], env=environ, capture_output=True, text=True, check=False)


def test_a_run_of_a_fork_is_never_even_listed(tmp_path: Path) -> None:
    """A thousand pull requests push no night off the page."""
    done = run_program(tmp_path, answers_of([NIGHT, OF_A_FORK]))
    assert (done.returncode, done.stdout) == (0, "run=700\nattempt=1\nspent=\n"), done.stderr
    asked = (tmp_path / "calls").read_text().splitlines()
    assert all("event=" in path for path in asked if "/runs?" in path)


def test_where_there_is_no_night_nothing_is_taken(tmp_path: Path) -> None:
    done = run_program(tmp_path, answers_of([]))
    assert (done.returncode, done.stdout) == (0, "run=\nattempt=\nspent=\n"), done.stderr


@pytest.mark.parametrize("commit", ["b" * 40, "d" * 40])
def test_a_commit_elsewhere_or_unknown_is_passed_over(tmp_path: Path, commit: str) -> None:
    newer = NIGHT | {"id": 701, "run_number": 71, "event": "workflow_dispatch", "head_sha": commit}
    done = run_program(tmp_path, answers_of([NIGHT, newer]))
    assert done.stdout.startswith("run=700\n"), done.stderr


@pytest.mark.parametrize("path", [PREFIX, RUNS.format("nightly", "schedule")])
def test_a_github_that_does_not_answer_is_an_error(tmp_path: Path, path: str) -> None:
    done = run_program(tmp_path, answers_of([NIGHT]) | {path: None})
    assert done.returncode != 0
    assert done.stdout == ""


def test_what_is_spent_comes_from_a_promoter_of_the_same_attempt(tmp_path: Path) -> None:
    again = NIGHT | {"run_attempt": 2}
    path, fork = ".github/workflows/promote.yml", {"head_repository": FORK}
    promoters = [
        NIGHT | {"id": 800, "path": path, "updated_at": "2026-11-21T19:00:00Z"},  # before the night
        NIGHT | {"id": 801, "path": path},
        NIGHT | {"id": 802, "path": path},
        NIGHT | {"id": 803, "path": path} | fork,
        NIGHT | {"id": 804, "path": path, "head_sha": "b" * 40},
        NIGHT | {"id": 805, "path": ".github/workflows/nightly.yml"},
        NIGHT | {"id": 806, "path": path},
    ]
    name = "spent-700-2"
    artifacts = {
        (run["id"], name): [
            {
                "name": name,
                "expired": False,
                "created_at": f"2026-11-22T{run['id'] - 792:02}:00:00Z",
                "workflow_run": {"id": run["id"]},
            }
        ]
        for run in promoters
    } | {(806, name): []}
    done = run_program(tmp_path, answers_of([again], promoters, artifacts))
    assert done.stdout == "run=700\nattempt=2\nspent=802\n", done.stderr
