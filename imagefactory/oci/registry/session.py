"""Requests to one registry: signed, sent, tried again with patience, and told of where they fail."""

from __future__ import annotations

import requests

REFUSALS = 3  # in a row, each of a token made just before


TLS_FOR_GOOD = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_PLAIN = "does {host} speak plain http? then name it in the setting `plain-http`"
HINTS = (
    ("CERTIFICATE_VERIFY_FAILED", "set `certificates` (imagefactory.toml) to a file with the CA of {host}"),
    ("WRONG_VERSION_NUMBER", _PLAIN),
    ("RECORD_LAYER_FAILURE", _PLAIN),
    ("HTTP_REQUEST", _PLAIN),
    ("HTTP request to an HTTPS server", "{host} speaks https: take it out of the setting `plain-http`"),
    ("Connection refused", "is a registry running at {host}?"),
    ("resolve", "is {host} spelled right, and is there a network?"),
    ("no space left", "the registry's disk is full: prune it, then run the same command again"),
    ("507 ", "the registry is full: prune it, then run the same command again"),
    ("413 ", "a proxy before the registry limits the size of a request: ask who runs {host}"),
)


class Connection(requests.Session):
    """Follows redirects with nothing of ~/.netrc, and not from https to http."""

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        came, goes = response.request.url or "", prepared_request.url or ""
        if came.startswith("https:") and not goes.startswith("https:"):
            raise requests.exceptions.InvalidSchema(f"it redirects from https to {goes}")
        if self.should_strip_auth(came, goes):  # type: ignore[no-untyped-call]
            prepared_request.headers.pop("Authorization", None)


class Signature(requests.auth.AuthBase):
    """An Authorization header; being there at all, it keeps requests from looking into ~/.netrc."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request
