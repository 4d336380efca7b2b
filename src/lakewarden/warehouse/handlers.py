"""Commit handlers: where the versions of a warehouse are claimed, one writer each.

A handler promises:

1. `claim` succeeds for exactly one of any number of writers of one version.  `AlreadyExists` says that
   somebody has it, perhaps this writer by a try whose answer was lost; any other error says nothing.
2. `head` is the newest version that was claimed before the call.
3. `read` of a claimed version returns what was claimed, until it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import sqlalchemy as sa

from lakewarden.errors import AlreadyExists, ErrorKind, NotFound, StorageError
from lakewarden.storage.store import DELETE_BATCH_MAX, Deletion, Store


@contextmanager
def _translated() -> Iterator[None]:
    """Turn the database's errors into ours, but for the one that decides."""
    try:
        yield
    except sa.exc.IntegrityError:
        raise
    except sa.exc.SQLAlchemyError as error:
        said = " ".join(str(getattr(error, "orig", None) or error).split())[:200]
        raise StorageError(
            ErrorKind.STORAGE,
            f"the database that holds the warehouse's versions failed: {said}; check its address and "
            "that it is running",
        ) from None


#: Names count down, so that the newest version is the first of a listing.
_LAST = 2**64 - 1
_SUFFIX = ".json"


class ReadHandler(Protocol):
    """What can be known of the versions without changing any."""

    def head(self) -> int:
        """Return the newest version; 0 if there is none."""
        ...

    def read(self, version: int) -> bytes:
        """Return what was claimed, or raise NotFound."""
        ...

    def versions(self) -> Iterator[int]:
        """Yield all versions that are there, newest first."""
        ...


class CommitHandler(ReadHandler, Protocol):
    """Decides who gets a version."""

    def claim(self, version: int, data: bytes) -> None:
        """Take a version, or raise AlreadyExists."""
        ...

    def forget(self, versions: Sequence[int]) -> None:
        """Take versions away; those that are gone already are no error."""
        ...


class StoreHandler:
    """Versions as objects: the store's create-if-absent decides."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def head(self) -> int:
        return next(self.versions(), 0)

    def versions(self) -> Iterator[int]:
        for batch in self._store.list(self._prefix):
            for key in batch.column("key").to_pylist():
                name = key.rpartition("/")[2].removesuffix(_SUFFIX)
                if len(name) == 20 and name.isdecimal():
                    yield _LAST - int(name)

    def read(self, version: int) -> bytes:
        return self._store.get(self.key(version))

    def claim(self, version: int, data: bytes) -> None:
        self._store.put_if_absent(self.key(version), data)

    def forget(self, versions: Sequence[int]) -> None:
        keys = [self.key(version) for version in versions]
        for start in range(0, len(keys), DELETE_BATCH_MAX):
            for result in self._store.delete(keys[start : start + DELETE_BATCH_MAX]):
                if result.outcome is Deletion.FAILED:
                    raise StorageError(
                        ErrorKind.STORAGE, f"cannot delete {result.key}: {result.error}"
                    )

    def key(self, version: int) -> str:
        return f"{self._prefix}/{_LAST - version:020d}{_SUFFIX}"


_METADATA = sa.MetaData()
_VERSIONS = sa.Table(
    "lakewarden_versions",
    _METADATA,
    sa.Column("warehouse", sa.String(1024), primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)


def _create_tables(engine: sa.Engine) -> None:
    try:
        _METADATA.create_all(engine)
    except sa.exc.SQLAlchemyError:
        # Somebody else may have been faster.
        if not sa.inspect(engine).has_table(_VERSIONS.name):
            raise


class SqlHandler:
    """Versions as rows, for stores without create-if-absent: the primary key decides."""

    def __init__(self, engine: sa.Engine, warehouse: str) -> None:
        self._engine = engine
        self._mine = _VERSIONS.c.warehouse == warehouse
        self._warehouse = warehouse
        with _translated():
            _create_tables(engine)

    def head(self) -> int:
        with _translated(), self._engine.connect() as connection:
            newest = sa.select(sa.func.max(_VERSIONS.c.version)).where(self._mine)
            return connection.scalar(newest) or 0

    def versions(self) -> Iterator[int]:
        with _translated(), self._engine.connect() as connection:
            query = sa.select(_VERSIONS.c.version).where(self._mine)
            found = connection.scalars(query.order_by(_VERSIONS.c.version.desc())).all()
        yield from found

    def read(self, version: int) -> bytes:
        with _translated(), self._engine.connect() as connection:
            query = sa.select(_VERSIONS.c.data).where(self._mine, _VERSIONS.c.version == version)
            data = connection.scalar(query)
        if data is None:
            raise NotFound(f"version {version} of warehouse {self._warehouse} is not in the log")
        return bytes(data)

    def claim(self, version: int, data: bytes) -> None:
        newest = sa.select(sa.func.coalesce(sa.func.max(_VERSIONS.c.version), 0)).where(self._mine)
        row = sa.select(
            sa.literal(self._warehouse), sa.literal(version), sa.literal(data, sa.LargeBinary)
        ).where(newest.scalar_subquery() < version)
        insert = sa.insert(_VERSIONS).from_select(["warehouse", "version", "data"], row)
        taken = AlreadyExists(f"version {version} of warehouse {self._warehouse} is taken")
        try:
            with _translated(), self._engine.begin() as connection:
                done = connection.execute(insert, execution_options={"preserve_rowcount": True})
                if not done.rowcount:
                    raise taken
        except sa.exc.IntegrityError:
            raise taken from None

    def forget(self, versions: Sequence[int]) -> None:
        with _translated(), self._engine.begin() as connection:
            for start in range(0, len(versions), DELETE_BATCH_MAX):
                some = _VERSIONS.c.version.in_(versions[start : start + DELETE_BATCH_MAX])
                connection.execute(sa.delete(_VERSIONS).where(self._mine, some))
