"""What `nightly` and `promote` run, in order, against a real registry: every job in a folder of its own.

The project is not imagefactory's own repository: its workflows are those that `init --github` writes, and
those that they call bring imagefactory beside the project's checkout.

What GitHub does between them is done here: expressions, matrices, artifacts, skipped steps. This machine has
no GPU, so the night must end with the word no-gpu and no tag moved.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagefactory.actions import new_project
from imagefactory.actions.new_project import ImagefactorySource
from imagefactory.actions.read_catalog import read_catalog
from imagefactory.oci.candidates import CANDIDATE, VERDICT_TYPE
from imagefactory.oci.graph import StoreRepository, read_manifest
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.settings.load import load_settings
from imagefactory.trust.attached import SignedStatement, attach, read_subject
from imagefactory.trust.catalog import ImageOffer
from imagefactory.trust.claims import verified_claims
from imagefactory.trust.keys import read_signing_key
from imagefactory.trust.offers import verify_offer
from imagefactory.trust.policy import read_trust
from imagefactory.trust.verdict import sign
from imagefactory.verify.kits import program_checksum
from imagefactory.verify.suite_files import suite_digest
from tests.made.verdicts import HOST, whole_report
from tests.services.factory import ROOT, Factory, copy_store

TARGET, FAMILY = "tiny-12.1-cu121", "tiny"
WORKFLOWS = ROOT / ".github" / "workflows"
CAME_WITH_THE_TESTS = ("git, which checkout needs", "set up")
GH = """\
#!/bin/sh
repository='{"id": 1, "full_name": "somebody/images", "default_branch": "main"}'
case "$*" in
  "api repos/somebody/images") echo "$repository" ;;
  "api repos/somebody/images/git/ref/heads/main") echo '{"object": {"sha": "abc"}}' ;;
  "api repos/somebody/images/compare/abc...abc?per_page=1") echo '{"merge_base_commit": {"sha": "abc"}}' ;;
  *"/nightly.yml/runs?event=schedule&branch=main"*)
    echo '{"workflow_runs": [{"id": 7, "run_attempt": 1, "run_number": 7, "event": "schedule",
      "path": ".github/workflows/nightly.yml", "head_branch": "main", "head_sha": "abc",
      "run_started_at": "2026-11-22T02:17:00Z",
      "repository": '"$repository"', "head_repository": '"$repository"'}]}' ;;
  *"/runs?event="*) echo '{"workflow_runs": []}' ;;
  *) echo "gh: Not Found (HTTP 404)" >&2; exit 1 ;;
