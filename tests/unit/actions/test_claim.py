"""Claims of two stores in one registry: whose cells are left out by whom, and until when.

The pool is made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions import claim
from imagefactory.actions.claim import (
    SETTLE,
    ClaimRequest,
    OtherClaims,
    claim_cells,
    read_claims,
    release_claim,
)
from imagefactory.actions.sweep import SweepDraft, claim_again, make_sweep
from imagefactory.actions.verdicts import signing_key
from imagefactory.errors import NothingSelectedError, RegistryError, StatementError
from imagefactory.gpu.capability import Capability
from imagefactory.model import Outcome
from imagefactory.oci.graph import StoreRepository, put_bytes, put_manifest
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.schedulers.cells import CellRequest
from imagefactory.schedulers.pool import JobLimits
from imagefactory.schedulers.underway import (
    CLAIMS,
    ClaimedCell,
    StoreClaims,
    SweepClaim,
    claim_of,
    open_claims,
    sign_claims,
)
from imagefactory.settings.choices import SettingValue
from imagefactory.settings.load import NONCE_STORE_KEY
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.offers import build_artifact
from imagefactory.trust.policy import TrustRules, read_trust
from imagefactory.verify.nonces import LIFETIME
from tests.made.command import run
from tests.made.registry import Asked, Ways
from tests.made.sweep import (
    NOTHING_SEEN,
    STARTED,
    SUBMITTED,
    PoolMadeHere,
    inventory,
    log,
    play,
    pool_gpu,
)
from tests.made.sweep_site import A100, V100, Site
from tests.made.verdicts import STRANGER

NOW = datetime.now(UTC)
CLAIMED = {"7.0": "claimed", "8.0": "claimed"}
ID, OTHER_ID = "20261127-020000-aaaa", "20261127-020000-bbbb"
STORE = "0123456789abcdef"
CELL: ClaimedCell = ("sha256:" + "1" * 64, "8.0")


def left(prepared: SweepDraft) -> dict[str, str]:
    return {one.capability: one.rule for one in prepared.plan.skipped if one.rule != "no-match"}


@pytest.fixture
def first(site: Site) -> Site:
    """Whose store pushed the image."""
    factory = replace(site.factory, environ={**site.factory.environ, NONCE_STORE_KEY: "k" * 64})
    return replace(site, factory=factory, clock=lambda: NOW)


@pytest.fixture
def second(first: Site, tmp_path: Path) -> Site:
    """The same registry, keys and pool, and a store of its own."""
    store = SettingValue(value=str(tmp_path / "second"), origin="a test")
    settings = replace(first.factory.settings, store=store)
    return replace(first, factory=replace(first.factory, settings=settings), pool=PoolMadeHere())


def later(site: Site, after: timedelta) -> Site:
    return replace(site, clock=lambda: NOW + after)


# --- two stores ----------------------------------------------------------------------------------


def test_what_one_store_queued_another_leaves_out_until_the_claim_ends(first: Site, second: Site) -> None:
    sweep = first.makes().sweep
    prepared = second.prepares()
    assert (prepared.plan.cells, left(prepared)) == ((), CLAIMED)
    ends = f"{NOW + timedelta(hours=54, minutes=10):%Y-%m-%d %H:%M} UTC"
    for one in prepared.plan.skipped:
        if one.rule == "claimed":
            assert ("'lab'" in one.reason, ends in one.reason, sweep.id in one.reason) == (True,) * 3
    with pytest.raises(NothingSelectedError):
        make_sweep(second.factory, prepared, second.bench, QuietProgress())
    allowed = second.prepares(asked=CellRequest(allow=frozenset({"claimed"})))
    assert (len(allowed.plan.cells), left(allowed)) == (2, {})
    over = later(second, timedelta(hours=54, minutes=11))
    assert len(over.makes().sweep.nodes) == 2


def test_what_another_store_has_claimed_uses_no_budget(first: Site, second: Site) -> None:
    first.makes(asked=CellRequest(capabilities=(Capability(7, 0),)))
    prepared = second.prepares(level="full", asked=CellRequest(gpu_hours=1))
    assert [cell.row for cell in prepared.plan.cells] == ["8.0"]
    assert left(prepared) == {"7.0": "claimed"}
    asked = CellRequest(gpu_hours=1, allow=frozenset({"claimed"}))
    alone = second.prepares(level="full", asked=asked)
    assert (len(alone.plan.cells), sorted(left(alone).values())) == (1, ["budget"])


def test_a_claim_of_a_gpu_is_none_of_its_slices(first: Site, second: Site) -> None:
    slices = pool_gpu("8.0", mig=True, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    first.pool.gpus = second.pool.gpus = inventory(pool_gpu("8.0"), slices)
    asked = CellRequest(mig=True)
    first.makes()
    prepared = second.prepares(asked=asked)
    assert ([cell.row for cell in prepared.plan.cells], left(prepared)) == (
        ["8.0 1g.5gb"],
        {"8.0": "claimed"},
    )
    second.makes(asked=asked)
    found = [(one.rule, one.row) for one in first.prepares(asked=asked).plan.skipped]
    assert ("claimed", "8.0 1g.5gb") in found
    assert ("claimed", "8.0") not in found


def test_a_store_is_not_held_by_its_own_claims(first: Site) -> None:
    first.makes()
    assert len(first.makes().sweep.nodes) == 2
    assert read_claims(first.factory, first.registry.host, NOW).claims == ()


def test_what_was_collected_is_free_again_and_the_rest_is_not(first: Site, second: Site) -> None:
    folder = first.makes().folder
    play(folder, V100)
    log(folder, A100, SUBMITTED, STARTED)
    first.collects(folder)
    assert left(second.prepares()) == {"7.0": "verified", "8.0": "claimed"}
    play(folder, A100)
    first.collects(folder)
    assert left(second.prepares()) == {"7.0": "verified", "8.0": "verified"}
    assert read_claims(second.factory, second.registry.host, NOW).claims == ()


def test_what_says_nothing_of_the_image_is_free_for_another_pool(first: Site, second: Site) -> None:
    folder = first.makes().folder
    report = {"device": None, "cuda": "", "checks": []}
    play(folder, V100)
    play(folder, A100, report=report, run={"returncode": 1, **NOTHING_SEEN})
    assert [one.result.outcome for one in first.collects(folder).nodes][1] not in (None, Outcome.VERIFIED)
    assert left(second.prepares()) == {"7.0": "verified"}


def test_a_verdict_that_did_not_arrive_stays_claimed(
    first: Site, second: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = first.makes().folder
    first.pool.play(folder)
    keyless = replace(first, factory=replace(first.factory, environ={**first.factory.environ, "HOME": "/no"}))
    keyless.collects(folder)
    assert left(second.prepares()) == CLAIMED
    first.collects(folder)
    assert left(second.prepares()) == {"7.0": "verified", "8.0": "verified"}


@pytest.mark.parametrize("untag", [True, False])
def test_a_canceled_sweep_is_free_and_claimed_again_when_it_goes_on(
    first: Site, second: Site, pool: PoolMadeHere, untag: bool
) -> None:
    """Also where a registry removes no tag: then an empty list lies there."""
    first.registry.ways = Ways(untag=untag)
    made = first.makes()
    assert run("sweep", "cancel", made.sweep.id) == 0
    assert left(second.prepares()) == {}
    assert len(first.registry.find("catalog").tags) == (0 if untag else 1)
    claim_again(first.factory, made.folder, first.registry.host, first.bench, QuietProgress())
    assert left(second.prepares()) == CLAIMED


def test_a_plan_asks_once_whatever_its_cells(first: Site, second: Site) -> None:
    def asked(site: Site) -> int:
        before = len(site.registry.log)
        site.prepares()
        return sum("/v2/catalog/" in one.path for one in site.registry.log[before:])

    first.makes(asked=CellRequest(allow=frozenset({"claimed"})))
    assert asked(first) == 1
    assert asked(second) == 3


# --- two at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [True, False])
def test_of_two_at_once_the_earlier_has_a_cell(
    first: Site, second: Site, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looked before the first had put its claim, so both put one, and then both look."""
    first.makes()  # the image is there, and nothing is claimed any more
    site = later(second, timedelta(seconds=-1 if earlier else 1))
    for row in claim_rows(first.factory):
        release_claim(first.factory, row.sweep, (), NOW, QuietProgress())
    prepared, (one, *_) = site.prepares(), first.prepares().plan.cells
    cells = frozenset((one.stage.image, capability) for capability in ("7.0", "8.0"))
    assert left(prepared) == {}
    won = claim_cells(first.factory, claiming(first, cells), QuietProgress())
    assert (won.lost, won.notes) == ({}, ())
    own, looks = claim._read_others, iter([OtherClaims()])
    monkeypatch.setattr(claim, "_read_others", lambda *args: next(looks, None) or own(*args))
    lost = claim_cells(site.factory, claiming(site, cells), QuietProgress())
    assert set(lost.lost) == (set() if earlier else cells)
    seen = {
        cell
        for other in read_claims(first.factory, first.registry.host, NOW).claims
        for cell in other.claim.cells
    }
    assert seen == (cells if earlier else set())


