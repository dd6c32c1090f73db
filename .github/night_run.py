"""Print which run of nightly.yml promote.yml may sign results of, as lines for $GITHUB_OUTPUT.

    run=       the id of the newest trusted run, empty if there is none
    attempt=   its latest attempt
    spent=     the run of promote.yml that last kept which nonces of that attempt are spent, or empty

Everybody can start a run in this repository: a fork's pull request brings its own nightly.yml, branch `main`
and artifacts. A run is trusted if it ran nightly.yml as the default branch of this repository has it, and no
stranger can cause its event: see `is_trusted` and `is_ancestor`. Its conclusion does not matter: results are
taken as they arrive, a run waits a day for its GPUs, and it fails if one of them says no.

Needs GITHUB_REPOSITORY, and `gh` with GH_TOKEN (actions: read, contents: read).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote

EVENTS = ("schedule", "workflow_dispatch")
"""The events that no stranger can cause."""
NIGHTLY, PROMOTE = ".github/workflows/nightly.yml", ".github/workflows/promote.yml"
PAGE = 100
Row = dict[str, Any]


def is_trusted(run: Row, repository: Row, workflow: str) -> bool:
    """Return whether `run` is one of the file `workflow` on the default branch of `repository` itself.

    Both are rows of GitHub's REST API. A tag may have the name of the default branch: ask `is_ancestor` too.
    """
    path, _, ref = str(run["path"]).partition(
        "@"
    )  # GitHub documents the path with a ref, and mostly sends none
    branch = repository["default_branch"]
    return (
        run["event"] in EVENTS
        and path == workflow
        and ref in ("", branch, f"refs/heads/{branch}")
        and run["head_branch"] == branch
        and all(_same(run[name], repository) for name in ("repository", "head_repository"))
    )


def _same(one: Row | None, repository: Row) -> bool:
    """A fork that was deleted is None."""
    return one is not None and one["id"] == repository["id"] and one["full_name"] == repository["full_name"]


def choose_night(runs: Iterable[Row], repository: Row, is_ancestor: Callable[[str], bool]) -> Row | None:
    """Return the newest trusted run of nightly.yml, None if there is none.

    `is_ancestor` tells whether the default branch contains a commit.
    """
    trusted = (run for run in runs if is_trusted(run, repository, NIGHTLY))
    newest_first = sorted(trusted, key=lambda run: int(run["run_number"]), reverse=True)
    return next((run for run in newest_first if is_ancestor(run["head_sha"])), None)


def choose_spent(artifacts: Iterable[Row]) -> str:
    """Return the id of the run that wrote the newest of `artifacts`, "" if there is none that can be read."""
    there = [row for row in artifacts if not row["expired"]]
    return str(max(there, key=lambda row: row["created_at"])["workflow_run"]["id"]) if there else ""


class GitHub:
    """What GitHub says of `name` (owner/name)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.repository = _get(f"repos/{name}")
        branch = quote(self.repository["default_branch"])
        # By its full name: a tag may have the same short one.
        self.trunk = _get(f"repos/{name}/git/ref/heads/{branch}")["object"]["sha"]

    def runs(self, workflow: str) -> Iterator[Row]:
        """The newest runs of a workflow's file. By event, so that pull requests push none off the page."""
        file, branch = workflow.rpartition("/")[2], quote(self.repository["default_branch"], safe="")
        for event in EVENTS:
            query = f"event={event}&branch={branch}&per_page={PAGE}"
            yield from _get(f"repos/{self.name}/actions/workflows/{file}/runs?{query}")["workflow_runs"]

    def is_ancestor(self, commit: str) -> bool:
        """Whether the default branch contains `commit`."""
        try:
            compared = _get(f"repos/{self.name}/compare/{commit}...{self.trunk}?per_page=1")
        except FileNotFoundError:
            return False
        return bool(compared["merge_base_commit"]["sha"] == commit)

    def spent(self, night: Row) -> Iterator[Row]:
        """The artifacts in which promote.yml kept what is spent of an attempt of a night, by trusted runs."""
        name = f"spent-{night['id']}-{night['run_attempt']}"
        for run in self.runs(PROMOTE):
            since = run["updated_at"] >= night["run_started_at"]
            if since and is_trusted(run, self.repository, PROMOTE) and self.is_ancestor(run["head_sha"]):
                page = _get(
                    f"repos/{self.name}/actions/runs/{run['id']}/artifacts?name={name}&per_page={PAGE}"
                )
                yield from (row for row in page["artifacts"] if row["name"] == name)


def _get(path: str) -> Row:
    """Raises FileNotFoundError for what does not exist, SystemExit if GitHub does not answer."""
    done = subprocess.run(["gh", "api", path], capture_output=True, text=True, check=False)
    if done.returncode and "HTTP 404" in done.stderr:
        raise FileNotFoundError(path)
    if done.returncode:
        sys.exit(f"gh api {path}: {done.stderr.strip()}")
    row: Row = json.loads(done.stdout)
    return row


def main() -> None:
    github = GitHub(os.environ["GITHUB_REPOSITORY"])
    night = choose_night(github.runs(NIGHTLY), github.repository, github.is_ancestor)
    spent = choose_spent(github.spent(night)) if night else ""
    print(f"run={night['id'] if night else ''}")
    print(f"attempt={night['run_attempt'] if night else ''}")
    print(f"spent={spent}")


if __name__ == "__main__":
    main()
