"""Catalogs of the user's PyIceberg configuration: which tables there are, and the commit.

PyIceberg reads and writes metadata files through a `FileIO`; ours goes through our own stores, so
requests are counted and credentials are the same everywhere.  Two uses:

- To *locate* a table only its pointer is wanted.  Catalogs that keep a pointer (SQL, Hive, Glue,
  DynamoDB) hand it to the `FileIO`, which stops right there: no request, nothing parsed.
- To *commit*, the `FileIO` refuses to read any metadata file but the one the plan was made from.
  The catalog then swaps the pointer with its own compare-and-swap, so plan and commit are one.
  What is written is the old file without what goes: fields that PyIceberg does not know survive.

A REST catalog has no requirement that says "nothing has changed".  There the answer is checked
instead: the new metadata names the file it was made from, and if that is another one, whatever the
commit took away from somebody is put back before any file is deleted.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
)
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table.metadata import TableMetadata, TableMetadataV1
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemovePartitionStatisticsUpdate,
    RemoveSnapshotRefUpdate,
    RemoveSnapshotsUpdate,
    RemoveStatisticsUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)

from lakewarden.errors import (
    Conflict,
    Damaged,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    StorageError,
    UsageError,
)
from lakewarden.formats.iceberg.metadata import Removal, packed, unpacked, without
from lakewarden.formats.iceberg.paths import place
from lakewarden.formats.iceberg.patience import open_catalog
from lakewarden.formats.iceberg.target import CatalogTarget, Identifier
from lakewarden.storage.location import Location
from lakewarden.storage.store import ReadStore, Store

_IO = "lakewarden.access"
#: Opens the store that a location is in.
Opening = Callable[[Location], Store]
ReadOpening = Callable[[Location], ReadStore]
_Change = Callable[[Mapping[str, Any]], dict[str, Any]]

#: PyIceberg's names of storage settings, and ours.
_OPTIONS = {
    "s3.endpoint": "aws_endpoint",
    "s3.access-key-id": "aws_access_key_id",
    "s3.secret-access-key": "aws_secret_access_key",
    "s3.session-token": "aws_session_token",
    "s3.region": "aws_region",
    "s3.anonymous": "aws_skip_signature",
    "s3.force-virtual-addressing": "aws_virtual_hosted_style_request",
    "s3.proxy-uri": "proxy_url",
    "client.access-key-id": "aws_access_key_id",
    "client.secret-access-key": "aws_secret_access_key",
    "client.session-token": "aws_session_token",
    "client.region": "aws_region",
    "gcs.service.host": "google_base_url",
    "adls.account-name": "azure_storage_account_name",
    "adls.account-key": "azure_storage_account_key",
    "adls.sas-token": "azure_storage_sas_token",
    "adls.tenant-id": "azure_storage_tenant_id",
    "adls.client-id": "azure_storage_client_id",
    "adls.client-secret": "azure_storage_client_secret",
    "adls.token": "azure_storage_token",
}


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a table's current metadata is."""

    table: CatalogTarget
    metadata_location: str
    #: The table's location and the storage options that the catalog hands out for it, in our
    #: names; a catalog that only keeps a pointer says neither.
    location: str | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)


