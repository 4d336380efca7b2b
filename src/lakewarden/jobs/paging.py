"""Page tokens: opaque to callers, and Lakekeeper's in form (URL-safe base64, the format's number first)."""

from __future__ import annotations

import base64
import binascii

from lakewarden.jobs.refusals import RequestRefused, bad_request

#: The number of the format.
_BEGIN = "1&"


def page_token(after: str) -> str:
    """Return what a caller sends to see what comes after a row."""
    return base64.urlsafe_b64encode(f"{_BEGIN}{after}".encode()).decode().rstrip("=")


def read_page_token(token: str) -> str:
    """Return what a token was made from, or refuse it."""
    try:
        padded = token.encode("ascii") + b"=" * (-len(token) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (UnicodeError, binascii.Error):
        raise bad_request(
            "PaginateTokenDecodeError", "the page token cannot be read; take it from the last page"
        ) from None
    if not text.startswith(_BEGIN):
        raise strange_token()
    return text.removeprefix(_BEGIN)


def strange_token() -> RequestRefused:
    """Return the refusal of a token that can be read, and was made by nobody here."""
    return bad_request(
        "PaginateTokenParseError", "the page token is not one of ours; take it from the last page"
    )
