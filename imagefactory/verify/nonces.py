"""Nonces: the signing project issues them and spends each once, so that an old run is never signed as a new
one.

    <nonces>/<nonce>.json           issued: the image, suite and kit, and the expiry
    <nonces>/spent/<nonce>.json     spent: the same, the time, and the digest of the result

A nonce is spent by creating its file in `spent/`, which succeeds for only one process. That file also
contains the signed data, after the entry, until it has been delivered. Spent nonces are stored long after
they have expired. The nonce store is the directory `nonces` of the store, or another directory: in CI, the
job that creates kits passes it to the job that signs. A shared key detects changes in transit: every entry
has an HMAC-SHA256. An entry also has the attempt of the CI run that issued it, and is rejected in all others,
because anyone can download the nonce store of a public repository and upload it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from imagefactory.errors import CheckFailedError, StoreError, UsageError, os_problem
from imagefactory.fs import remove_inside
from imagefactory.serialize import printable_value
from imagefactory.settings.load import NONCE_STORE_KEY
from imagefactory.verify.report import LEVELS, NODE, VerifiedImage

FORMAT = 1
NONCE = re.compile(r"[0-9a-f]{32}")
NONCE_BYTES = 16
LIFETIME = timedelta(days=14)
RETENTION = timedelta(days=180)
"""The time for which an expired nonce is stored. After that it is unknown, and still rejected."""
CI_RUN = ("GITHUB_REPOSITORY", "GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT")
"""The variables that identify an attempt of a GitHub Actions run."""
GITLAB_PIPELINE = ("CI_PROJECT_URL", "CI_PIPELINE_ID")
"""The variables that identify a GitLab pipeline, whose jobs can be retried."""
SPENT_DIRECTORY, TEMPORARY_PREFIX = "spent", ".nonce-"
_END = b"\n}\n"
"""The end of an entry, before signed data. No line within an entry consists of a brace."""


class NonceError(CheckFailedError):
    """A nonce that cannot be spent. The code is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonceSubject:
    """The subject of a nonce: an image, the digest of a suite, a level, and `kit`, the digest of the request.

    `kit` is empty if the issuing machine also runs the suite. `pool` is the row of POOLS whose jobs may use
    the nonce, empty without a pool: so a kit cannot claim the evidence of a pool.
    """

    subject: VerifiedImage
    suite: str
    level: str
    kit: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedNonce:
    """A nonce and its times. `spent` is None until it is spent, `result` is the digest of the result.

    `ci_run` is the CI run that issued it (`ci_run_of`).
    """

    nonce: str
    run: NonceSubject
    issued: datetime
    expires: datetime
    spent: datetime | None = None
    result: str = ""
    ci_run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonceUse:
    """A nonce to spend on a run. `result` and `signed` are the arguments of `NonceStore.spend`."""

    nonce: str
    run: NonceSubject
    result: str
    signed: bytes = b""


def format_nonce(random: bytes) -> str:
    """Format NONCE_BYTES random bytes as 32 hex digits."""
    assert len(random) == NONCE_BYTES
    return random.hex()


def ci_run_of(environ: Mapping[str, str]) -> str:
    """Return the CI run in `environ`, "" outside of CI.

    It is `owner/name/run/attempt` in GitHub Actions, and the address of a project with a pipeline in GitLab.
    Raises UsageError if one of these variables is missing, because such a nonce store would be valid in every
    run.
    """
    for service, names in (("GITHUB_ACTIONS", CI_RUN), ("GITLAB_CI", GITLAB_PIPELINE)):
        if environ.get(service) != "true":
            continue
        for name in names:
            if not environ.get(name):
                raise UsageError(
                    "ci-variable-missing",
                    f"{service} is set, but {name} is not",
                    hint=f"set {name}, or unset {service}",
                )
        return "/".join(environ[name] for name in names)
    return ""