class Lake:
    """The catalogs that targets name, each opened once."""

    def __init__(
        self,
        properties: Mapping[str, str] | None = None,
        catalogs: Mapping[str, Catalog] | None = None,
    ) -> None:
        self._properties = dict(properties or {})
        self._open: dict[str, Catalog] = dict(catalogs or {})

    def catalog(self, name: str) -> Catalog:
        if name not in self._open:
            try:
                self._open[name] = open_catalog(name, self._properties)
            except Exception as error:
                raise UsageError(
                    ErrorKind.CATALOG,
                    f"catalog {name!r} cannot be opened ({_first_line(error)}); check PyIceberg's "
                    "configuration (.pyiceberg.yaml), or say more: --catalog-property uri=…, over HTTP "
                    "catalog-properties",
                ) from error
        if getattr(self._open[name], "keeps_versions", False):
            raise Refused(
                ErrorKind.IN_WAREHOUSE,
                f"catalog {name!r} is a warehouse, and only its log knows which snapshots and files "
                "tags, branches and restores need; nothing goes: clean the warehouse itself, lakewarden "
                "cleanup WAREHOUSE",
            )
        return self._open[name]

    def storage_options(self, name: str) -> dict[str, str]:
        """Return the storage settings of a catalog, in our names."""
        return storage_options(self.catalog(name).properties)

    def warehouse(self, name: str) -> Location | None:
        """Return where a catalog puts its tables, if it says so."""
        found = self.catalog(name).properties.get("warehouse")
        return place(str(found)) if found else None

    def tables(self, target: CatalogTarget) -> list[CatalogTarget]:
        """Return the tables a target means."""
        catalog = self.catalog(target.catalog)
        with _speaking_of(target):
            if len(target.parts) > 1 and self._exists(target):
                return [target]
            found = sorted(_tables_below(catalog, target.parts))
            if not found and target.parts and not _is_namespace(catalog, target.parts):
                raise NotFound(
                    f"{target.uri} is neither a table nor a namespace of the catalog; check the "
                    "spelling"
                )
            if not found:
                raise NotFound(f"{target.uri} holds no table, so there is nothing to do")
        return [CatalogTarget(target.catalog, identifier) for identifier in found]

    def _exists(self, table: CatalogTarget) -> bool:
        try:
            self.locate(table)
        except NotFound:
            return False
        return True

    def load(self, table: CatalogTarget) -> IcebergTable:
        """Return a table as PyIceberg has it."""
        with _speaking_of(table):
            return self.catalog(table.catalog).load_table(table.parts)

    def locate(self, table: CatalogTarget) -> Pointer:
        """Return a table's pointer, without reading the metadata where the catalog allows it."""
        base = self.catalog(table.catalog)
        pointing = _with_access(base, _Pointing())
        with _speaking_of(table):
            try:
                loaded = pointing.load_table(table.parts)
            except _Pointed as found:
                return Pointer(table, found.location)
        own = {name: str(value) for name, value in loaded.io.properties.items() if name != _IO}
        _refuse_signing(own, table)
        return Pointer(
            table, loaded.metadata_location, loaded.metadata.location, storage_options(own)
        )

    def read(self, pointer: Pointer, opening: ReadOpening) -> bytes:
        """Return a table's metadata file."""
        return _get(opening, pointer.metadata_location)

    def committing(self, pointer: Pointer, opening: Opening) -> Commit:
        """Return what can commit to a table, if it is still as the pointer says."""
        return Commit(self.catalog(pointer.table.catalog), pointer, opening)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit led to."""

    metadata_location: str
    #: Files that the metadata log named before; the catalog's own doing where it is a service.
    log_before: Sequence[str]
    log_after: Sequence[str]
    properties: Mapping[str, str]
    #: Whether removing metadata files that fell out of the log is the writer's duty.
    writes_metadata: bool


class Commit:
    """Takes snapshots out of one table's metadata."""

    def __init__(self, catalog: Catalog, pointer: Pointer, opening: Opening) -> None:
        self._catalog = catalog
        self._pointer = pointer
        self._opening = opening

    def remove(self, removal: Removal, *, now_ms: int) -> Committed:
        """Commit the removal.  Raises Conflict if the table is not what it was."""
        with _speaking_of(self._pointer.table):
            if isinstance(self._catalog, MetastoreCatalog):
                return self._swap(self._catalog, removal, now_ms)
            return self._ask(removal, now_ms)

    def _swap(self, catalog: MetastoreCatalog, removal: Removal, now_ms: int) -> Committed:
        """Write the new metadata file and let the catalog move its pointer.

        The catalog sees a slight version of the metadata: it loads, changes and stores that, and
        in its place the real one is written, in which nothing but what goes is different.
        """
        # A SQL catalog keeps a pointer and nothing else; others show columns to those who browse.
        columns = not isinstance(catalog, SqlCatalog)
        change = partial(
            without, removal=removal, location=self._pointer.metadata_location, now_ms=now_ms
        )
        slight = partial(_slight, columns=columns)
        writing = _Writing(self._pointer.metadata_location, self._opening, change, slight)
        mine = _with_access(catalog, writing)
        try:
            before = mine.load_table(self._pointer.table.parts)
            response = mine.commit_table(
                before, (), (RemoveSnapshotsUpdate(snapshot_ids=[_SLIGHT_SNAPSHOT]),)
            )
            now = response.metadata_location
        except CommitFailedException as error:
            now = self._where()
            if now not in writing.written:
                # The pointer was not moved, so nobody has seen the file that was written for it.
                writing.discard()
                raise _conflict(self._pointer, str(error)) from error
        return Committed(
            now,
            _log(writing.before),
            _log(writing.after),
            writing.after.get("properties", {}),
            writes_metadata=True,
        )

    def _where(self) -> str:
        """Return where the table's metadata is now."""
        pointing = _with_access(self._catalog, _Pointing())
        try:
            return pointing.load_table(self._pointer.table.parts).metadata_location
        except _Pointed as found:
            return found.location

    def _ask(self, removal: Removal, now_ms: int) -> Committed:
        """Let a service commit, and check what it was based on."""
        catalog = _with_access(self._catalog, _Reading(self._opening))
        try:
            before = catalog.load_table(self._pointer.table.parts)
            _check_same(before.metadata_location, self._pointer.metadata_location)
            response = catalog.commit_table(
                before, _requirements(before.metadata), _updates(before.metadata, removal)
            )
        except CommitFailedException as error:
            raise _conflict(self._pointer, str(error)) from error
        log = response.metadata.metadata_log
        if not log:
            raise Refused(
                ErrorKind.CATALOG,
                f"{self._pointer.table.uri} was committed to, but its catalog does not say on what "
                "(it keeps no metadata log), so files stay: remove-orphans finds them",
            )
        if log[-1].metadata_file != self._pointer.metadata_location:
            try:
                self._put_back(catalog, before.metadata, response.metadata, now_ms)
            except Exception as error:
                raise Damaged(
                    ErrorKind.DAMAGED_REF,
                    f"{self._pointer.table.uri} was given a tag or branch while the commit was under "
                    f"way, and it could not be put back ({_first_line(error)}); its files were not "
                    f"touched: register {log[-1].metadata_file} to see what it was",
                ) from error
            raise _conflict(
                self._pointer, "it was changed while the commit was under way", landed=True
            )
        if removal.snapshot_ids & {one.snapshot_id for one in response.metadata.snapshots}:
            raise Refused(
                ErrorKind.CATALOG,
                f"{self._pointer.table.uri} was committed to, but still lists snapshots that were to "
                "go; no file was deleted: check the catalog",
            )
        return Committed(
            response.metadata_location,
            [entry.metadata_file for entry in before.metadata.metadata_log],
            [entry.metadata_file for entry in log],
            response.metadata.properties,
            writes_metadata=False,
        )

    def _put_back(
        self, catalog: Catalog, seen: TableMetadata, after: TableMetadata, now_ms: int
    ) -> None:
        """Bring back what the commit took from somebody who had committed meanwhile."""
        base = catalog.load_table(self._pointer.table.parts).io.new_input(
            after.metadata_log[-1].metadata_file
        )
        was = FromInputFile.table_metadata(base)
        lost = _what_was_lost(was, seen, after, now_ms)
        if lost:
            now = catalog.load_table(self._pointer.table.parts)
            catalog.commit_table(now, (AssertTableUUID(uuid=was.table_uuid),), lost)