esac
"""
"""What GitHub tells the jobs of this machine: the last run of the night is number 7."""
"""Steps that make a machine ready; whoever runs the tests did that."""
EXPRESSION = re.compile(r"\$\{\{ *(.*?) *\}\}")
Values = dict[str, Any]


@dataclass(kw_only=True)
class Night:
    """One run of the workflow: what `vars`, `secrets` and `github` hold, and what its jobs left.

    `gpu_machine` is the workspace of the runners of our own: nobody empties it, from night to night.
    """

    workflow: Values
    contexts: Values
    folder: Path
    root: Path
    tool: Path
    stores: Mapping[str, str]
    artifacts: Path
    later: frozenset[str]
    gpu_machine: Path
    said: dict[str, str] = field(default_factory=dict)
    count: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, name: str) -> dict[str, int]:
        """Every job of the matrix of `name`; exit codes of its jobs by what the matrix calls them."""
        job = self.workflow["jobs"][name]
        if not self.holds(job["if"], {}):
            return {}
        self.contexts["inputs"] = {key: self.value(text, {}) for key, text in job.get("with", {}).items()}
        matrix = job.get("strategy", {}).get("matrix")
        rows = json.loads(self.value(matrix, {}))["include"] if matrix else [{}]
        codes = {}
        for row in rows:
            title = self.value(job["name"], {"matrix": row})
            codes[title] = self._job(name, job, row)
        result = "success" if not any(codes.values()) else "failure"
        self.contexts["needs"].setdefault(name, {})["result"] = result
        return codes

    def _job(self, name: str, job: Values, row: Values) -> int:
        place = self.folder / f"{name}-{next(self.count)}"
        workspace, home, runner = place / "workspace", place / "home", place / "runner"
        if "self-hosted" in job["runs-on"]:
            workspace = self.gpu_machine
        for path in (workspace, home, runner):
            path.mkdir(parents=True, exist_ok=True)
        contexts: Values = {"matrix": row, "steps": {}, "runner": {"temp": str(runner)}}
        code = 0
        for step in job["steps"]:
            if step.get("name", "").startswith(CAME_WITH_THE_TESTS) or not self._due(step, contexts, code):
                continue
            if "uses" in step:
                self._use(step, workspace, {**contexts, "of": name})
                continue
            output = runner / "output"
            output.write_text("")
            (runner / "gh").write_text(GH)
            (runner / "gh").chmod(0o755)
            environ = {
                "PATH": f"{runner}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME": str(home),
                "RUNNER_TEMP": str(runner),
                "GITHUB_OUTPUT": str(output),
                "GITHUB_STEP_SUMMARY": str(runner / "summary"),
                "GITHUB_ACTIONS": "true",
                "GITHUB_REPOSITORY": "somebody/images",
                "GITHUB_RUN_ID": "8" if name in self.later else "7",
                "GITHUB_RUN_ATTEMPT": str(self.contexts["github"]["run_attempt"]),
                **{name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy")},
            }
            for table in (self.workflow.get("env", {}), job.get("env", {}), step.get("env", {})):
                environ |= {key: self.value(str(text), contexts) for key, text in table.items()}
            environ |= {**self.stores, "IMAGEFACTORY_STORE": self.stores.get(name, str(place / "store"))}
            environ = {key: text for key, text in environ.items() if key.isupper()}
            command = ["bash", "-e", "-c", step["run"]]
            done = subprocess.run(
                command, cwd=workspace, env=environ, capture_output=True, text=True, timeout=900
            )
            self.said[name] = f"{self.said.get(name, '')}{done.stdout}{done.stderr}"
            code = code or done.returncode
            if "id" in step:
                rows = (line.partition("=") for line in output.read_text().splitlines())
                outcome = "failure" if done.returncode else "success"
                contexts["steps"][step["id"]] = {
                    "outputs": {key: text for key, _, text in rows},
                    "outcome": outcome,
                }
        outputs = {key: self.value(text, contexts) for key, text in job.get("outputs", {}).items()}
        self.contexts["needs"][name] = {"outputs": outputs}
        return code

    def _due(self, step: Values, contexts: Values, code: int) -> bool:
        condition = str(step.get("if", ""))
        return (code == 0 or "cancelled()" in condition or "always()" in condition) and self.holds(
            condition, contexts
        )

    def _use(self, step: Values, workspace: Path, contexts: Values) -> None:
        action = step["uses"].partition("@")[0]
        given = {key: self.value(str(text), contexts) for key, text in step.get("with", {}).items()}
        if action == "actions/checkout":
            source = self.tool if given.get("repository") == "imagefactory/imagefactory" else self.root
            shutil.copytree(source, workspace / given.get("path", ""), dirs_exist_ok=True)
        elif action == "actions/upload-artifact":
            path = workspace / given["path"]
            files = [one for one in (path, *path.rglob("*")) if one.is_file()]
            assert files or given["if-no-files-found"] == "ignore", f"{given['path']}: nothing to upload"
            path = path.parent if path.is_file() else path
            into = self._artifacts(contexts["of"]) / given["name"]
            assert not into.exists(), f"the artifact {given['name']} is there already"
            for one in files:  # no hidden files, no empty folders, no rights
                target = into / one.relative_to(path)
                if not any(part.startswith(".") for part in one.relative_to(path).parts):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(one.read_bytes())
        elif action == "actions/download-artifact":
            wanted = given.get("pattern", given.get("name", ""))
            of_night = given.get("run-id") == "7"
            there = self.artifacts if of_night else self._artifacts(contexts["of"])
            found = sorted(there.glob(wanted))
            assert found or "pattern" in given, f"there is no artifact {wanted}"
            for one in found:
                into = workspace / given["path"]
                apart = "pattern" in given and given.get("merge-multiple") != "True"
                shutil.copytree(one, into / one.name if apart else into, dirs_exist_ok=True)
        else:
            raise AssertionError(f"this test knows no {action}")

    def _artifacts(self, job: str) -> Path:
        """Each workflow's run has its own."""
        return self.artifacts / "later" if job in self.later else self.artifacts

    # --- expressions ---

    def value(self, text: str, more: Values) -> str:
        return EXPRESSION.sub(lambda match: str(self._look_up(match[1], more)), text)

    def _look_up(self, expression: str, more: Values) -> Any:
        inner = re.fullmatch(r"fromJSON\((.*)\)", expression)
        found: Any = {**self.contexts, **more}
        for part in (inner[1] if inner else expression).split("."):
            assert part in found, f"{expression} is not known to this test"
            found = found[part]
        return found

    def holds(self, condition: str, more: Values) -> bool:
        text = EXPRESSION.sub(lambda match: match[1], condition)
        return all(self._term(term.strip(), more) for term in text.split("&&") if term.strip())

    def _term(self, term: str, more: Values) -> bool:
        if term in ("!cancelled()", "always()"):
            return True
        match = re.fullmatch(r"([\w.]+) (==|!=) '(.*)'", term)
        assert match, f"{term} is not known to this test"
        return (str(self._look_up(match[1], more)) == match[3]) is (match[2] == "==")


