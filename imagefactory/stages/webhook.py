"""One JSON document to an address that the user names, as a chat or a monitor takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from imagefactory.access import Access, package_index
from imagefactory.errors import CheckFailedError, UsageError, os_problem
from imagefactory.http import LOOPBACK, Login, Patience, RefusedError, TransientError, Web, check_address, network_of_name

LARGEST = 4096
_WEBHOOK = "pass https://..., or the path of a file that holds the address"


def read_address(given: str) -> str:
    """Return the address, or the first line of the file that holds it: it may be a secret.

    Raises UsageError for what is no https:// address, or http:// of this machine. No message repeats it.
    """
    text = given
    if "://" not in given:
        try:
            with Path(given).expanduser().open(encoding="utf-8") as file:
                text = file.read(LARGEST).strip()
        except OSError as error:
            raise UsageError(*os_problem("read", given, error), hint=_WEBHOOK) from error
        except UnicodeDecodeError as error:
            raise UsageError("webhook-not-utf8", f"{given} is not UTF-8", hint=_WEBHOOK) from error
    try:
        parts = urlsplit(text)
        check_address(text)
        local = parts.scheme == "http" and network_of_name(parts.hostname or "") == LOOPBACK
    except (ValueError, RefusedError):
        parts, local = urlsplit(""), False
    if not (parts.hostname and (parts.scheme == "https" or local)) or not text.isprintable() or " " in text:
        raise UsageError(
            "webhook-invalid",
            "the --webhook address must start with https://",
            hint="http:// is allowed only for a service on this machine",
        )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hook:
    """How the address is reached: by the environment's proxy, and with the user's netrc."""

    certificates: str
    proxy: str = ""

    def login(self, url: str) -> Login:  # noqa: ARG002
        return None


def post_json(
    access: Access, url: str, value: Mapping[str, object], patience: Patience | None = None
) -> None:
    """Send the document, trying again what may pass. Raises CheckFailedError where nobody took it."""
    hook = _Hook(certificates=package_index(access).certificates)
    host = urlsplit(url).netloc.rpartition("@")[2]
    web = Web(hook, patience=patience or Patience(attempts=3))
    headers, data = {"Content-Type": "application/json"}, json.dumps(value).encode()

    def send() -> None:
        with web.open(url, method="POST", headers=headers, data=data):
            pass

    try:
        web.patience.retry(send)
    except (TransientError, RefusedError) as error:
        raise CheckFailedError(
            "webhook-failed",
            f"{host} did not accept the report of the nightly run: {_without(url, str(error))}",
            hint="check the address of --webhook",
        ) from None
    finally:
        web.close()


def _without(url: str, text: str) -> str:
    """A reason without the path and query of the address, which may be a secret."""
    parts = urlsplit(url)
    for secret in (url, parts.path.strip("/"), parts.query):
        text = text.replace(secret, "...") if secret else text
    return text