def _check_same(found: str, expected: str) -> None:
    if found != expected:
        raise CommitFailedException("the table has been changed by someone else")


def _check_whole(raw: Mapping[str, Any]) -> None:
    """Refuse metadata in which something points to a snapshot that is not there."""
    there = {one["snapshot-id"] for one in raw.get("snapshots") or ()}
    needed = {ref["snapshot-id"] for ref in (raw.get("refs") or {}).values()}
    needed |= {raw.get("current-snapshot-id")} - {None, -1}
    if not needed <= there:
        raise CommitFailedException("a ref names a snapshot that was to go")


def _log(raw: Mapping[str, Any]) -> list[str]:
    return [entry["metadata-file"] for entry in raw.get("metadata-log", ())]


def _updates(before: TableMetadata, removal: Removal) -> tuple[TableUpdate, ...]:
    gone = removal.snapshot_ids
    statistics = {one.snapshot_id for one in before.statistics} & gone
    partitions = {one.snapshot_id for one in before.partition_statistics} & gone
    return (
        *(RemoveSnapshotRefUpdate(ref_name=name) for name in removal.refs),
        *(RemoveStatisticsUpdate(snapshot_id=one) for one in sorted(statistics)),
        *(RemovePartitionStatisticsUpdate(snapshot_id=one) for one in sorted(partitions)),
        *([RemoveSnapshotsUpdate(snapshot_ids=sorted(gone))] if gone else []),
    )


