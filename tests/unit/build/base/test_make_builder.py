"""What a machine must have to make bases, and with which ids they are made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.build.base import make
from imagefactory.errors import ToolError
from imagefactory.runtime.build_sandbox import IdMaps

WHOLE = "         0          0 4294967295\n"
READY = make.BuilderFacts(
    is_root=False,
    mmdebstrap="1.3.5",
    has_newuidmap=True,
    names=("ada", "1000"),
    uid_map=WHOLE,
    gid_map=WHOLE,
    subuid="bob:1:65536\nada:100000:65536\n",
    subgid="1000:200000:65536\n",
)
ROOT = replace(READY, is_root=True, names=("root", "0"))


@pytest.mark.parametrize(
    ("facts", "changes", "hint"),
    [
        (READY, {"mmdebstrap": ""}, "sudo apt-get install mmdebstrap uidmap"),
        (ROOT, {"mmdebstrap": ""}, "apt-get install mmdebstrap"),
        (READY, {"has_newuidmap": False}, "sudo apt-get install uidmap"),
        (READY, {"subuid": "ada:100000:10\nbob:1:65536\nada\n"}, "usermod --add-subuids"),
        (READY, {"subgid": ""}, "usermod --add-subuids"),
        (ROOT, {"uid_map": "0 100000 65536\n"}, "two ranges"),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_mends_it(
    facts: make.BuilderFacts, changes: dict[str, str], hint: str
) -> None:
    with pytest.raises(ToolError) as caught:
        make.choose_ids(replace(facts, **changes))  # type: ignore[arg-type]
    assert hint in caught.value.hint


def test_an_ordinary_user_builds_with_subordinate_ids() -> None:
    assert make.choose_ids(READY) == IdMaps(
        uid_map="0 100000 65536", gid_map="0 200000 65536", delegated=True
    )


def test_root_builds_with_ids_of_nobody_and_needs_no_delegation() -> None:
    assert make.choose_ids(replace(ROOT, has_newuidmap=False, subuid="", subgid="")) == IdMaps(
        uid_map="0 1878982656 65536", gid_map="0 1878982656 65536", delegated=False
    )


@pytest.mark.parametrize(
    ("id_map", "first"),
    [
        ("0 1000 1\n1 100000 65536\n", 1),  # a rootless container
        ("0 100000 200000\n", 134464),
        ("0 100000 65536\n", None),
        ("0 100000 65537\n", 1),
        ("0 0 1\n", None),
        ("", None),
    ],
)
def test_roots_own_id_is_never_in_a_build(id_map: str, first: int | None) -> None:
    assert make.unused_ids(id_map) == first


@pytest.mark.parametrize("line", ["ada:0:65536", "ada:-1:65536", "ada:100000:65536:9", "ada:100000", ""])
def test_lines_that_delegate_nothing(line: str) -> None:
    assert make.delegated_ids(f"{line}\n", ("ada",)) is None