class NonceStore:
    """The nonces in `folder`. Every method may raise StoreError if the directory cannot be written.

    With a `key`, entries without a valid MAC are rejected; without a key, entries with a MAC. Entries from
    another `ci_run` are rejected too.
    """

    def __init__(self, directory: Path, key: str = "", *, ci_run: str = "") -> None:
        self.folder, self.key, self.ci_run = directory, key.encode(), ci_run

    def issue(self, nonce: str, run: NonceSubject, now: datetime) -> IssuedNonce:
        """Store a new nonce. Raises StoreError if it exists."""
        (issued,) = self.issue_all({nonce: run}, now)
        return issued

    def issue_all(self, runs: Mapping[str, NonceSubject], now: datetime) -> tuple[IssuedNonce, ...]:
        """Issue several nonces like `issue`, with one search for expired nonces and one flush to the disk."""
        nonces = [
            IssuedNonce(nonce=nonce, run=run, issued=now, expires=now + LIFETIME, ci_run=self.ci_run)
            for nonce, run in runs.items()
        ]
        with _nonce_error(self.folder):
            (self.folder / SPENT_DIRECTORY).mkdir(parents=True, exist_ok=True)
            self._forget(now)
            for issued in nonces:
                nonce, data = issued.nonce, _format(issued, self.key)
                put = (
                    _create if len(nonces) == 1 else _put_new
                )  # of many, none is known before all are written
                if self._spent(nonce).exists() or not put(self._path(nonce), data):
                    raise StoreError(
                        "nonce-exists", f"the nonce {nonce} was already issued", hint="run it again"
                    )
            if len(nonces) > 1:
                os.sync()
        return tuple(nonces)

    def look(self, nonce: str) -> IssuedNonce:
        """Return the entry of a nonce. Raises NonceError (unknown) if this nonce store did not issue it."""
        return self._look(nonce)[0]

    def _look(self, nonce: str) -> tuple[IssuedNonce, bytes]:
        """Return the entry like `look`, and signed data that was not delivered."""
        if not NONCE.fullmatch(nonce):
            raise NonceError("nonce-unknown", f"{nonce[:80]!r} is not a nonce", hint="create a new kit")
        # Spent last once more: another process may have moved it between two checks.
        for path in (self._spent(nonce), self._path(nonce), self._spent(nonce)):
            with contextlib.suppress(FileNotFoundError):
                known, signed = _parse(path, nonce, self.key)
                if known.ci_run != self.ci_run:
                    raise _of_another_run(known, self.ci_run)
                return known, signed
        raise NonceError(
            "nonce-unknown",
            f"the nonce {nonce} was not issued by {self.folder}",
            hint="pass the nonce store that issued it: --nonce-dir DIR",
        )

    def check(self, nonce: str, run: NonceSubject, now: datetime) -> IssuedNonce:
        """Return the entry of a nonce. Raises NonceError with the reason if it cannot be spent on `run`.

        Changes nothing.
        """
        known = self.look(nonce)
        check_open(known, now)
        check_run(known, run)
        return known

    def spend(
        self, nonce: str, run: NonceSubject, *, result: str, now: datetime, signed: bytes = b""
    ) -> IssuedNonce:
        """Spend a nonce on `run`, once for all processes. Raises NonceError like `check`.

        `result` is the digest of the result of the run. After this call, the nonce is spent even if the
        caller fails. `signed` is stored until `settle`, so that a later call can deliver it.
        """
        return self._spend(NonceUse(nonce=nonce, run=run, result=result, signed=signed), now, flush=True)

    def spend_all(self, spending: Iterable[NonceUse], now: datetime) -> Mapping[str, NonceError]:
        """Spend several nonces like `spend`, with one flush to the disk. Return the errors by nonce.

        No nonce is spent for certain before this returns, so the caller must not attach signed data before.
        """
        refused: dict[str, NonceError] = {}
        for spent in spending:
            try:
                self._spend(spent, now, flush=False)
            except NonceError as error:
                refused[spent.nonce] = error
        os.sync()
        return refused

    def _spend(self, spending: NonceUse, now: datetime, *, flush: bool) -> IssuedNonce:
        spent = replace(self.check(spending.nonce, spending.run, now), spent=now, result=spending.result)
        with _nonce_error(self.folder):
            (self.folder / SPENT_DIRECTORY).mkdir(parents=True, exist_ok=True)
            if not _create(
                self._spent(spending.nonce), _format(spent, self.key, spending.signed), flush=flush
            ):
                raise _replayed(spending.nonce, self.look(spending.nonce).spent)
            if flush:  # else `settle_all` removes it: some file systems create slowly after a removal
                self._path(spending.nonce).unlink(missing_ok=True)
        return spent

    def unsettled(self, nonce: str) -> bytes:
        """Return the signed data of a spent nonce that was not delivered, empty if there is none."""
        return self._look(nonce)[1]

    def settle(self, nonce: str) -> None:
        """Record that the signed data was delivered."""
        self.settle_all({nonce})

    def settle_all(self, nonces: Set[str]) -> None:
        """Record the delivery for several nonces like `settle`. Unspent nonces stay unchanged."""
        with _nonce_error(self.folder):
            for nonce in filter(NONCE.fullmatch, nonces):
                with contextlib.suppress(FileNotFoundError):
                    with self._spent(nonce).open("r+b") as file:
                        entry, end, signed = file.read().partition(_END)
                        if signed:
                            file.truncate(len(entry + end))
                    self._path(nonce).unlink()

    def _path(self, nonce: str) -> Path:
        return self.folder / f"{nonce}.json"

    def _spent(self, nonce: str) -> Path:
        return self.folder / SPENT_DIRECTORY / f"{nonce}.json"

    def _forget(self, now: datetime) -> None:
        """Remove long expired and incomplete files by their times, since reading them is slower."""
        before = (now - LIFETIME - RETENTION).timestamp()
        for directory in (self.folder, self.folder / SPENT_DIRECTORY):
            for path in directory.iterdir():
                ours = NONCE.fullmatch(path.name[:32]) or path.name.startswith(TEMPORARY_PREFIX)
                with contextlib.suppress(FileNotFoundError):
                    if ours and path.is_file() and path.stat().st_mtime < before:
                        remove_inside(self.folder, path)