def _requirements(before: TableMetadata) -> tuple[TableRequirement, ...]:
    """Return what a REST catalog can check: the table, and every ref where it was."""
    return (
        AssertTableUUID(uuid=before.table_uuid),
        *(
            AssertRefSnapshotId(ref=name, snapshot_id=ref.snapshot_id)
            for name, ref in sorted(before.refs.items())
        ),
    )


def _what_was_lost(
    base: TableMetadata, seen: TableMetadata, after: TableMetadata, now_ms: int
) -> tuple[TableUpdate, ...]:
    """Return the updates that bring back refs made meanwhile, and what they need.

    No file has been deleted yet, so a snapshot is whole as soon as the metadata names it again.
    """
    still = {snapshot.snapshot_id for snapshot in after.snapshots}
    by_id = {snapshot.snapshot_id: snapshot for snapshot in base.snapshots}
    lost = {name: ref for name, ref in base.refs.items() if name not in after.refs}
    fresh = {name: ref for name, ref in lost.items() if seen.refs.get(name) != ref}
    needed = [ref.snapshot_id for ref in fresh.values() if ref.snapshot_id not in still]
    return (
        *(
            AddSnapshotUpdate(snapshot=_as_new(by_id[one], after, now_ms, step))
            for step, one in enumerate(dict.fromkeys(needed), 1)
        ),
        *(
            SetSnapshotRefUpdate(
                ref_name=name,
                type=ref.snapshot_ref_type,
                snapshot_id=ref.snapshot_id,
                max_ref_age_ms=ref.max_ref_age_ms,
                max_snapshot_age_ms=ref.max_snapshot_age_ms,
                min_snapshots_to_keep=ref.min_snapshots_to_keep,
            )
            for name, ref in fresh.items()
        ),
    )


def _as_new(snapshot: Snapshot, after: TableMetadata, now_ms: int, step: int) -> Snapshot:
    """Return a snapshot in a form that a catalog takes back: the newest in sequence and time.

    Its id and its files are the same; services refuse to add a snapshot that seems an old one.
    """
    anew: dict[str, int] = {"timestamp_ms": max(now_ms, after.last_updated_ms)}
    if not isinstance(after, TableMetadataV1):
        anew["sequence_number"] = after.last_sequence_number + step
    if after.format_version > 2:
        anew |= {"first_row_id": getattr(after, "next_row_id", 0) or 0, "added_rows": 0}
    return snapshot.model_copy(update=anew)


# -- catalogs ------------------------------------------------------------------------------------


def storage_options(properties: Mapping[str, Any]) -> dict[str, str]:
    """Translate PyIceberg's storage settings; the specific ones win over `client.*`."""
    found: dict[str, str] = {}
    for theirs, ours in _OPTIONS.items():
        if properties.get(theirs) is not None:
            found.setdefault(ours, str(properties[theirs]))
    return found


def pyiceberg_properties(options: Mapping[str, str]) -> dict[str, str]:
    """Translate our storage options into PyIceberg's, as far as it knows them."""
    found: dict[str, str] = {}
    for theirs, ours in _OPTIONS.items():
        if ours in options and not theirs.startswith("client."):
            found.setdefault(theirs, options[ours])
    return found


