"""Files made by the grammar of submit files: what HTCondor's own parser takes and makes of them, and ours.

Both ways: what it takes is read alike, and what it refuses is refused. Nothing is submitted.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import htcondor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagefactory.errors import UsageError
from imagefactory.extras.lint.reader import QueueStatement, parse_submit_file

NAMES = st.sampled_from(["x", "Request_GPUs", "my_dir", "request_foobar", "a.b", "+Own", "MY.Own", "log"])
WORDS = st.sampled_from(
    [
        "1",
        "a",
        "$(x)",
        "$(unset)",
        "$(my_dir:d)",
        '"t"',
        "Undefined",
        "Memory >= 3",
        "(a || b)",
        "# no comment",
        "==",
    ]
)
VALUES = st.lists(WORDS, max_size=4).map(" ".join)
GOING_ON = st.lists(st.sampled_from(["  two", "# left out", "&& three"]), min_size=1, max_size=4)


def _going_on(name: str, rows: list[str]) -> str:
    """A statement over several lines, all of which say that it goes on, with an end that is no comment."""
    return " \\\n".join([f"{name} = one", *rows, "  end"])


SET = st.builds("{} = {}".format, NAMES, VALUES)
STATEMENTS = st.one_of(
    SET,
    st.builds(_going_on, NAMES, GOING_ON),
    st.builds("{} @=end\n{}\n@end".format, NAMES.filter(lambda name: name[0] != "+"), VALUES),
    st.sampled_from(["", "# a comment", "# one that ends in \\"]),
    st.builds("if {}\n{}\nelse\n{}\nendif".format, st.sampled_from(["true", "0", "defined x"]), SET, SET),
)
BROKEN = st.sampled_from(
    ["words alone", "+Own @=end\n1\n@end", "x-y = 3", "= 3", "==a", "if 1 == 1\nendif", "x @=end\nno end"]
)
ROWS = st.lists(st.sampled_from(["a", "b c", "d, e"]), min_size=1, max_size=4)
COUNTED = {"": 1, "1": 1, "2": 2, "3": 3, "2 * 3": 6, "(2)": 2, "$(n)": 4}
COUNTS = st.sampled_from(sorted(COUNTED))
QUEUES = st.one_of(
    st.builds("queue {}".format, COUNTS),
    st.builds(lambda count, rows: f"queue {count} v in ({' '.join(rows)})", COUNTS, ROWS),
    st.builds(lambda rows: "queue v, w from (\n" + "\n".join(rows) + "\n)", ROWS),
    st.builds("queue {} v from list.txt".format, st.sampled_from(["", "2"])),
)
BROKEN_QUEUES = st.sampled_from(
    ["queue no", "queue 3 4", "queue -1", "queue v in", "queue v from", "queue 2 *"]
)
COMMON = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "list.txt").write_text("a\nb 1\n# an item\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ours(text: str, folder: Path) -> QueueStatement:
    (jobs,) = parse_submit_file(text, "a.sub", lambda name: (folder / name).read_text()).jobs
    return jobs


def values(jobs: QueueStatement) -> dict[str, list[str]]:
    return {key: value.split() for key in jobs.settings if (value := jobs.value(key))}


def theirs(submit: htcondor2.Submit) -> dict[str, list[str]]:
    found = {}
    for key in submit:
        with contextlib.suppress(KeyError):  # set to nothing
            found[key.lower()] = submit.expand(key).split()
    return {key: value for key, value in found.items() if value}


@COMMON
@given(st.lists(STATEMENTS, max_size=6), QUEUES)
def test_what_htcondor_takes_is_read_alike(beside: Path, statements: list[str], queue: str) -> None:
    text = "\n".join([*statements, "n = 4", queue, ""])
    submit = htcondor2.Submit(text)
    items = submit.itemdata()
    jobs = ours(text, beside)
    assert values(jobs) == theirs(submit), text
    if items is not None:
        each = COUNTED[queue[5:].partition(" v")[0].strip()]
        assert jobs.count == each * len(list(items)), text


@COMMON
@given(st.lists(STATEMENTS, max_size=4), BROKEN)
def test_what_htcondor_refuses_is_refused(beside: Path, statements: list[str], broken: str) -> None:
    text = "\n".join([*statements, broken, "queue", ""])
    with pytest.raises((ValueError, KeyError)):
        htcondor2.Submit(text)
    with pytest.raises(UsageError, match=r"^a\.sub:[0-9]+: "):
        ours(text, beside)


@COMMON
@given(st.lists(STATEMENTS, max_size=3), BROKEN_QUEUES)
def test_a_queue_that_htcondor_refuses_is_refused(beside: Path, statements: list[str], queue: str) -> None:
    text = "\n".join([*statements, queue, ""])
    with pytest.raises(ValueError, match=r"Queue count|invalid qargs"):
        list(htcondor2.Submit(text).itemdata() or ())
    with pytest.raises(UsageError, match=r"^a\.sub:[0-9]+: 'queue "):
        ours(text, beside)
