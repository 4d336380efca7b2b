"""When two spellings name the same place.

Everything that compares places (is this file inside that table, do two tables overlap) compares
`Location`s, never strings: a comparison that misses an equal spelling deletes somebody's data.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

from lakewarden.errors import ErrorKind, UsageError

#: Accepted spellings of each kind of store.
SCHEMES = {
    "file": "file",
    "file-object-store": "file",
    "s3": "s3",
    "s3a": "s3",
    "s3n": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "wasb": "az",
    "wasbs": "az",
    "memory": "memory",
}

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_FILE_WITHOUT_AUTHORITY = re.compile(
    r"(?:file|file-object-store):(/(?!/).*)", re.DOTALL | re.IGNORECASE
)
_AZURE_HOST = re.compile(r"([^.]+)\.(?:dfs|blob)\.core\.windows\.net", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A place in a store, in the only spelling it has here.

    `authority` is the bucket or container (`container@account` on Azure, where the account is
    known) and empty on the local disk; `path` has neither outer slashes nor empty, `.` or `..`
    segments.
    """

    scheme: str
    authority: str
    path: str

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Return the location `uri` names; local paths become absolute and links resolved."""
        if not uri:
            raise UsageError(ErrorKind.USAGE, "the location is empty; give a path or a URI")
        if found := _FILE_WITHOUT_AUTHORITY.fullmatch(uri):
            return cls._local(unquote(found.group(1)), uri)
        found = _URI.fullmatch(uri)
        if found is None:
            return cls._local(os.path.expanduser(uri), uri)  # noqa: PTH111  # leaves unknown users
        scheme, rest = found.group(1).lower(), found.group(2)
        authority, _, path = rest.partition("/")
        match _known(scheme, uri):
            case "file":
                if authority not in ("", "localhost"):
                    raise UsageError(
                        ErrorKind.USAGE,
                        f"{uri!r} names the host {authority!r}, but only this machine's files can "
                        "be reached; write file:///path with three slashes",
                    )
                return cls._local(unquote("/" + path), uri)
            case "az":
                return cls("az", _azure_authority(authority, uri), _normalised(path))
            case known:
                return cls(known, _bucket(authority, uri), _normalised(path))

    @classmethod
    def parse_absolute(cls, uri: str) -> Self | None:
        """Return the location of a URI somebody else wrote down; None if it does not say where.

        A relative path was relative to a working directory we do not know.
        """
        if not uri.startswith("/") and _URI.fullmatch(uri) is None:
            return None
        try:
            return cls.parse(uri)
        except UsageError:
            return None

    @classmethod
    def _local(cls, path: str, uri: str) -> Self:
        try:
            real = os.path.realpath(path)
        except ValueError as error:
            raise UsageError(
                ErrorKind.USAGE, f"{uri!r} is no path ({error}); check the spelling"
            ) from error
        return cls("file", "", real.strip("/"))

    @property
    def uri(self) -> str:
        """The canonical spelling: the plain absolute path for local files."""
        if self.scheme == "file":
            return f"/{self.path}"
        root = f"{self.scheme}://{self.authority}"
        if self.scheme == "az" and "@" in self.authority:
            container, _, account = self.authority.partition("@")
            host = account if "." in account else f"{account}.dfs.core.windows.net"
            root = f"abfss://{container}@{host}"
        return f"{root}/{self.path}" if self.path else root

    @property
    def is_local(self) -> bool:
        return self.scheme == "file"

    @property
    def key(self) -> str:
        """What the store of this location calls it."""
        return self.path

    @property
    def store(self) -> Self:
        """The root of the store this location is in."""
        return type(self)(self.scheme, self.authority, "")

    @property
    def parent(self) -> Self:
        """The directory above; a root is its own parent."""
        return type(self)(self.scheme, self.authority, self.path.rpartition("/")[0])

    def child(self, relative: str) -> Self:
        """Return the location `relative` below this one; raise ValueError if it climbs out."""
        if ".." in relative.split("/"):
            raise ValueError(f"{relative!r} climbs out of {self.uri}")
        below = _normalised(relative)
        path = f"{self.path}/{below}" if self.path and below else self.path or below
        return type(self)(self.scheme, self.authority, path)

    def contains(self, other: Location) -> bool:
        """Tell whether `other` is strictly inside, segment by segment: `t` has no `t_backup`."""
        if (self.scheme, self.authority) != (other.scheme, other.authority):
            return False
        return other.path != self.path and (not self.path or other.path.startswith(f"{self.path}/"))

    def relative(self, other: Location) -> str:
        """Return the path of `other` below this location; raise ValueError if it is outside."""
        if other == self:
            return ""
        if not self.contains(other):
            raise ValueError(f"{other.uri} is not inside {self.uri}")
        return other.path[len(self.path) + 1 :] if self.path else other.path

    def __str__(self) -> str:
        return self.uri


def _known(scheme: str, uri: str) -> str:
    if scheme in SCHEMES:
        return SCHEMES[scheme]
    if scheme in ("http", "https"):
        raise UsageError(
            ErrorKind.USAGE,
            f"{uri!r} is a web address, but maintenance needs direct storage access; give the "
            "table's storage location such as s3://bucket/table",
        )
    raise UsageError(
        ErrorKind.UNKNOWN_SCHEME,
        f"unknown scheme {scheme!r} in {uri!r}; use a local path or one of "
        + ", ".join(f"{name}://" for name in SCHEMES),
    )


def _bucket(authority: str, uri: str) -> str:
    if not authority:
        raise UsageError(
            ErrorKind.USAGE, f"{uri!r} names no bucket; write scheme://bucket/path with two slashes"
        )
    if "@" in authority:
        # Not shown: what stands before the @ is usually a secret.
        raise UsageError(
            ErrorKind.USAGE,
            "the location carries credentials before an @, which would end up in logs and plans; "
            "pass them as storage options or in the environment",
        )
    return authority


def _azure_authority(authority: str, uri: str) -> str:
    container, _, host = authority.partition("@")
    _bucket(container, uri)
    if not host:
        return container
    known = _AZURE_HOST.fullmatch(host)
    # Hosts outside the public cloud stay whole: they are the endpoint to talk to.
    return f"{container}@{(known.group(1) if known else host).lower()}"


def _normalised(path: str) -> str:
    """Resolve empty, `.` and `..` segments; percent signs are ordinary in object keys."""
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/".join(segments)
