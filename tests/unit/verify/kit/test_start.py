"""Commands that a kit starts: what is said of those that fail."""

from __future__ import annotations

import pytest

from imagefactory.verify.kit.program import Stop
from imagefactory.verify.kit.start import run_or_stop


@pytest.mark.parametrize(
    ("said", "login"),
    [
        ("Error response from daemon: denied", True),
        ("FATAL: ... GET https://ghcr.io/token: UNAUTHORIZED: authentication required", True),
        ("unexpected status code 403", True),
        ("no space left on device", False),
        ("manifest unknown", False),
        ("dial tcp 127.0.0.1:4010: connection refused", False),
    ],
)
def test_a_pull_that_a_registry_refuses_says_how_to_be_let_in(said: str, login: bool) -> None:
    with pytest.raises(Stop) as caught:
        run_or_stop(["sh", "-c", 'echo first; echo "$1" >&2; exit 1', "sh", said], {"PATH": "/usr/bin:/bin"})
    told = str(caught.value)
    assert said in told
    assert ("docker login" in told) == login
