"""How users name Iceberg tables.  Apart from `catalog`, which loads PyIceberg."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from lakewarden.errors import ErrorKind, UsageError

SCHEME = "iceberg://"
Identifier = tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class CatalogTarget:
    """Tables of a catalog: one, those of a namespace, or all."""

    catalog: str
    #: Of a namespace or a table, as written; empty for the whole catalog.
    parts: Identifier = ()

    @classmethod
    def parse(cls, text: str) -> CatalogTarget:
        """Read `iceberg://CATALOG/NAMESPACE.TABLE`; a dot inside a name is written %2E."""
        catalog, _, rest = text[len(SCHEME) :].rstrip("/").partition("/")
        parts = tuple(unquote(part) for part in rest.split(".")) if rest else ()
        if not catalog or "/" in rest or not all(parts):
            raise UsageError(
                ErrorKind.USAGE,
                f"{text!r} names no Iceberg table; write iceberg://CATALOG/NAMESPACE.TABLE, "
                "iceberg://CATALOG/NAMESPACE or iceberg://CATALOG",
            )
        return cls(unquote(catalog), parts)

    @property
    def uri(self) -> str:
        names = ".".join(quote(part, safe="").replace(".", "%2E") for part in self.parts)
        root = f"{SCHEME}{quote(self.catalog, safe='')}"
        return f"{root}/{names}" if names else root
