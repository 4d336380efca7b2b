"""The one place that turns obstore's errors into ours.

obstore appends a dump of Rust structures and whole answers of the server to its messages; all a
reader needs is what failed, the server's code, and what to do.  URLs are left out because some
carry signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions

from lakewarden.errors import AlreadyExists, ErrorKind, NotFound, StorageError

#: Everything a call into obstore raises on purpose; it uses built-in errors for some cases.
RAISED = (exceptions.BaseError, FileNotFoundError, ValueError, TypeError, TimeoutError, OSError)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)|\"code\": ?\"(\w+)\"")
_URL = re.compile(r"\b[a-z]+://\S+")
_METADATA_SERVICES = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "fd00:ec2")
_DENIED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_TRANSIENT_CODES = (
    "SlowDown",
    "InternalError",
    "ServerBusy",
    "RequestTimeout",
    "OperationTimedOut",
)
_TRANSIENT_STATUS = ("408", "429", "500", "502", "503", "504")


@contextmanager
def translated(action: str, place: str) -> Iterator[None]:
    """Run a call into obstore that does `action` ("read", "list") at `place` (a URI)."""
    try:
        yield
    except RAISED as error:
        # Not chained: the cause's text is the dump this module exists to keep out.
        raise translate(error, action, place) from None


def translate(error: Exception, action: str, place: str) -> StorageError:
    """Return the error to raise instead."""
    status, code = server_said(error)
    if isinstance(error, exceptions.AlreadyExistsError):
        return AlreadyExists(f"{place} already exists and was left as it is")
    no_bucket = code in _NO_BUCKET or (status == "404" and not isinstance(error, FileNotFoundError))
    if isinstance(error, FileNotFoundError) and not no_bucket:
        return NotFound(f"{place} does not exist")
    said = " ".join(filter(None, (status, code))) or short(headline(error))
    kind, reason = (
        (
            ErrorKind.NOT_FOUND,
            f"the bucket or container does not exist ({said}); check its name and the endpoint",
        )
        if no_bucket
        else _diagnosed(error, said)
    )
    return StorageError(kind, f"cannot {action} {place}: {reason}")


def _diagnosed(error: Exception, said: str) -> tuple[ErrorKind, str]:
    text = headline(error)
    status, code = server_said(error)
    if isinstance(error, exceptions.InvalidPathError | ValueError | TypeError):
        return ErrorKind.STORAGE, (
            f"the storage client cannot address a key there ({short(text)}); nothing below this "
            "location can be judged until that object is renamed or removed"
        )
    if any(service in text for service in _METADATA_SERVICES):
        return ErrorKind.ACCESS_DENIED, (
            "no credentials were found; set them in the environment or as storage options, or "
            "skip_signature=true for a public bucket"
        )
    if (
        status in ("401", "403")
        or code in _DENIED
        or isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
    ):
        return ErrorKind.ACCESS_DENIED, (
            f"the store refused the credentials or they lack the permission ({said}); check the keys "
            "and the bucket's policy"
        )
    if "error sending request" in text and not status:
        return ErrorKind.STORAGE, (
            "the endpoint did not answer; check its address, the region and the network"
        )
    return ErrorKind.STORAGE, f"{said}; {_advice(text)}"


def is_transient(error: Exception) -> bool:
    """Tell whether the same request may succeed a little later."""
    status, code = server_said(error)
    return (
        status in _TRANSIENT_STATUS
        or code in _TRANSIENT_CODES
        or "timed out" in headline(error).lower()
    )


def server_said(error: Exception) -> tuple[str, str]:
    """Return the HTTP status and the server's error code, empty where unknown."""
    text = headline(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    return (
        status.group(1) if status else "",
        next(filter(None, code.groups())) if code else "",
    )


def headline(error: Exception) -> str:
    """Return the message without the dump."""
    return str(error).partition("\n\nDebug source")[0]


def short(text: str) -> str:
    """Return `text` in one line, without URLs and not too long."""
    shown = " ".join(_URL.sub("…", text).split())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return shown if len(shown) <= 200 else f"{shown[:199]}…"


def _advice(text: str) -> str:
    if "configured region" in text:
        return "set the bucket's region with the storage option region"
    if "builder error" in text:
        return "check the endpoint; plain http needs the storage option allow_http=true"
    return "try again later"