def claim_rows(factory: Project) -> tuple[SweepClaim, ...]:
    path = factory.layout.path / "journal/claims.json"
    return tuple(row for one in claim.parse_own(path.read_bytes(), "claims").places for row in one.sweeps)


def claiming(site: Site, cells: frozenset[ClaimedCell], sweep: str = OTHER_ID) -> ClaimRequest:
    bench = site.bench
    return ClaimRequest(
        sweep=sweep,
        registry=site.registry.host,
        cells=cells,
        limits=JobLimits(),
        clock=bench.clock,
        random=bench.random,
        pause=bench.pause,
    )


def test_a_cell_that_is_claimed_while_images_are_built_is_left_out(first: Site, second: Site) -> None:
    allow = CellRequest(allow=frozenset({"claimed"}))
    first.makes(asked=allow)
    release_claim(first.factory, claim_rows(first.factory)[0].sweep, (), NOW, QuietProgress())
    prepared = second.prepares()
    one = first.prepares().plan.cells[0]
    claim_cells(first.factory, claiming(first, frozenset({(one.stage.image, "7.0")})), QuietProgress())
    made = make_sweep(second.factory, prepared, second.bench, QuietProgress())
    assert [node.name for node in made.sweep.nodes] == [A100]
    assert [one.capability for one in made.sweep.skipped if one.rule == "claimed"] == ["7.0"]


