"""Claims of cells in a registry, so that two stores do not verify the same image on the same GPU.

    read_claims() -> plan -> claim_cells(): read, put, read again -> the cells that another store claimed

Claims are stored when cells are queued, and released when the cells are done. A plan costs one request, and
two for each other store. Errors of the registry are reported and stop nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from imagefactory.access import Access, open_registry, registry_place
from imagefactory.actions.verdicts import signing_key, writing
from imagefactory.errors import ImagefactoryError, RegistryError, StatementError, os_problem
from imagefactory.fs import explain_full_disk, replace_bytes
from imagefactory.http import HURRIED
from imagefactory.oci.graph import StoreRepository, put_bytes, put_manifest
from imagefactory.progress import Progress
from imagefactory.schedulers.pool import TRANSFERS, JobLimits
from imagefactory.schedulers.underway import (
    CLAIMS,
    LARGEST,
    TAG,
    ClaimedCell,
    OtherClaim,
    OwnClaims,
    RepositoryClaims,
    StoreClaims,
    SweepClaim,
    claim_of,
    first_claims,
    format_own,
    open_claims,
    parse_own,
    sign_claims,
)
from imagefactory.trust.catalog_package import catalog_repository, parse_layer, unpack_artifact
from imagefactory.trust.offers import build_artifact
from imagefactory.trust.policy import TrustRules, read_trust
from imagefactory.verify.nonces import LIFETIME

FILE = "claims.json"
MOST_STORES = 32
"""The most other stores whose claims are read: anyone who may push can write many tags."""
STORE_BYTES = 8
SETTLE, TRIES = timedelta(seconds=3), 3
"""The longest time to store a claim, and the number of attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherClaims:
    """The valid claims of other stores, and a line for each problem."""

    claims: tuple[OtherClaim, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """The cells that a sweep is about to queue, and the registry (HOST[/PATH]) for its claim.

    With `ask`, cells that another store claimed are dropped.
    """

    sweep: str
    registry: str
    cells: frozenset[ClaimedCell]
    limits: JobLimits
    clock: Callable[[], datetime]
    random: Callable[[int], bytes]
    pause: Callable[[float], None]
    ask: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """The cells that another store claimed, and a line for each problem."""

    lost: Mapping[ClaimedCell, OtherClaim] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_claims(access: Access, registry: str, now: datetime) -> OtherClaims:
    """Return the claims of other stores in a registry, signed by trusted keys.

    `registry` is HOST[/PATH], empty for none.
    """
    try:
        trust = read_trust(access.settings.files)
        if not registry or not trust.keys:
            return OtherClaims()
        own_claims = _read_own(access.layout.path)
        return _read_others(
            _claims_place(access, registry), own_claims.store if own_claims else "", trust, now
        )
    except ImagefactoryError as error:
        return OtherClaims(notes=(f"cannot read the claims of other stores: {error.message}",))


def _read_others(repo: StoreRepository, own_store: str, trust: TrustRules, now: datetime) -> OtherClaims:
    stores = [match[1] for tag in repo.store.tags(repo.repository) if (match := TAG.fullmatch(tag))]
    others = [store for store in stores if store != own_store]
    claims: list[OtherClaim] = []
    faults: list[str] = []
    for store in others[:MOST_STORES]:
        try:
            data = _read_list(repo, f"claims-{store}")
            claims += open_claims(data, store, trust, now) if data else ()
        except RegistryError:
            raise
        except ImagefactoryError as error:
            faults.append(error.message)
    notes: tuple[str, ...] = (
        (f"ignored the claims of {len(faults)} other store(s): {faults[0]}",) if faults else ()
    )
    if len(others) > MOST_STORES:
        notes += (f"{repo} has claims of {len(others)} stores, only {MOST_STORES} were read",)
    return OtherClaims(claims=tuple(claims), notes=notes)


def _read_list(repo: StoreRepository, tag: str) -> bytes:
    """Return the envelope of a tag, empty if the tag is missing. Raises StatementError if it is invalid."""
    location, manifest = f"{repo}:{tag}", repo.store.manifest(repo.repository, tag)
    if manifest is None:
        return b""
    try:
        layer = parse_layer(manifest[1], location, CLAIMS)
    except RegistryError as error:  # a fault of another store, not of the registry
        raise StatementError("claims-invalid", error.message, hint=error.hint) from error
    if layer.size > LARGEST:
        raise StatementError(
            "claims-too-large",
            f"{location} has {layer.size:,} bytes, but a list of claims has at most {LARGEST:,}",
            hint="delete this tag: imagefactory did not push it",
        )
    return unpack_artifact(b"".join(repo.store.read(repo.repository, layer)), location, LARGEST)


def _claims_place(access: Access, registry: str) -> StoreRepository:
    """Return the repository of the catalog, with short timeouts, because a sweep does not depend on it."""
    host, path = registry_place(access, registry)
    reference = catalog_repository(f"{host}/{path}" if path else host)
    return StoreRepository(
        store=open_registry(access, host, retry_policy=HURRIED), repository=reference.repository
    )


def claim_cells(access: Access, claiming: ClaimRequest, progress: Progress) -> ClaimResult:
    """Claim cells in the registry. Return the cells that another store claimed.

    The earliest claim wins. A put that takes longer than SETTLE is repeated with a later time, and each
    store waits for SETTLE before it reads. So the later of two stores sees the earlier claim. Two stores can
    both queue a cell only if their clocks differ by seconds.
    """
    if not claiming.registry or not claiming.cells:
        return ClaimResult()
    lost: dict[ClaimedCell, OtherClaim] = {}
    clock = claiming.clock
    try:
        repo, trust = _claims_place(access, claiming.registry), read_trust(access.settings.files)
        asks = claiming.ask and bool(trust.keys)
        with writing(access, repo, progress):
            own_claims = _read_own(access.layout.path) or OwnClaims(store=claiming.random(STORE_BYTES).hex())
            before = _read_others(repo, own_claims.store, trust, clock()) if asks else OtherClaims()
            lost.update(_of(before.claims, claiming.cells))
            mine = _put_in_time(
                access, repo, own_claims, replace(claiming, cells=claiming.cells - lost.keys())
            )
            if mine and asks:
                claiming.pause(max(0.0, (mine.made + SETTLE - clock()).total_seconds()))
                others = _read_others(repo, own_claims.store, trust, clock()).claims
                known = {claim.order for claim in before.claims}
                order = (mine.made, own_claims.store, mine.sweep)
                lost.update(
                    _of(
                        [claim for claim in others if claim.order not in known and claim.order < order],
                        mine.cells,
                    )
                )
                if lost.keys() & mine.cells:
                    less = claim_of(mine.sweep, mine.cells - lost.keys(), mine.made, mine.until)
                    _put(access, repo, _with(own_claims, repo, less), clock())
            return ClaimResult(lost=lost, notes=before.notes)
    except (ImagefactoryError, OSError) as error:
        note = f"this sweep is not claimed, so other stores may queue the same cells: {error}"
        return ClaimResult(lost=lost, notes=(note,))


def _put_in_time(
    access: Access, repo: StoreRepository, own_claims: OwnClaims, claiming: ClaimRequest
) -> SweepClaim | None:
    """Return the claim, stored within SETTLE of its own time; None without cells.

    Raises ImagefactoryError.
    """
    limits = claiming.limits
    # The time of one attempt, not of all retries: other stores wait that long for a store that is gone.
    life = min(limits.idle + limits.held + limits.run + TRANSFERS, LIFETIME)
    for _ in range(TRIES if claiming.cells else 0):
        start = claiming.clock()
        mine = claim_of(claiming.sweep, claiming.cells, start, start + life)
        _put(access, repo, _with(own_claims, repo, mine), start)
        if claiming.clock() - start < SETTLE:
            return mine
    if claiming.cells:
        raise RegistryError(
            "registry-too-slow",
            f"{repo} needed more than {SETTLE.seconds} seconds to store the claim, {TRIES} times",
            hint="run the same command again later",
        )
    return None


def _of(claims: Iterable[OtherClaim], cells: Collection[ClaimedCell]) -> Mapping[ClaimedCell, OtherClaim]:
    return {cell: claim for cell, claim in first_claims(claims).items() if cell in cells}


def release_claim(
    access: Access, sweep: str, remaining: Collection[ClaimedCell], now: datetime, progress: Progress
) -> None:
    """Release the claims of a sweep, except those of the `remaining` cells. Errors are only reported."""
    try:
        own_claims = _read_own(access.layout.path)
        places = [
            (repository.place, row)
            for repository in (own_claims.places if own_claims else ())
            for row in repository.sweeps
            if row.sweep == sweep and not row.cells <= set(remaining)
        ]
    except ImagefactoryError as error:
        access.tell(f"note: cannot read the claims of this store: {error.message}")
        return
    for name, row in places:
        try:
            repo = _claims_place(access, name.removesuffix("/catalog"))
            with writing(access, repo, progress):
                own_claims = _read_own(access.layout.path)
                if own_claims:
                    less = claim_of(sweep, row.cells & set(remaining), row.made, row.until)
                    _put(access, repo, _with(own_claims, repo, less), now)
        except (ImagefactoryError, OSError) as error:
            until = f"{row.until:%Y-%m-%d %H:%M} UTC"
            access.tell(f"note: the claim of sweep {sweep} may stay in {name} until {until}: {error}")


def _with(own_claims: OwnClaims, repo: StoreRepository, claim: SweepClaim) -> OwnClaims:
    """Return `own_claims` with the claim of a sweep replaced, or removed if the claim has no cells."""
    rows = next((row.sweeps for row in own_claims.places if row.place == str(repo)), ())
    others = tuple(row for row in rows if row.sweep != claim.sweep)
    mine = RepositoryClaims(place=str(repo), sweeps=(*others, claim) if claim.cells else others)
    return replace(own_claims, places=(*(row for row in own_claims.places if row.place != str(repo)), mine))


def _put(access: Access, repo: StoreRepository, own_claims: OwnClaims, now: datetime) -> None:
    """Store the claims of this store, and write the valid ones for `repo` there.

    Raises ImagefactoryError.
    """
    key = signing_key(access, now)
    if key is None:
        raise StatementError(
            "claim-not-signed", "no signing key on this machine", hint="run imagefactory key create NAME"
        )
    places = (
        replace(repository, sweeps=tuple(row for row in repository.sweeps if row.until > now))
        for repository in own_claims.places
    )
    own_claims = replace(own_claims, places=tuple(places))
    path = access.layout.path / "journal" / FILE
    with explain_full_disk(access.layout.path):
        replace_bytes(path, format_own(own_claims))
    sweeps = next(
        (repository.sweeps for repository in own_claims.places if repository.place == str(repo)), ()
    )
    claims = StoreClaims(store=own_claims.store, issued=now.replace(microsecond=0), sweeps=sweeps)
    artifact, tag = build_artifact(sign_claims(claims, key), now, CLAIMS), f"claims-{own_claims.store}"
    for blob, data in artifact.blobs:
        put_bytes(repo, blob, data)
    put_manifest(repo, artifact.manifest, tag)
    if not sweeps:  # an empty list has no effect; without its tag no store reads it
        with suppress(RegistryError):
            repo.store.untag(repo.repository, tag)


def _read_own(store: Path) -> OwnClaims | None:
    """Return the claims of this store, None before the first claim. Raises StatementError."""
    path = store / "journal" / FILE
    try:
        with path.open("rb") as file:
            return parse_own(file.read(LARGEST + 1), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StatementError(*os_problem("read", path, error), hint="check its permissions") from error
