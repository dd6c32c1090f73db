"""The doctor for who submits and who verifies: what is needed for that, and nothing of building."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from imagefactory.doctor.facts import Diagnosis, Health, ProbeResult
from imagefactory.doctor.use import (
    JOIN,
    NEW_KEY,
    TrustedKeyName,
    UsageFacts,
    diagnose_submit,
    diagnose_verify,
    is_working,
)
from tests.made.verdicts import NOW

DAY = timedelta(days=1)
KEY = TrustedKeyName(name="lab", since=NOW - DAY, until=NOW + 99 * DAY)
WELL = UsageFacts(
    now=NOW,
    keys=(KEY,),
    catalog=ProbeResult(name="catalog", answer="registry.example.org/gpu, made today"),
    images=9,
    verified="pytorch-2.3-cu121",
    site="chtc",
    site_origin="/etc/xdg/imagefactory/imagefactory.toml",
    pool=ProbeResult(name="pool", answer="HTCondor 23.9"),
    factory=ProbeResult(name="project", answer="/home/you/factory"),
    signers=("lab",),
)
GPU = Diagnosis(name="GPU", state=Health.WARNING, detail="none here", needed_for="gpu")
SANDBOX = Diagnosis(name="overlay", state=Health.DENIED, detail="no", needed_for="run")


def told(found: tuple[Diagnosis, ...], name: str) -> Diagnosis:
    return next(one for one in found if one.name == name)


def test_who_has_a_factory_is_sent_to_a_key_and_not_to_an_invitation() -> None:
    bare = replace(WELL, keys=())
    assert told(diagnose_verify(bare, ()), "trust").remedy == NEW_KEY
    assert told(diagnose_submit(replace(bare, own=True)), "trust").remedy == NEW_KEY
    assert told(diagnose_submit(bare), "trust").remedy == JOIN


def test_all_is_well() -> None:
    found = diagnose_submit(WELL)
    assert [one.name for one in found] == ["catalog", "images", "key lab", "site", "pool"]
    assert {one.state for one in found} == {Health.OK}
    assert is_working(found)


@pytest.mark.parametrize(
    ("changes", "name", "state", "remedy"),
    [
        ({"catalog": None}, "catalog", Health.MISSING, "imagefactory site join ADDRESS|FILE"),
        (
            {"catalog": ProbeResult(name="catalog", refusal="expired", remedy="ask for a new one")},
            "catalog", Health.DENIED, "ask for a new one",
        ),
        ({"verified": ""}, "images", Health.WARNING, "imagefactory search"),
        ({"keys": ()}, "trust", Health.MISSING, "imagefactory site join ADDRESS|FILE"),
        ({"keys": (replace(KEY, until=NOW + DAY),)}, "key lab", Health.WARNING, "imagefactory site join"),
        ({"keys": (replace(KEY, until=NOW),)}, "key lab", Health.WARNING, "join the center again"),
        ({"keys": (replace(KEY, since=NOW + DAY),)}, "key lab", Health.WARNING, ""),
        ({"site_origin": "default"}, "site", Health.WARNING, "site = "),
        ({"pool": None}, "pool", Health.WARNING, "access point"),
        ({"pool": ProbeResult(name="pool", refusal="no answer", remedy="wait")}, "pool",
        Health.WARNING, "wait"),
        ({"reader": False, "mend": "pip"}, "job check", Health.WARNING, "pip"),
    ],
)  # fmt: skip
def test_what_is_lacking_for_submitting(
    changes: dict[str, object], name: str, state: Health, remedy: str
) -> None:
    found = diagnose_submit(replace(WELL, **changes))  # type: ignore[arg-type]
    assert told(found, name).state is state
    assert remedy in told(found, name).remedy
    assert is_working(found) is (state is Health.WARNING)


def test_verifying_needs_a_machine_or_a_pool() -> None:
    found = diagnose_verify(WELL, (GPU, SANDBOX))
    assert [one.name for one in found] == ["project", "key lab", "signing", "pool"]
    assert is_working(found)
    alone = diagnose_verify(replace(WELL, pool=None), (GPU, SANDBOX))
    assert [one.name for one in alone][-2:] == ["GPU", "overlay"]
    assert not is_working(alone)


def test_verifying_needs_a_factory_and_says_without_a_key_that_nothing_is_signed() -> None:
    none = ProbeResult(name="project", refusal="not a project", remedy="imagefactory init")
    found = diagnose_verify(replace(WELL, factory=none, signers=()), ())
    assert told(found, "project").state is Health.MISSING
    assert told(found, "signing").state is Health.WARNING
    assert "key create" in told(found, "signing").remedy


def test_a_retired_key_beside_a_valid_one_lacks_nothing() -> None:
    keys = (replace(KEY, until=NOW), replace(KEY, name="lab-2"))
    found = {one.name: one.state for one in diagnose_submit(replace(WELL, keys=keys))}
    assert (found["key lab"], found["key lab-2"]) == (Health.OK, Health.OK)
