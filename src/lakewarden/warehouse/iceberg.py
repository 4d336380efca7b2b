"""Iceberg tables in a warehouse: a PyIceberg catalog whose pointers are the log's pins.

In PyIceberg's configuration:

    catalog:
      lake:
        py-catalog-impl: lakewarden.warehouse.iceberg.WarehouseCatalog
        warehouse: s3://bucket/lake

A commit writes the next metadata file, which nobody sees, and the log decides whether it becomes the
table's.  Which changes of one table get along is said by Iceberg's requirements, checked against the
metadata that is current.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

from pyiceberg.catalog import Catalog, MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.io import load_file_io
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import CommitTableResponse, StagedTable, TableProperties
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.typedef import EMPTY_DICT, IcebergBaseModel

from lakewarden.errors import (
    AlreadyExists,
    Conflict,
    ErrorKind,
    LakewardenError,
    NotFound,
    Refused,
    StorageError,
    UsageError,
)
from lakewarden.formats.iceberg.carrying import carry_over
from lakewarden.formats.iceberg.catalog import pyiceberg_properties, storage_options
from lakewarden.formats.iceberg.metadata import (
    Removal,
    dropped_metadata_files,
    packed,
    unpacked,
    without,
)
from lakewarden.formats.iceberg.paths import place
from lakewarden.model import Format
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.warehouse import names, spaces
from lakewarden.warehouse.manifest import MAIN, Change, Manifest, Name, Operation, Pin, Table
from lakewarden.warehouse.warehouse import View, Warehouse

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyiceberg.typedef import Identifier, Properties

_OPERATIONS = {
    "append": Operation.APPEND,
    "overwrite": Operation.OVERWRITE,
    "delete": Operation.DELETE,
    "replace": Operation.REWRITE,
}


class Session(Protocol):
    """Where the changes of a catalog's tables go."""

    @property
    def branch(self) -> str:
        """The branch that they are of."""
        ...

    def view(self, *, fresh: bool = False) -> View:
        """Return what the catalog's users see."""
        ...

    def take(self, change: Change) -> None:
        """Make a version of a change, or raise Conflict."""
        ...


@dataclass
class Immediate:
    """Every commit is a version of the warehouse, at once."""

    warehouse: Warehouse
    branch: str = MAIN

    def view(self, *, fresh: bool = False) -> View:
        head = self.warehouse.refresh() if fresh else self.warehouse.known
        return self.warehouse.view(head.manifest, self.branch)

    def take(self, change: Change) -> None:
        message = f"{change.operation} {'.'.join(change.name or self._name(change))}"
        self.warehouse.commit([change], branch=self.branch, message=message, rebase=stale)

    def _name(self, change: Change) -> Name:
        return self.warehouse.known.manifest.tables[change.table].name


@dataclass
class Waiting:
    """Commits wait, unseen by others, until all of a transaction are committed together."""

    base: View
    made: dict[str, Table] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    #: Metadata files that were written, whatever became of them.
    written: list[str] = field(default_factory=list)
    #: Of each table that was changed, what it was at first and what it is now.
    replaced: dict[str, tuple[IcebergTable, StagedTable]] = field(default_factory=dict)

    @property
    def branch(self) -> str:
        return self.base.branch

    def view(self, *, fresh: bool = False) -> View:  # noqa: ARG002  # a transaction sees one version
        manifest = self.base.manifest
        if self.made:
            manifest = replace(manifest, tables={**manifest.tables, **self.made})
        # Other threads may be changing other tables.
        changes = list(self.changes.values())
        pins = {one.table: one.after for one in changes if one.after is not None}
        return View(manifest, self.base.branch, {**self.base.pins, **pins})

    def take(self, change: Change) -> None:
        earlier = self.changes.get(change.table)
        if change.made is not None:
            self.made[change.table] = change.made
        if earlier is not None:
            first = earlier.operation
            operation = first if first == change.operation or earlier.made else Operation.OVERWRITE
            change = replace(earlier, operation=operation, after=change.after)
        self.changes[change.table] = change


def stale(change: Change, manifest: Manifest) -> Change:
    """Refuse to put a change on top of another: it was made from what was there before."""
    name = ".".join(manifest.tables[change.table].name)
    raise Conflict(ErrorKind.CONFLICT, f"somebody else has committed to {name}")