def check_open(known: IssuedNonce, now: datetime) -> None:
    """Raise NonceError (replayed, expired) if a nonce can no longer be spent."""
    if known.spent is not None:
        raise _replayed(known.nonce, known.spent)
    if now >= known.expires:
        raise NonceError(
            "nonce-expired",
            f"the nonce expired at {known.expires:%Y-%m-%d %H:%M} UTC",
            hint="create a new kit",
        )


def check_run(known: IssuedNonce, run: NonceSubject) -> None:
    """Raise NonceError if a nonce is not for `run`: its image, suite, pool or kit."""
    images = [(image.index, image.manifest, image.config) for image in (run.subject, known.run.subject)]
    if images[0] != images[1]:
        raise NonceError(
            "nonce-other-subject",
            f"the nonce is for another image: {known.run.subject.manifest}",
            hint="create a kit for this image",
        )
    if (run.suite, run.level) != (known.run.suite, known.run.level):
        raise NonceError(
            "nonce-other-suite",
            f"the nonce is for the suite {known.run.suite}, level {known.run.level}, but this result is from "
            f"{run.suite}, level {run.level}",
            hint="create a new kit with this version of imagefactory",
        )
    if run.pool != known.run.pool:
        issued, here = known.run.pool or "no pool", run.pool or "no pool"
        raise NonceError(
            "nonce-other-pool",
            f"the nonce was issued for {issued}, but this result is from {here}",
            hint="pass the original directory of the kit or sweep: imagefactory sweep collect DIR",
        )
    if run.kit != known.run.kit:
        raise NonceError(
            "kit-edited",
            "kit.json or expectations.json changed after the kit was created",
            hint="create a new kit",
        )


def _of_another_run(known: IssuedNonce, ci_run: str) -> NonceError:
    issued, here = known.ci_run or "no CI run", ci_run or "no CI run"
    return NonceError(
        "nonce-other-run",
        f"the nonce {known.nonce} was issued in {issued}, but this result is from {here}",
        hint="rerun all jobs of that run, not only the failed ones",
    )