def test_nobody_looks_before_a_slow_put_is_over(first: Site) -> None:
    """A put that takes longer is made again, with a later time; what is left of that time is waited for."""
    first.factory.layout.make()
    times = iter([NOW, NOW, NOW + SETTLE, NOW + SETTLE, *[NOW + 1.25 * SETTLE] * 9])
    waited: list[float] = []
    asked = replace(claiming(first, frozenset({CELL})), clock=lambda: next(times), pause=waited.append)
    assert claim_cells(first.factory, asked, QuietProgress()).notes == ()
    assert claim_rows(first.factory)[0].made == NOW + SETTLE
    assert waited == [pytest.approx(0.75 * SETTLE.total_seconds())]
    ticks = iter(range(99))
    slow = replace(asked, clock=lambda: NOW + next(ticks) * SETTLE)
    assert len(claim_cells(first.factory, slow, QuietProgress()).notes) == 1


# --- whose claims count --------------------------------------------------------------------------


def claims_of(
    now: datetime = NOW, life: timedelta = timedelta(hours=1), made: datetime | None = None
) -> StoreClaims:
    made = made or now
    return StoreClaims(
        store=STORE,
        issued=now.replace(microsecond=0),
        sweeps=(claim_of(ID, {CELL}, made, made + life),),
    )


def put_claims(site: Site, data: bytes, tag: str = f"claims-{STORE}") -> None:
    place = StoreRepository(store=RegistryClient(site.registry.host), repository="catalog")
    artifact = build_artifact(data, NOW, CLAIMS)
    for blob, content in artifact.blobs:
        put_bytes(place, blob, content)
    put_manifest(place, artifact.manifest, tag)


def lab(site: Site) -> SigningKey:
    key = signing_key(site.factory, NOW)
    assert key
    return key