@pytest.fixture(scope="module")
def root(tiny_root: Path, small_store: Path, small_factory: Factory, scratch: Path, tool: Path) -> Path:
    """The tiny target's factory as a checkout has it, with a key that it trusts."""
    copy_store(small_store, scratch / "nightly-store")
    root = scratch / "nightly-root"
    shutil.copytree(tiny_root, root)
    (root / "tiny-folder").mkdir()  # what a shell would make of the variable TARGETS
    keys = Factory(
        store=small_factory.store,
        cache=small_factory.cache,
        root=root,
        extra={"XDG_CONFIG_HOME": str(scratch / "keys")},
    )
    keys.run("key", "create", "nightly")
    keys.run("key", "trust", "nightly")
    return root


@pytest.fixture(scope="module")
def tool(scratch: Path) -> Path:
    """imagefactory as the called workflows check it out and set it up."""
    tool = scratch / "nightly-tool"
    program = tool / ".venv" / "bin" / "imagefactory"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m imagefactory -C "$PWD" "$@"\n')
    program.chmod(0o755)
    (tool / ".github").mkdir()
    for name in ("login.sh", "mac.py", "night_run.py"):
        shutil.copy(ROOT / ".github" / name, tool / ".github")
    return tool


def project_jobs(name: str) -> Values:
    """The jobs of a file that `init --github` writes, and those of the workflows that it calls."""
    with pytest.MonkeyPatch.context() as patch:
        source = ImagefactorySource(url="https://github.com/imagefactory/imagefactory", commit="c" * 40)
        patch.setattr(new_project, "find_source", lambda package: source)
        text = new_project.nightly_files(["github"], Path("/"))[f".github/workflows/{name}"]
    jobs: Values = {}
    for title, job in yaml.safe_load(text)["jobs"].items():
        owner, _, path = job.get("uses", "").partition("/.github/workflows/")
        if not owner:
            jobs[title] = job
            continue
        assert owner == "imagefactory/imagefactory"
        called = yaml.safe_load((WORKFLOWS / path.partition("@")[0]).read_text())
        for inner, row in called["jobs"].items():
            own = {"if": job["if"], "with": job.get("with", {})} if inner == title else {}
            jobs[inner] = {**row, **own, "env": {**called["env"], **row.get("env", {})}}
    return jobs


@pytest.fixture(scope="module")
def place(registry: str) -> str:
    return f"{registry}/nightly"


def night(number: int, root: Path, place: str, scratch: Path, small_factory: Factory) -> Night:
    nightly, later = project_jobs("nightly.yml"), project_jobs("promote.yml")
    (key,) = (scratch / "keys").rglob("nightly.pem")
    return Night(
        workflow={"jobs": nightly | later},
        contexts={
            "vars": {
                "REGISTRY": place,
                "GPUS": '- {name: A100, driver: "535.54.03"}',
                "TARGETS": "tiny-* tiny-12.1-cu1*" if number % 2 else "",
                "PAGES": "",
            },
            "secrets": {"SIGNING_KEY": key.read_text(), "NONCE_KEY": "a long random text of 64 hex digits"},
            "github": {
                "actor": "somebody",
                "token": "no-token",
                "repository": "somebody/images",
                "run_attempt": 1,
                "run_id": "7",
                "server_url": "https://example.org",
                "event": {"repository": {"default_branch": "main"}},
            },
            "needs": {},
            "job": {"workflow_repository": "imagefactory/imagefactory", "workflow_sha": "c" * 40},
        },
        folder=scratch / f"night-{number}",
        root=root,
        tool=scratch / "nightly-tool",
        # Jobs start with empty stores. The one that builds finds the base there.
        stores={"IMAGEFACTORY_CACHE": str(small_factory.cache), "candidates": str(scratch / "nightly-store")},
        artifacts=scratch / f"artifacts-{number}",
        later=frozenset(later),
        gpu_machine=scratch / "gpu-machine",
    )