class IcebergTables:
    """What Iceberg tables do for the warehouse."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._warehouse = warehouse

    def publish(self, table: Table, pin: Pin) -> None:
        """Do nothing: whoever knows the pin sees the version."""

    def discard(self, table: Table, pin: Pin) -> None:  # noqa: ARG002
        self.delete([*pin.through, pin.path])

    def delete(self, uris: Iterable[str]) -> None:
        """Delete metadata files."""
        for uri in uris:
            found = place(uri)
            if found is not None:
                self._warehouse.opener(found).delete([found.key])

    def restore(self, table: Table, current: Pin, target: Pin) -> Pin:
        now, then = self.read(table, current), self.read(table, target)
        wanted = then.get("current-snapshot-id")
        known = {one["snapshot-id"] for one in now.get("snapshots", [])}
        if wanted not in known and wanted not in (None, -1):
            raise NotFound(
                f"snapshot {wanted} of {'.'.join(table.name)} was reclaimed by a cleanup; it cannot "
                "be brought back",
                ErrorKind.RECLAIMED,
            )
        millis = max(
            int(self._warehouse.log.clock.now().timestamp() * 1000), now["last-updated-ms"] + 1
        )
        kept = ("current-schema-id", "default-spec-id", "default-sort-order-id")
        new = {**now, **{name: then[name] for name in kept if name in then}}
        new["current-snapshot-id"] = wanted
        refs = {name: ref for name, ref in now.get("refs", {}).items() if name != MAIN}
        if MAIN in then.get("refs", {}):
            refs[MAIN] = then["refs"][MAIN]
            logged = {"snapshot-id": wanted, "timestamp-ms": millis}
            new["snapshot-log"] = [*now.get("snapshot-log", []), logged]
        new["refs"] = refs
        before = {"metadata-file": current.path, "timestamp-ms": now["last-updated-ms"]}
        new["metadata-log"] = [*now.get("metadata-log", []), before]
        new["last-updated-ms"] = millis
        provider = load_location_provider(table.location, now.get("properties", {}))
        uri = provider.new_table_metadata_file_location(current.version + 1)
        found = _placed(uri)
        self._warehouse.opener(found).put_if_absent(
            found.key, packed(json.dumps(new).encode(), uri)
        )
        return Pin(current.version + 1, uri, snapshots=snapshots_named(new))

    def read(self, table: Table, pin: Pin) -> dict[str, Any]:
        """Return the metadata of a version, as it is written."""
        found = _placed(pin.path)
        try:
            raw: dict[str, Any] = json.loads(unpacked(self._warehouse.opener(found).get(found.key)))
        except NotFound:
            raise NotFound(
                f"a version of {'.'.join(table.name)} was reclaimed by a cleanup ({pin.path})",
                ErrorKind.RECLAIMED,
            ) from None
        return raw

    def without(self, table: Table, pin: Pin, removal: Removal) -> Pin:
        """Write the metadata of a version without some of its snapshots; nobody sees it yet."""
        before = self.read(table, pin)
        millis = int(self._warehouse.log.clock.now().timestamp() * 1000)
        after = without(before, removal=removal, location=pin.path, now_ms=millis)
        provider = load_location_provider(table.location, before.get("properties", {}))
        uri = provider.new_table_metadata_file_location(pin.version + 1)
        found = _placed(uri)
        text = json.dumps(after, separators=(",", ":"), ensure_ascii=False).encode()
        self._warehouse.opener(found).put_if_absent(found.key, packed(text, uri))
        return Pin(pin.version + 1, uri, snapshots=snapshots_named(after))

    def clean_metadata(self, before: StagedTable | IcebergTable, after: StagedTable) -> None:
        """Take away metadata files that have fallen out of the log, unless some ref needs them."""
        logs = [
            [one.metadata_file for one in metadata.metadata_log]
            for metadata in (before.metadata, after.metadata)
        ]
        dropped = dropped_metadata_files(
            logs[0],
            before.metadata_location,
            logs[1],
            after.metadata.properties,
            default_enabled=False,
        )
        if dropped:
            # Somebody may have made a tag since.
            self._warehouse.refresh()
            needed = {pin.path for pin in self._warehouse.pinned_by_refs()}
            self.delete(uri for uri in dropped if uri not in needed)


def tables_of(warehouse: Warehouse) -> IcebergTables:
    """Return the warehouse's own view of its Iceberg tables."""
    found = warehouse.formats.setdefault(Format.ICEBERG, IcebergTables(warehouse))
    assert isinstance(found, IcebergTables)
    return found


