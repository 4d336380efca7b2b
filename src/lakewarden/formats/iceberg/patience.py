"""Catalogs that are waited for, but not for ever.

PyIceberg sets no time limit for requests to a REST catalog: one that takes the call and stays silent
would hold whoever asks for good.  (Of `auth.type=oauth2` it asks for tokens in a way of its own, which
has no limit either, and none here.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from pyiceberg.catalog import (
    PY_CATALOG_IMPL,
    TYPE,
    URI,
    Catalog,
    CatalogType,
    infer_catalog_type,
    load_catalog,
)
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.utils.config import Config, merge_config
from requests import Session


class PatientCatalog(RestCatalog):
    """A REST catalog with a time limit for every request that has none."""

    #: Seconds until it takes the call, and between two signs of life; commits may take a while.
    patience: ClassVar[tuple[float, float]] = (10.0, 300.0)

    def _config_headers(self, session: Session) -> None:
        # The first that is done with a session: a token may be asked for with the next.
        self._limit(session)
        super()._config_headers(session)

    def _create_session(self) -> Session:
        session = super()._create_session()
        # There may be more by now: one that signs requests.
        self._limit(session)
        return session

    def _limit(self, session: Session) -> None:
        for adapter in session.adapters.values():
            adapter.send = _limited(adapter.send, self.patience)  # type: ignore[method-assign]


def _limited(send: Callable[..., Any], patience: tuple[float, float]) -> Callable[..., Any]:
    def limited(*arguments: Any, timeout: Any = None, **more: Any) -> Any:
        return send(*arguments, timeout=patience if timeout is None else timeout, **more)

    return limited


def open_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """Return a catalog of PyIceberg's configuration, with further settings."""
    merged = merge_config(Config().get_catalog_config(name) or {}, cast(Any, dict(properties)))
    if PY_CATALOG_IMPL in properties or not _is_rest(name, merged):
        return load_catalog(name, **properties)
    return PatientCatalog(name, **cast(dict[str, str], merged))


def _is_rest(name: str, properties: Mapping[str, Any]) -> bool:
    if not properties.get(URI):
        # PyIceberg has a message for it.
        return False
    kind = properties.get(TYPE)
    if kind is not None:
        return str(kind).lower() == CatalogType.REST.value
    return infer_catalog_type(name, dict(properties)) is CatalogType.REST