def _refuse_signing(properties: Mapping[str, str], table: CatalogTarget) -> None:
    if properties.get("s3.remote-signing-enabled", "").lower() == "true":
        raise Refused(
            ErrorKind.ACCESS_DENIED,
            f"{table.uri} is reached by remote signing only, and maintenance needs direct storage "
            "access; let the catalog vend credentials, or pass --storage-option",
        )


def _tables_below(catalog: Catalog, namespace: Identifier) -> Iterator[Identifier]:
    if namespace:
        try:
            yield from (tuple(identifier) for identifier in catalog.list_tables(namespace))
        except NoSuchNamespaceError:
            return
    for below in _namespaces_below(catalog, namespace):
        yield from _tables_below(catalog, below)


def _namespaces_below(catalog: Catalog, namespace: Identifier) -> list[Identifier]:
    """Return the namespaces one level down; catalogs without levels have none below the first."""
    try:
        found = [tuple(one) for one in catalog.list_namespaces(namespace)]
    except NoSuchNamespaceError:
        return []
    below = {one[: len(namespace) + 1] for one in found if len(one) > len(namespace)}
    return sorted(one for one in below if one[: len(namespace)] == namespace)


def _is_namespace(catalog: Catalog, parts: Identifier) -> bool:
    try:
        catalog.load_namespace_properties(parts)
    except NoSuchNamespaceError:
        return False
    return True


def _with_access(catalog: Catalog, access: _Access) -> Catalog:
    """Return the same catalog with metadata files read and written our way."""
    mine = copy.copy(catalog)
    mine.properties = {**catalog.properties, "py-io-impl": f"{__name__}.TableIO", _IO: access}
    return mine


class _speaking_of:  # noqa: N801  # reads as a clause
    """Turns what a catalog raises into one line that names the table."""

    def __init__(self, target: CatalogTarget) -> None:
        self._target = target

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, (LakewardenError, _Pointed)):
            return
        if isinstance(error, (NoSuchTableError, NoSuchNamespaceError)):
            raise NotFound(
                f"{self._target.uri} does not exist in the catalog; check the spelling"
            ) from error
        raise StorageError(
            ErrorKind.CATALOG,
            f"the catalog of {self._target.uri} did not answer as it should "
            f"({_first_line(error)}); check that it can be reached, and try again",
        ) from error


def _conflict(pointer: Pointer, found: str, *, landed: bool = False) -> Conflict:
    message = f"{pointer.table.uri} changed meanwhile ({_first_line(found)})"
    return Conflict(ErrorKind.CONFLICT, message, landed=landed)


def _first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


# -- metadata files ------------------------------------------------------------------------------


class _Pointed(Exception):  # noqa: N818  # no error: the answer
    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


class _Access(Protocol):
    def read(self, location: str) -> bytes: ...
    def write(self, location: str, _data: bytes, /) -> None: ...


class _Pointing:
    """Knows where the metadata is as soon as someone wants to read it."""

    def read(self, location: str) -> bytes:
        raise _Pointed(location)

    def write(self, location: str, _data: bytes) -> None:
        raise AssertionError(f"{location} is not to be written while looking")