class WarehouseCatalog(MetastoreCatalog):
    """The Iceberg tables of a warehouse, for PyIceberg."""

    #: Maintenance that knows only the current metadata must leave these tables alone.
    keeps_versions = True

    def __init__(
        self,
        name: str,
        *,
        opened: Warehouse | None = None,
        session: Session | None = None,
        **properties: str,
    ) -> None:
        if opened is not None:
            options = getattr(opened.opener, "options", {})
            properties = {**pyiceberg_properties(options), **properties}
        super().__init__(name, **properties)
        if opened is None:
            if "warehouse" not in properties:
                raise UsageError(
                    ErrorKind.USAGE,
                    f"catalog {name} does not say where its warehouse is; set the property "
                    "warehouse: s3://bucket/lake",
                )
            opened = Warehouse.open(
                properties["warehouse"],
                opener=Opener(storage_options(properties)),
                database=properties.get("lakewarden.log-database"),
                actor=properties.get("lakewarden.actor"),
            )
        self._warehouse = opened
        self._tables = tables_of(opened)
        self._session = session or Immediate(opened, properties.get("lakewarden.branch", MAIN))
        self._lock = RLock()

    # -- tables ----------------------------------------------------------------------------------

    def load_table(self, identifier: str | Identifier) -> IcebergTable:
        with self._lock:
            table, pin = self._found(identifier)
        return self._load(table, pin)

    def _load(self, table: Table, pin: Pin) -> IcebergTable:
        io = load_file_io(self.properties, pin.path)
        try:
            metadata = FromInputFile.table_metadata(io.new_input(pin.path))
        except FileNotFoundError as error:
            raise NotFound(
                f"a version of {'.'.join(table.name)} was reclaimed by a cleanup ({pin.path})",
                ErrorKind.RECLAIMED,
            ) from error
        return IcebergTable(
            identifier=table.name,
            metadata=metadata,
            metadata_location=pin.path,
            io=self._load_file_io(metadata.properties, pin.path),
            catalog=self,
        )

    def _found(self, identifier: str | Identifier) -> tuple[Table, Pin]:
        name = Catalog.identifier_to_tuple(identifier)
        view = self._session.view(fresh=True)
        table = view.find(name)
        pin = view.pins.get(table.id) if table is not None else None
        if table is None or pin is None or table.format is not Format.ICEBERG:
            raise NoSuchTableError(f"Table does not exist: {'.'.join(name)}")
        return table, pin

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> IcebergTable:
        staged = self._create_staged_table(
            identifier, schema, location, partition_spec, sort_order, properties
        )
        self._wrote(staged.metadata_location)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        self._make(staged)
        return self.load_table(identifier)

    def _create_staged_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> StagedTable:
        # Not the inherited one: names here may have any number of namespaces.
        version = properties.get(
            TableProperties.FORMAT_VERSION, TableProperties.DEFAULT_FORMAT_VERSION
        )
        converted = self._convert_schema_if_needed(schema, int(version))  # type: ignore[arg-type]
        with self._lock:
            table = self._new(Catalog.identifier_to_tuple(identifier), location)
        metadata = new_table_metadata(
            location=table.location,
            schema=converted,
            partition_spec=partition_spec,
            sort_order=sort_order,
            properties=properties,
        )
        provider = load_location_provider(metadata.location, metadata.properties)
        where = provider.new_table_metadata_file_location()
        return StagedTable(
            identifier=table.name,
            metadata=metadata,
            metadata_location=where,
            io=self._load_file_io(properties=properties, location=where),
            catalog=self,
        )

    def _new(self, name: Name, location: str | None) -> Table:
        view = self._session.view(fresh=True)
        if not spaces.exists(view, name[:-1]):
            raise NoSuchNamespaceError(f"Namespace does not exist: {'.'.join(name[:-1])}")
        try:
            return self._warehouse.new_table(view, name, Format.ICEBERG, location=location)
        except AlreadyExists as error:
            raise TableAlreadyExistsError(error.message) from error

    def _make(self, staged: StagedTable) -> None:
        """Add a table whose metadata has been written."""
        name = tuple(staged.name())
        with self._lock:
            table = self._new(name, None)
            table = replace(table, location=staged.metadata.location)
            self._warehouse.check_apart(
                Location.parse(table.location), self._session.view().manifest
            )
            self._warehouse.mark(table)
            pin = Pin(
                0, staged.metadata_location, snapshots=snapshots_named(_dumped(staged.metadata))
            )
            change = Change(Operation.CREATE, table.id, after=pin, name=name, made=table)
            self._take(change, lambda: self._tables.discard(table, pin))

    def _take(self, change: Change, discard: Callable[[], None]) -> None:
        try:
            self._session.take(change)
        except LakewardenError as error:
            if error.kind is ErrorKind.COMMIT_UNKNOWN:
                raise CommitStateUnknownException(error.message) from error
            discard()
            if change.operation is Operation.CREATE and isinstance(error, Conflict):
                raise TableAlreadyExistsError(error.message) from error
            if isinstance(error, Conflict):
                raise CommitFailedException(error.message) from error
            raise

    def register_table(
        self,
        identifier: str | Identifier,
        metadata_location: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002  # PyIceberg's signature
    ) -> IcebergTable:
        name = Catalog.identifier_to_tuple(identifier)
        if overwrite and self._session.view(fresh=True).find(name) is not None:
            raise Refused(
                ErrorKind.ALREADY_EXISTS, f"{'.'.join(name)} exists; drop it first, then register"
            )
        io = load_file_io(self.properties, metadata_location)
        metadata = FromInputFile.table_metadata(io.new_input(metadata_location))
        with self._lock:
            table = self._new(name, metadata.location)
            table = replace(table, location=metadata.location, external=True)
            self._warehouse.mark(table)
            number = self._parse_metadata_version(metadata_location)
            named = snapshots_named(_dumped(metadata))
            pin = Pin(max(number, 0), metadata_location, snapshots=named)
            change = Change(Operation.CREATE, table.id, after=pin, name=name, made=table)
            # The file was there before: it is not ours to take away.
            self._take(change, lambda: None)
        return self.load_table(name)

    def commit_table(
        self,
        table: IcebergTable,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        name = tuple(table.name())
        try:
            with self._lock:
                known, pin = self._found(name)
        except NoSuchTableError:
            staged = self._update_and_stage_table(None, name, requirements, updates)
            self._wrote(staged.metadata_location)
            self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
            self._make(staged)
            return _response(staged)
        current = self._load(known, pin)
        staged = self._update_and_stage_table(current, name, requirements, updates)
        if staged.metadata == current.metadata:
            return CommitTableResponse(
                metadata=current.metadata, metadata_location=current.metadata_location
            )
        if staged.metadata.location != current.metadata.location:
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                f"{'.'.join(name)} would move to {staged.metadata.location}; tables of a warehouse "
                "stay where they are",
            )
        self._write(known, pin, current, staged)
        with self._lock:
            named = snapshots_named(_dumped(staged.metadata))
            after = Pin(pin.version + 1, staged.metadata_location, snapshots=named)
            change = Change(_operation(updates), known.id, pin, after)
            self._take(change, lambda: self._tables.discard(known, after))
        if isinstance(self._session, Waiting):
            first, _ = self._session.replaced.get(known.id, (current, staged))
            self._session.replaced[known.id] = first, staged
        else:
            # It is committed; what cannot be taken away now is an orphan.
            with suppress(StorageError):
                self._tables.clean_metadata(current, staged)
        return _response(staged)

    def _write(self, table: Table, pin: Pin, current: IcebergTable, staged: StagedTable) -> None:
        """Write the next metadata file, with what PyIceberg does not know of the one before."""
        known, after = (_dumped(one.metadata) for one in (current, staged))
        whole = carry_over(self._tables.read(table, pin), known, after)
        text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
        found = _placed(staged.metadata_location)
        self._wrote(staged.metadata_location)
        self._warehouse.opener(found).put_if_absent(
            found.key, packed(text, staged.metadata_location)
        )

    def _wrote(self, uri: str) -> None:
        """Remember a file, so that it can be taken away if the transaction fails."""
        if isinstance(self._session, Waiting):
            self._session.written.append(uri)

    @staticmethod
    def _delete_old_metadata(io: Any, base: Any, metadata: Any) -> None:
        """Do nothing: `clean_metadata` has, and knows what tags and branches need."""

    def drop_table(self, identifier: str | Identifier) -> None:
        with self._lock:
            table, _ = self._found(identifier)
            self._outside("dropped")
            self._warehouse.drop(table.name, branch=self._session.branch)

    def purge_table(self, identifier: str | Identifier) -> None:
        """Drop; its files go when cleanup finds that no version needs them any more."""
        self.drop_table(identifier)

    def rename_table(
        self, from_identifier: str | Identifier, to_identifier: str | Identifier
    ) -> IcebergTable:
        to = Catalog.identifier_to_tuple(to_identifier)
        with self._lock:
            table, _ = self._found(from_identifier)
            self._outside("renamed")
            if self._session.branch != MAIN:
                raise Refused(
                    ErrorKind.UNSUPPORTED_FEATURE, "a name holds on every branch; rename on main"
                )
            if not spaces.exists(self._session.view(), to[:-1]):
                raise NoSuchNamespaceError(f"Namespace does not exist: {'.'.join(to[:-1])}")
            try:
                self._warehouse.rename(table.name, to)
            except AlreadyExists as error:
                raise TableAlreadyExistsError(error.message) from error
        return self.load_table(to)

    def _outside(self, what: str) -> None:
        if isinstance(self._session, Waiting):
            raise Refused(ErrorKind.UNSUPPORTED_FEATURE, f"tables are {what} outside transactions")

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        space = Catalog.identifier_to_tuple(namespace)
        view = self._session.view(fresh=True)
        if not spaces.exists(view, space):
            raise NoSuchNamespaceError(f"Namespace does not exist: {'.'.join(space)}")
        return [
            one.name
            for one in view.tables()
            if one.format is Format.ICEBERG and one.name[:-1] == space and one.id in view.pins
        ]

    # -- namespaces ------------------------------------------------------------------------------

    def create_namespace(
        self, namespace: str | Identifier, properties: Properties = EMPTY_DICT
    ) -> None:
        space = names.table_name(Catalog.identifier_to_tuple(namespace))
        if spaces.exists(self._session.view(fresh=True), space):
            raise NamespaceAlreadyExistsError(f"Namespace already exists: {'.'.join(space)}")
        self._set(space, properties)

    def _set(self, space: Name, properties: Mapping[str, Any] | None) -> None:
        self._outside("given other namespaces")
        self._warehouse.set_properties(spaces.setting(space, properties))

    def drop_namespace(self, namespace: str | Identifier) -> None:
        space = self._known(namespace)
        if not spaces.is_empty(self._session.view(), space):
            raise NamespaceNotEmptyError(f"Namespace is not empty: {'.'.join(space)}")
        self._set(space, None)

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        space = Catalog.identifier_to_tuple(namespace)
        found = spaces.all_of(self._session.view(fresh=True))
        if space and space not in found:
            raise NoSuchNamespaceError(f"Namespace does not exist: {'.'.join(space)}")
        deeper = len(space) + 1
        return sorted(one for one in found if len(one) == deeper and one[:-1] == space)

    def _known(self, namespace: str | Identifier) -> Name:
        space = Catalog.identifier_to_tuple(namespace)
        if not spaces.exists(self._session.view(fresh=True), space):
            raise NoSuchNamespaceError(f"Namespace does not exist: {'.'.join(space)}")
        return space

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        space = self._known(namespace)
        return dict(spaces.properties(self._session.view(), space))

    def update_namespace_properties(
        self,
        namespace: str | Identifier,
        removals: set[str] | None = None,
        updates: Properties = EMPTY_DICT,
    ) -> PropertiesUpdateSummary:
        current = self.load_namespace_properties(namespace)
        summary, after = self._get_updated_props_and_update_summary(current, removals, updates)
        self._set(Catalog.identifier_to_tuple(namespace), after)
        return summary

    # -- views -----------------------------------------------------------------------------------

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:  # noqa: ARG002
        return []

    def view_exists(self, identifier: str | Identifier) -> bool:  # noqa: ARG002
        return False

    def load_view(self, identifier: str | Identifier) -> Any:
        raise NotImplementedError("a warehouse holds no views")

    def drop_view(self, identifier: str | Identifier) -> None:
        raise NotImplementedError("a warehouse holds no views")

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> Any:
        raise NotImplementedError("a warehouse holds no views")