def _replayed(nonce: str, spent: datetime | None) -> NonceError:
    when = f" on {spent:%Y-%m-%d %H:%M} UTC" if spent else ""
    return NonceError(
        "nonce-replayed",
        f"the nonce {nonce} was already spent{when}",
        hint="create a new kit: each kit can produce only one verdict",
    )


@contextlib.contextmanager
def _nonce_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            *os_problem("write", f"the nonce store {directory}", error),
            hint="use another directory: --nonce-dir DIR",
        ) from error


def _create(path: Path, data: bytes, *, flush: bool = True) -> bool:
    """Write a file completely or not at all. Return False if it exists. A link cannot replace a file.

    `flush` waits for the disk; without `flush`, the caller must wait.
    """
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        Path(temporary).unlink(missing_ok=True)
    return True


def _put_new(path: Path, data: bytes) -> bool:
    """Write a file. Return False if it exists. If the process is killed, an incomplete file may remain."""
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def _format(issued: IssuedNonce, key: bytes, signed: bytes = b"") -> bytes:
    value = {
        "format": FORMAT,
        "nonce": issued.nonce,
        "subject": asdict(issued.run.subject),
        "suite": issued.run.suite,
        "level": issued.run.level,
        "kit": issued.run.kit,
        "pool": issued.run.pool,
        "issued": issued.issued.astimezone(UTC).isoformat(),
        "expires": issued.expires.astimezone(UTC).isoformat(),
        "spent": issued.spent.astimezone(UTC).isoformat() if issued.spent else None,
        "result": issued.result,
        "ci_run": issued.ci_run,
    }
    if signed:
        value["signed"] = hashlib.sha256(signed).hexdigest()
    if key:
        value["mac"] = _mac(value, key)
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n" + signed


def _mac(value: Mapping[str, object], key: bytes) -> str:
    """Return the MAC of an entry without its MAC field."""
    rest = {name: part for name, part in value.items() if name != "mac"}
    return hmac.new(key, json.dumps(rest, sort_keys=True).encode(), "sha256").hexdigest()


def _check_mac(path: Path, data: Mapping[str, object], key: bytes) -> None:
    mac = data.get("mac")
    if key and not (isinstance(mac, str) and hmac.compare_digest(mac.encode(), _mac(data, key).encode())):
        raise StoreError(
            "nonce-key-mismatch",
            f"{path} was not written with the key in {NONCE_STORE_KEY}",
            hint=f"create a new kit with {NONCE_STORE_KEY} set to this key",
        )
    if mac and not key:
        raise StoreError(
            "nonce-key-missing",
            f"{path} was written with a key",
            hint=f"set the same key in {NONCE_STORE_KEY}",
        )


def _parse(path: Path, nonce: str, key: bytes) -> tuple[IssuedNonce, bytes]:
    """Return an entry, and its signed data if complete: another process may be settling it.

    A corrupt file is rejected and never repaired.
    """
    try:
        entry, end, signed = path.read_bytes().partition(_END)
        data = json.loads(entry + end)
        if data["format"] != FORMAT or data["nonce"] != nonce or data["level"] not in (*LEVELS, NODE):
            raise ValueError("it is not the entry of this nonce")
        if (path.parent.name == SPENT_DIRECTORY) != (data["spent"] is not None):
            raise ValueError("its directory and its content disagree on whether the nonce is spent")
        _check_mac(path, data, key)
        whole = bool(signed) and hashlib.sha256(signed).hexdigest() == data.get("signed")
        issued = IssuedNonce(
            nonce=nonce,
            run=NonceSubject(
                subject=VerifiedImage(**data["subject"]),
                suite=data["suite"],
                level=data["level"],
                kit=data["kit"],
                pool=printable_value(data.get("pool", "")),
            ),
            issued=_time(data["issued"]),
            expires=_time(data["expires"]),
            spent=_time(data["spent"]) if data["spent"] else None,
            result=data["result"],
            ci_run=printable_value(data.get("ci_run", "")),  # older entries have neither field
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            "nonce-store-corrupt", f"{path} is corrupt: {error}", hint="delete it, and create a new kit"
        ) from error
    return issued, signed if whole else b""


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"the time {text!r} has no time zone")
    return time.astimezone(UTC)