class _Reading:
    """Reads metadata files; a catalog that is a service writes them itself."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening

    def read(self, location: str) -> bytes:
        return _get(self._opening, location)

    def write(self, location: str, _data: bytes) -> None:
        raise AssertionError(f"{location} is the catalog's to write")


class _Writing:
    """Reads one metadata file and no other, and writes its successor without losing a field."""

    def __init__(self, expected: str, opening: Opening, change: _Change, slight: _Change) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self._expected = expected
        self._opening = opening
        self._change = change
        self._slight = slight
        #: Files that were written, by their names in the catalog.
        self.written: dict[str, Location] = {}

    def read(self, location: str) -> bytes:
        _check_same(location, self._expected)
        if not self.before:
            self.before = json.loads(unpacked(_get(self._opening, location)))
        return packed(json.dumps(self._slight(self.before)).encode(), location)

    def write(self, location: str, _slight: bytes) -> None:
        self.after = self._change(self.before)
        _check_whole(self.after)
        found = place(location)
        if found is None:
            raise _unplaced(location)
        text = json.dumps(self.after, separators=(",", ":"), ensure_ascii=False).encode()
        self.written[location] = found
        self._opening(found).put_if_absent(found.key, packed(text, location))

    def discard(self) -> None:
        for found in self.written.values():
            self._opening(found).delete([found.key])


#: Stands for all that goes, in the version of the metadata that PyIceberg gets to see.
_SLIGHT_SNAPSHOT = 1
#: What grows with history, what PyIceberg does not always understand, and what is not needed to
#: move a pointer.
_HEAVY = frozenset(
    {
        "snapshots", "snapshot-log", "refs", "current-snapshot-id", "statistics",
        "partition-statistics", "metadata-log", "encryption-keys", "next-row-id",
    }
)  # fmt: skip


def _slight(raw: Mapping[str, Any], *, columns: bool) -> dict[str, Any]:
    """Return metadata that is just enough to commit to: place, properties, perhaps columns.

    PyIceberg checks every snapshot against every id it removes, drops fields it does not know and
    cannot write format 3; it need not see any of that.
    """
    slight = {name: value for name, value in raw.items() if name not in _HEAVY}
    slight["format-version"] = min(slight["format-version"], 2)
    if not columns:
        slight |= _NO_COLUMNS
    stand_in = {"snapshot-id": _SLIGHT_SNAPSHOT, "timestamp-ms": 1, "sequence-number": 0,
                "manifest-list": "none", "summary": {"operation": "append"}}  # fmt: skip
    return slight | {"snapshots": [stand_in]}


_NO_COLUMNS = {
    "format-version": 2, "last-column-id": 0, "last-partition-id": 999, "last-sequence-number": 0,
    "current-schema-id": 0, "schemas": [{"type": "struct", "schema-id": 0, "fields": []}],
    "default-spec-id": 0, "partition-specs": [{"spec-id": 0, "fields": []}],
    "default-sort-order-id": 0, "sort-orders": [{"order-id": 0, "fields": []}],
}  # fmt: skip


def _get(opening: ReadOpening, location: str) -> bytes:
    found = place(location)
    if found is None:
        raise _unplaced(location)
    return opening(found).get(found.key)


def _unplaced(location: str) -> LakewardenError:
    return Refused(
        ErrorKind.UNKNOWN_SCHEME,
        f"{location} lies in no store that can be reached from here; nothing was touched",
    )


class TableIO(FileIO):
    """PyIceberg's way to files, through an `_Access` that the catalog's properties carry."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        super().__init__(dict(properties))
        self._access: _Access = properties[_IO]

    def new_input(self, location: str) -> InputFile:
        return _Input(location, self._access)

    def new_output(self, location: str) -> OutputFile:
        return _Output(location, self._access)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise AssertionError(f"{location} is not PyIceberg's to delete here")


class _Input(InputFile):
    def __init__(self, location: str, access: _Access) -> None:
        super().__init__(location)
        self._access = access

    def __len__(self) -> int:
        return len(self._access.read(self.location))

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002, FBT001, FBT002
        return io.BytesIO(self._access.read(self.location))


class _Output(OutputFile):
    def __init__(self, location: str, access: _Access) -> None:
        super().__init__(location)
        self._access = access

    def __len__(self) -> int:
        return 0

    def exists(self) -> bool:
        return False

    def to_input_file(self) -> InputFile:
        return _Input(self.location, self._access)

    def create(self, overwrite: bool = False) -> OutputStream:  # noqa: ARG002, FBT001, FBT002
        return _Buffer(self.location, self._access)


class _Buffer(io.BytesIO):
    """Writes what it was given when it is closed."""

    def __init__(self, location: str, access: _Access) -> None:
        super().__init__()
        self._location = location
        self._access = access

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._access.write(self._location, self.getvalue())
        super().close()