@pytest.mark.parametrize(
    "data",
    [
        lambda _: sign_claims(claims_of(), STRANGER),
        lambda key: sign_claims(claims_of(), key)[:-9],
        lambda key: edited(sign_claims(claims_of(), key)),
        lambda key: sign_claims(replace(claims_of(), store="f" * 16), key),
        lambda key: sign_claims(claims_of(NOW + timedelta(hours=1)), key),
        lambda key: sign_claims(claims_of(made=NOW + timedelta(hours=1)), key),
        lambda key: sign_claims(claims_of(life=LIFETIME + timedelta(seconds=1)), key),
        lambda _: b"{}",
        lambda _: b"x" * 5000,
    ],
)  # fmt: skip
def test_a_claim_that_is_not_of_a_trusted_key_counts_for_nothing(
    site: Site, data: Callable[[SigningKey], bytes]
) -> None:
    put_claims(site, data(lab(site)))
    found = read_claims(site.factory, site.registry.host, NOW)
    assert (found.claims, len(found.notes)) == ((), 1)


def edited(envelope: bytes) -> bytes:
    row = json.loads(envelope)
    return json.dumps({**row, "payload": "e30="}, sort_keys=True, separators=(",", ":")).encode()


def test_a_claim_of_a_retired_key_counts_no_more(site: Site) -> None:
    data, trust = sign_claims(claims_of(), lab(site)), read_trust(site.factory.settings.files)
    assert [one.by for one in open_claims(data, STORE, trust, NOW)] == ["lab"]
    assert open_claims(data, STORE, trust, NOW + timedelta(hours=1)) == ()
    retired = TrustRules(keys=(replace(trust.keys[0], until=NOW + timedelta(minutes=1)),))
    with pytest.raises(StatementError):
        open_claims(data, STORE, retired, NOW + timedelta(minutes=2))


def test_others_tags_hide_no_claim_and_are_told(site: Site) -> None:
    put_claims(site, sign_claims(claims_of(), lab(site)))
    put_claims(site, b"junk", "claims-" + "f" * 16)
    put_claims(site, b"junk", "claims-of-nobody")
    found = read_claims(site.factory, site.registry.host, NOW)
    assert ([one.store for one in found.claims], len(found.notes)) == ([STORE], 1)


# --- a registry that does not do it --------------------------------------------------------------


@pytest.mark.parametrize("status", ["403", "500"])
def test_a_sweep_goes_on_where_a_registry_takes_no_claim(
    first: Site, second: Site, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "HURRIED", replace(claim.HURRIED, attempts=1))

    def refuse(asked: Asked) -> str | None:
        return status if "/v2/catalog/" in asked.path else None

    def refuse_writing(asked: Asked) -> str | None:
        return refuse(asked) if asked.method != "GET" else None

    first.registry.fault = refuse_writing
    told: list[str] = []
    made = replace(first, factory=replace(first.factory, tell=told.append)).makes()
    assert (len(made.sweep.nodes), len(made.notes), len(told)) == (2, 1, 1)
    first.registry.fault = refuse
    prepared = second.prepares()
    assert (len(prepared.plan.cells), len(prepared.plan.notes)) == (2, 1)


def test_a_journal_that_cannot_be_written_stops_no_sweep(first: Site) -> None:
    first.factory.layout.make()
    (first.factory.layout.path / "journal/claims.json").mkdir(parents=True)
    assert len(first.makes().notes) == 2  # neither read nor written


def test_without_a_key_a_sweep_is_queued_and_not_claimed(first: Site, second: Site) -> None:
    keyless = replace(first, factory=replace(first.factory, environ={**first.factory.environ, "HOME": "/no"}))
    assert len(keyless.makes().notes) == 1
    assert left(second.prepares()) == {}
    assert not (first.factory.layout.path / "journal/claims.json").exists()


def test_a_sweep_that_could_not_be_written_claims_nothing(
    first: Site, second: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.makes(asked=CellRequest(allow=frozenset({"claimed"})))
    release_claim(first.factory, claim_rows(first.factory)[0].sweep, (), NOW, QuietProgress())

    def fail(*_: object) -> None:
        raise RegistryError("registry-full", "the disk is full")

    monkeypatch.setattr("imagefactory.actions.sweep.write_sweep_file", fail)
    with pytest.raises(RegistryError):
        first.makes()
    assert left(second.prepares()) == {}
