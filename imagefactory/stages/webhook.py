"""One JSON document to an address that the user names, as a chat or a monitor takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from imagefactory.access import Access, package_index
from imagefactory.errors import CheckFailedError, UsageError
from imagefactory.web import (
    LOOPBACK,
    Patience,
    RefusedError,
    TransientError,
    check_address,
    may_pass,
    network_of_name,
    open_session,
    reason_of,
    retry_after,
)

LARGEST = 4096


def read_address(given: str) -> str:
    """Return the address, or the first line of the file that holds it: it may be a secret.

    Raises UsageError for what is no https:// address, or http:// of this machine. No message repeats it.
    """
    text = given
    if "://" not in given:
        try:
            with Path(given).expanduser().open(encoding="utf-8") as file:
                text = file.read(LARGEST).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--webhook: cannot read the file {given}: {getattr(error, 'strerror', 'not UTF-8')}",
                hint="write https://..., or the path of a file that holds the address",
            ) from error
    try:
        parts = urlsplit(text)
        check_address(text)
        local = parts.scheme == "http" and network_of_name(parts.hostname or "") == LOOPBACK
    except (ValueError, RefusedError):
        parts, local = urlsplit(""), False
    if not (parts.hostname and (parts.scheme == "https" or local)) or not text.isprintable() or " " in text:
        raise UsageError(
            "--webhook: the address must begin with https://",
            hint="only a service on this machine may be reached by http://",
        )
    return text


def post_json(
    access: Access, url: str, value: Mapping[str, object], patience: Patience | None = None
) -> None:
    """Send the document, trying again what may pass. Raises CheckFailedError where nobody took it."""
    import requests

    patience = patience or Patience(attempts=3)
    host = urlsplit(url).netloc.rpartition("@")[2]
    session = open_session(netrc=False)
    data = json.dumps(value).encode()

    def send() -> None:
        try:
            with session.post(
                url,
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=(patience.connect, patience.read),
                allow_redirects=False,
                stream=True,
                verify=package_index(access).certificates or True,
            ) as response:
                status, after = response.status_code, retry_after(response.headers)
        except requests.exceptions.RequestException as error:
            raise TransientError(_without(url, reason_of(error))) from None
        if may_pass(status):
            raise TransientError(f"it answered {status}", after=after, status=status)
        if status >= 300:
            raise RefusedError(f"it answered {status}", status=status)

    try:
        patience.retry(send)
    except (TransientError, RefusedError) as error:
        raise CheckFailedError(
            f"--webhook: {host} did not take the night: {error}", hint="check the address that you gave"
        ) from None
    finally:
        session.close()


def _without(url: str, text: str) -> str:
    """A reason without the path and query of the address, which may be a secret."""
    parts = urlsplit(url)
    for secret in (url, parts.path.strip("/"), parts.query):
        text = text.replace(secret, "...") if secret else text
    return text
