"""Secrets that stand in a submit file or a batch script, where everybody who sees it can read them. Pure.

By the names that programs give their keys, and by the forms of those that have one. What is read from
elsewhere when the job runs (`$(cat ...)`, `$HOME/...`) is none. Nothing of a value is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from imagefactory.extras.lint.findings import Checked
from imagefactory.submit.check.findings import SubmitFinding, wrong

_NAMED = re.compile(
    r"""\b([A-Za-z][A-Za-z0-9_]*(?:API_?KEY|ACCESS_?KEY|SECRET|TOKEN|PASSWORD|PASSWD)(?:_[A-Za-z0-9_]*)?)
        \s*=\s*["']*(?P<value>[^\s"';,$`(<]{8,})""",
    re.IGNORECASE | re.VERBOSE,
)
_FORMS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})"),
    "an AWS key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "an OpenAI key": re.compile(r"\bsk-(?:proj-)?[A-Za-z0-9_-]{32,}"),
    "a Weights & Biases key": re.compile(r"\bwandb\s+login\s+(?:-\S+\s+)*[0-9a-f]{40}\b"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
_PLACE = re.compile(r"[~./]")
HINT = "create a new one, keep it in a file that only you can read, and read it in the program"


def secret_findings(text: str) -> Iterator[SubmitFinding]:
    """One for each line that holds a secret."""
    for number, line in enumerate(text.splitlines(), start=1):
        named = [(one[1], one) for one in _NAMED.finditer(line) if not _PLACE.match(one["value"])]
        formed = [(name, one) for name, form in _FORMS.items() if (one := form.search(line))]
        for name, found in (named or formed)[:1]:
            told = f"{name} is visible to everyone who can read this file"
            yield wrong(number, "secret", told, HINT, column=found.start() + 1)


def with_secrets(checked: Checked, text: str) -> Checked:
    """What is said of a file, and what of its text nobody else should read."""
    return replace(checked, findings=(*checked.findings, *secret_findings(text)))