def test_a_night_without_a_gpu_builds_a_candidate_and_moves_no_tag(
    root: Path, place: str, scratch: Path, small_factory: Factory
) -> None:
    first = night(1, root, place, scratch, small_factory)
    assert first.run("plan") == {"plan": 0}, first.said
    (job,) = json.loads(first.contexts["needs"]["plan"]["outputs"]["targets"])["include"]
    kits = "8.0/sm80-a100-535.54.03"
    assert job == {"target": TARGET, "status": "build", "digest": "", "gpu": "nvidia", "kits": kits}

    assert first.run("candidates") == {f"candidate {TARGET}": 0}, first.said
    ends_with_no_gpu(first)

    registry, _, path = place.partition("/")
    tags = RegistryClient(registry).tags(f"{path}/{FAMILY}")
    assert [bool(CANDIDATE.fullmatch(tag)) for tag in tags if not tag.startswith("sha256-")] == [True]


def test_the_next_night_builds_nothing_and_verifies_the_candidate_that_is_there(
    root: Path, place: str, scratch: Path, small_factory: Factory
) -> None:
    registry, _, path = place.partition("/")
    (tag,) = (tag for tag in RegistryClient(registry).tags(f"{path}/{FAMILY}") if CANDIDATE.fullmatch(tag))
    there = RegistryClient(registry).manifest(f"{path}/{FAMILY}", tag)
    assert there is not None
    second = night(2, root, place, scratch, small_factory)
    second.stores = {"IMAGEFACTORY_CACHE": str(scratch / "night-2-cache")}
    assert second.run("plan") == {"plan": 0}, second.said
    (job,) = json.loads(second.contexts["needs"]["plan"]["outputs"]["targets"])["include"]
    assert (job["status"], job["digest"]) == ("verify", there[0].digest)
    assert second.run("candidates") == {f"candidate {TARGET}": 0}, second.said
    assert "assemble" not in second.said["candidates"]
    left = second.gpu_machine / "kits" / "sm80-a100-535.54.03" / "suite" / "of_another_night.py"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("")
    ends_with_no_gpu(second)


def test_a_nonce_store_of_another_attempt_or_of_a_gpu_job_is_signed_for_nothing(
    root: Path, place: str, scratch: Path, small_factory: Factory
) -> None:
    """Everybody can read the first, and its MACs are good. For the second the key is missing."""
    taken = night(5, root, place, scratch, small_factory)
    taken.stores = {"IMAGEFACTORY_CACHE": str(scratch / "night-5-cache")}
    taken.contexts["github"]["run_attempt"] = 2
    for name in ("plan", "candidates", "verify"):
        taken.run(name)
    for path in list(taken.artifacts.glob("*-2-*")):  # GitHub's last attempt is the first
        path.rename(path.with_name(path.name.replace("-2-", "-1-")))
    assert taken.run("promote") == {"promote": 9}, taken.said
    assert "this result is from" in taken.said["promote"]

    (entry,) = (taken.artifacts / f"nonces-1-{TARGET}").glob("*.json")
    text = entry.read_text()
    entry.write_text(text.replace(json.loads(text)["subject"]["index"], f"sha256:{'e' * 64}"))
    assert entry.read_text() != text
    shutil.rmtree(taken.artifacts / "later")
    assert set(taken.run("promote").values()) != {0}
    assert "was not written with the key in IMAGEFACTORY_NONCE_KEY" in taken.said["promote"]