def _operation(updates: Sequence[TableUpdate]) -> Operation:
    """Return what a commit does."""
    for update in updates:
        if isinstance(update, AddSnapshotUpdate) and update.snapshot.summary is not None:
            return _OPERATIONS[update.snapshot.summary.operation.value]
    if any(isinstance(update, SetSnapshotRefUpdate) for update in updates):
        return Operation.RESTORE
    return Operation.SCHEMA


def _response(staged: StagedTable) -> CommitTableResponse:
    return CommitTableResponse(metadata=staged.metadata, metadata_location=staged.metadata_location)


def _dumped(metadata: TableMetadata) -> dict[str, Any]:
    """Return what PyIceberg would write; that it does not write format 3 is bypassed."""
    raw: dict[str, Any] = json.loads(IcebergBaseModel.model_dump_json(metadata))
    return raw


def snapshots_named(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the snapshots that metadata names: the current one and those of its refs."""
    named: set[int] = {ref["snapshot-id"] for ref in (raw.get("refs") or {}).values()}
    current = raw.get("current-snapshot-id")
    return tuple(sorted(named | ({current} if current not in (None, -1) else set())))


def _placed(uri: str) -> Location:
    found = place(uri)
    if found is None:
        raise Refused(ErrorKind.UNKNOWN_SCHEME, f"{uri} lies in no store that is known here")
    return found