def test_what_is_proven_costs_nothing(root: Path, place: str, scratch: Path, small_factory: Factory) -> None:
    """A verdict of a made-up GPU, signed by the key that this test's factory trusts, and no other does."""
    registry, _, path = place.partition("/")
    there = StoreRepository(store=RegistryClient(registry), repository=f"{path}/{FAMILY}")
    (tag,) = (tag for tag in there.store.tags(there.repository) if CANDIDATE.fullmatch(tag))
    subject = replace(read_subject(there, tag), target=TARGET)
    now = datetime.now(UTC)
    (path_of_key,) = (scratch / "keys").rglob("nightly.pem")
    hardware = replace(HOST, driver="535.54.03")
    report = whole_report(subject=subject, suite=suite_digest(), started=now, ended=now, hardware=hardware)
    signed = sign(report, read_signing_key(path_of_key), now=now, days=1)
    manifest = read_manifest(there, subject.manifest).descriptor
    attach(there, SignedStatement(kind=VERDICT_TYPE, subject=manifest, envelope=signed.envelope))

    third = night(3, root, place, scratch, small_factory)
    assert third.run("plan") == {"plan": 0}, third.said
    assert third.contexts["needs"]["plan"]["outputs"] == {
        "targets": '{"include":[]}',
        "matrix": '{"include":[]}',
        "program": program_checksum(),
    }
    assert "1 unchanged" in third.said["plan"]
    assert [third.run(name) for name in ("candidates", "verify", "promote")] == [{}, {}, {"promote": 0}]
    (offered,) = read_offers(root, place, scratch)
    assert [str(one) for one in verified_claims(offered.judged)] == ["8.0"], third.said


def read_offers(root: Path, place: str, scratch: Path) -> list[ImageOffer]:
    """The catalog of a night as a researcher reads it, who has no factory but its row of trust."""
    config = scratch / "researcher" / "imagefactory"
    config.mkdir(parents=True, exist_ok=True)
    trust = (root / "imagefactory.toml").read_text().partition("[[trust]]")[2]
    (config / "imagefactory.toml").write_text(f'catalog = "{place}"\n\n[[trust]]{trust}')
    environ = {
        "HOME": str(scratch / "researcher"),
        "XDG_CONFIG_HOME": str(config.parent),
        "XDG_CONFIG_DIRS": "/nowhere",
    }
    settings = load_settings(directory=None, start=config.parent, environ=environ)
    now = datetime.now(UTC)
    catalog = read_catalog(settings, environ, now)
    trusted = read_trust(settings.files)
    return [verify_offer(catalog, image, trusted, now) for image in catalog.images]


def ends_with_no_gpu(one: Night) -> None:
    assert one.run("verify") == {f"verify {TARGET} on sm80-a100-535.54.03": 9}, one.said
    assert "no-gpu" in one.said["verify"]
    assert one.run("promote") == {"promote": 9}, one.said
    assert "no-gpu" in one.said["promote"]
    assert "not verified" in one.said["promote"]  # the catalog says what is there, whatever the night was
    assert not re.search(r"\bverified\b.*sm80", one.said["promote"])
    assert one.run("night") == {"night": 0}, one.said
    issue = one.artifacts / "later" / "issue" / "issue.md"
    assert issue.read_text().strip() == ""  # nothing is broken: it waits for a GPU


def test_where_nothing_is_set_up_nothing_runs(
    root: Path, place: str, scratch: Path, small_factory: Factory
) -> None:
    fork = night(4, root, place, scratch, small_factory)
    fork.contexts["vars"] = {"REGISTRY": "", "GPUS": "", "TARGETS": ""}
    assert [fork.run(name) for name in ("plan", "promote")] == [{}, {}]


def test_the_steps_that_are_left_out_are_those_of_ci() -> None:
    """What is not run here has to be what makes CI's own machine ready."""
    ci = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())
    nights = [project_jobs(name) for name in ("nightly.yml", "promote.yml")]
    known = {step.get("name"): step.get("run") for step in ci["jobs"]["test"]["steps"]}
    for job in (job for jobs in nights for job in jobs.values()):
        for step in job["steps"]:
            if step.get("name", "").startswith(CAME_WITH_THE_TESTS[0]):
                assert step["run"].startswith(known[CAME_WITH_THE_TESTS[0]])
            if step.get("name") == CAME_WITH_THE_TESTS[1]:
                assert step["run"] == "bash .imagefactory/setup.sh"
