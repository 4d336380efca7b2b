"""Lance tables in a warehouse: a namespace that any Lance client commits through.

With managed versioning a client writes its files, stages a manifest beside the others and asks the
namespace for the next version; that is when the log decides.  A version that has been claimed is then
put under its public name, so that whoever opens the table by its path sees the same head.  Before
anything is said of a table its versions are public: clients look for what they must rebase on among
the public ones.

Clients call from threads of their own and with dictionaries or models, as it happens; whatever is
raised when a version is refused, they look at what is there and rebase by their own rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

import lance
import lance_namespace as api
from lance.commit import CommitConflictError
from lance_namespace.errors import (
    ConcurrentModificationError,
    InternalError,
    LanceNamespaceError,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NamespaceNotFoundError,
    TableAlreadyExistsError,
    TableNotFoundError,
    TableVersionNotFoundError,
    UnsupportedOperationError,
)

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
from lakewarden.model import Format
from lakewarden.storage.opening import Opener
from lakewarden.warehouse import forks, names, registering, spaces
from lakewarden.warehouse.lance_sessions import Immediate, Reading, Session, Waiting, meaning
from lakewarden.warehouse.lance_tables import LanceTables, tables_of, uri_of
from lakewarden.warehouse.manifest import MAIN, Change, Name, Operation, Pin, Table
from lakewarden.warehouse.own_tags import OwnTags
from lakewarden.warehouse.refusals import ADVICE, Refusing
from lakewarden.warehouse.warehouse import View, Warehouse

__all__ = [
    "Immediate",
    "LanceTables",
    "Namespace",
    "Reading",
    "Session",
    "Waiting",
    "meaning",
    "replay",
    "tables_of",
    "uri_of",
]

#: Between the parts of a name where a client wants it in one word.
_DELIMITER = "$"
_STORAGE = "storage."
_PROPERTIES = ("actor", "log-database")
#: What clients say when a version was refused, and they do not know why.
_VAGUE = re.compile("Commit result for version|Failed to commit the transaction after")

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def _answers(model: Any) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Let a method take its request as a model or, as Lance's own code passes it, as a dictionary.

    Errors are turned into those of the namespace's interface; the first one is kept for `told`.
    """

    def decorate(method: Callable[..., Answer]) -> Callable[..., Answer]:
        @wraps(method)
        def answer(self: Namespace, request: Any) -> Answer:
            with self._lock:
                try:
                    if isinstance(request, dict):
                        request = model.from_dict(dict(request))
                    return method(self._on(getattr(request, "branch", None)), request)
                except LakewardenError as error:
                    self._trouble.append(error)
                    raise _translated(error) from error

        return answer

    return decorate


def _translated(error: LakewardenError) -> Exception:
    if isinstance(error, Conflict):
        return ConcurrentModificationError(error.message)
    if isinstance(error, AlreadyExists):
        return TableAlreadyExistsError(error.message)
    # Of a table that is not found clients take whatever lies there: only said where it is meant.
    return InternalError(error.message)


@dataclass(frozen=True)
class _Planned:
    """One operation of a batch: what it changes, how that is told, and what follows the commit."""

    change: Change
    message: str
    done: Callable[[], Any]


class Namespace(Refusing):
    """The Lance tables of a warehouse, for any Lance client.

    Clients that make a namespace by its class say where the warehouse is, and the rest in words:
    `actor`, `log-database`, and storage options as `storage.…`.
    """

    def __init__(
        self,
        warehouse: Warehouse | str,
        session: Session | None = None,
        *,
        branch: str = MAIN,
        **properties: str,
    ) -> None:
        if isinstance(warehouse, str):
            warehouse = _opened(warehouse, properties)
        elif properties:
            raise UsageError(ErrorKind.USAGE, f"a namespace knows no {', '.join(properties)}")
        self._warehouse = warehouse
        self._tables = tables_of(warehouse)
        self._session = session or Immediate(warehouse, self._tables, branch)
        self._lock = RLock()
        self._trouble: list[LakewardenError] = []

    def namespace_id(self) -> str:
        return f"lakewarden {self._warehouse.location.uri}"

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raise what went wrong here instead of what a client makes of it."""
        self._trouble.clear()
        try:
            yield
        except (OSError, ValueError, RuntimeError, LanceNamespaceError) as error:
            told = str(error)
            # Errors of others, after trouble that a client has dealt with, stay what they are.
            ours = [one for one in self._trouble if one.message in told or _VAGUE.search(told)]
            unknown = [one for one in ours if one.kind is ErrorKind.COMMIT_UNKNOWN]
            if ours:
                raise (unknown or ours)[-1] from error
            raise

    # -- tables ----------------------------------------------------------------------------------

    @_answers(api.ListTablesRequest)
    def list_tables(self, request: Any) -> Any:
        prefix = tuple(request.id or ())
        found = [
            one.name[-1]
            for one in self._session.view(fresh=True).tables()
            if one.format is Format.LANCE and one.name[:-1] == prefix
        ]
        page, token = _page(found, request.page_token, request.limit)
        return api.ListTablesResponse(tables=page, page_token=token)

    @_answers(api.ListTablesRequest)
    def list_all_tables(self, request: Any) -> Any:
        found = [
            _DELIMITER.join(one.name)
            for one in self._session.view(fresh=True).tables()
            if one.format is Format.LANCE
        ]
        page, token = _page(found, request.page_token, request.limit)
        return api.ListTablesResponse(tables=page, page_token=token)

    @_answers(api.TableExistsRequest)
    def table_exists(self, request: Any) -> Any:
        self._table(tuple(request.id or ()), fresh=True)
        return api.TableExistsResponse()

    @_answers(api.DescribeTableRequest)
    def describe_table(self, request: Any) -> Any:
        table = self._table(tuple(request.id or ()), fresh=True)
        pin = self._pin(table)
        return api.DescribeTableResponse(
            table=table.name[-1],
            namespace=list(table.name[:-1]),
            location=uri_of(table, pin),
            version=pin.version if pin is not None else None,
            managed_versioning=True,
            storage_options=self._tables.options(),
            properties=dict(table.properties),
            is_only_declared=pin is None,
        )

    @_answers(api.DeclareTableRequest)
    def declare_table(self, request: Any) -> Any:
        table = self._session.declare(tuple(request.id or ()), request.location)
        return api.DeclareTableResponse(
            location=uri_of(table), managed_versioning=True, storage_options=self._tables.options()
        )

    @_answers(api.DropTableRequest)
    def drop_table(self, request: Any) -> Any:
        table = self._table(tuple(request.id or ()), fresh=True)
        self._immediate()
        self._warehouse.drop(table.name, branch=self._session.view().branch)
        return api.DropTableResponse(id=list(table.name), location=table.location)

    @_answers(api.RenameTableRequest)
    def rename_table(self, request: Any) -> Any:
        table = self._table(tuple(request.id or ()), fresh=True)
        self._immediate()
        if self._session.view().branch != MAIN:
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE, "a name holds on every branch; rename on main"
            )
        space = request.new_namespace_id
        to = (*(table.name[:-1] if space is None else space), request.new_table_name)
        self._warehouse.rename(table.name, to)
        return api.RenameTableResponse()

    @_answers(api.RegisterTableRequest)
    def register_table(self, request: Any) -> Any:
        self._immediate()
        if (request.mode or "create").lower() != "create":
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                "a table is not registered over another one; deregister that first",
            )
        name, told = tuple(request.id or ()), request.properties or {}
        view = self._session.view(fresh=True)
        table = registering.register(self._warehouse, view, name, request.location, told)
        return api.RegisterTableResponse(
            location=uri_of(table), properties=dict(table.properties) or None
        )

    @_answers(api.DeregisterTableRequest)
    def deregister_table(self, request: Any) -> Any:
        answer = self._batch([api.CommitTableOperation(deregister_table=request)])
        return answer[0].deregister_table

    # -- namespaces ------------------------------------------------------------------------------

    @_answers(api.ListNamespacesRequest)
    def list_namespaces(self, request: Any) -> Any:
        space = self._space(request)
        deeper = {
            one[-1] for one in spaces.all_of(self._session.view()) if one[:-1] == space and one
        }
        page, token = _page(sorted(deeper), request.page_token, request.limit)
        return api.ListNamespacesResponse(namespaces=page, page_token=token)

    @_answers(api.NamespaceExistsRequest)
    def namespace_exists(self, request: Any) -> Any:
        self._space(request)
        return api.NamespaceExistsResponse()

    @_answers(api.DescribeNamespaceRequest)
    def describe_namespace(self, request: Any) -> Any:
        space = self._space(request)
        told = spaces.properties(self._session.view(), space)
        return api.DescribeNamespaceResponse(properties=told)

    @_answers(api.CreateNamespaceRequest)
    def create_namespace(self, request: Any) -> Any:
        self._immediate()
        space = names.table_name(tuple(request.id or ()))
        told, mode = request.properties or {}, _word(request.mode or "create")
        view = self._session.view(fresh=True)
        if spaces.exists(view, space):
            if mode != "existok":
                raise NamespaceAlreadyExistsError(f"there is a namespace {'.'.join(space)} already")
            return api.CreateNamespaceResponse(properties=spaces.properties(view, space))
        self._warehouse.set_properties(spaces.setting(space, told))
        return api.CreateNamespaceResponse(properties=told)

    @_answers(api.DropNamespaceRequest)
    def drop_namespace(self, request: Any) -> Any:
        self._immediate()
        try:
            space = self._space(request)
        except NamespaceNotFoundError:
            if _word(request.mode or "fail") == "skip":
                return api.DropNamespaceResponse()
            raise
        if not spaces.is_empty(self._session.view(), space):
            raise NamespaceNotEmptyError(f"drop what is in {'.'.join(space) or 'the root'} first")
        self._warehouse.set_properties(spaces.setting(space, None))
        return api.DropNamespaceResponse()

    def _space(self, request: Any) -> Name:
        space = tuple(request.id or ())
        if not spaces.exists(self._session.view(fresh=True), space):
            raise NamespaceNotFoundError(f"there is no namespace {'.'.join(space)}")
        return space

    # -- versions --------------------------------------------------------------------------------

    @_answers(api.ListTableVersionsRequest)
    def list_table_versions(self, request: Any) -> Any:
        table = self._table(tuple(request.id or ()), fresh=True)
        self._check_branch(table, request.branch)
        pin = self._pin(table)
        if pin is None:
            return api.ListTableVersionsResponse(versions=[])
        if request.limit == 1 and request.descending:
            return api.ListTableVersionsResponse(versions=[self._version(table, pin)])
        store, root = self._tables.store(table)
        numbers = sorted(
            _versions(store.list(f"{root}/{forks.directory(pin.path)}_versions"), pin), reverse=True
        )
        if not request.descending:
            numbers.reverse()
        page, token = _page(numbers, request.page_token, request.limit)
        return api.ListTableVersionsResponse(
            versions=[self._older(table, pin, number) for number in page], page_token=token
        )

    @_answers(api.DescribeTableVersionRequest)
    def describe_table_version(self, request: Any) -> Any:
        table = self._table(tuple(request.id or ()), fresh=True)
        self._check_branch(table, request.branch)
        pin = self._pin(table)
        if pin is None or request.version is None or request.version > pin.version:
            raise TableVersionNotFoundError(
                f"{'.'.join(table.name)} has no version {request.version}"
            )
        return api.DescribeTableVersionResponse(version=self._older(table, pin, request.version))

    @_answers(api.CreateTableVersionRequest)
    def create_table_version(self, request: Any) -> Any:
        table, pin, staged = self._staged(request)
        try:
            after = self._session.take(table, pin, staged)
        except Conflict:
            self._expected(table.name, request.version)
            raise
        self._trouble.clear()
        # It is committed; if it cannot be shown now, whoever reads the table next does it.
        with suppress(StorageError):
            self._show(table, after)
        return api.CreateTableVersionResponse(version=self._answer(table, after))

    def _staged(self, request: Any) -> tuple[Table, Pin | None, Pin]:
        """Return a table, its pin and the version that a client has staged to follow it."""
        name, key = tuple(request.id or ()), request.manifest_path
        table = self._table(name, fresh=False)
        self._check_branch(table, request.branch)
        try:
            self._tables.staged(self._session.view(), table, key)
        except Refused:
            # Perhaps we have not heard yet that the branch was made again.
            table = self._table(name, fresh=True)
            self._tables.staged(self._session.view(), table, key)
        table, pin = self._expected(name, request.version)
        path = self._tables.staged(self._session.view(), table, key)
        after = Pin(request.version, path, size=request.manifest_size, e_tag=request.e_tag)
        return table, pin, after

    # -- several at once -------------------------------------------------------------------------

    @_answers(api.BatchCreateTableVersionsRequest)
    def batch_create_table_versions(self, request: Any) -> Any:
        one_each = [
            api.CommitTableOperation(create_table_version=one)
            for one in map(_single, request.entries)
        ]
        done = [one.create_table_version for one in self._batch(one_each)]
        return api.BatchCreateTableVersionsResponse(versions=[one.version for one in done])

    @_answers(api.BatchCommitTablesRequest)
    def batch_commit_tables(self, request: Any) -> Any:
        return api.BatchCommitTablesResponse(results=self._batch(request.operations))

    def _batch(self, operations: Sequence[Any]) -> list[Any]:
        """Make one version of the warehouse of several operations, or none."""
        session = self._session
        if not isinstance(session, Immediate):
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                "a transaction is one version of all its tables already; ask for each by itself",
            )
        view, planned = session.view(fresh=True), list[_Planned]()
        for wanted in operations:
            planned.append(self._planned(view, wanted))
            made = planned[-1].change.made
            if made is not None:
                tables = {**view.manifest.tables, made.id: made}
                view = replace(view, manifest=replace(view.manifest, tables=tables))
        if len({one.change.table for one in planned}) != len(planned):
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                "one table is named twice in a batch; ask for one change of each",
            )
        message = "; ".join(one.message for one in planned)
        session.commit([one.change for one in planned], message)
        self._trouble.clear()
        return [one.done() for one in planned]

    def _planned(self, view: View, wanted: Any) -> _Planned:
        if wanted.declare_table is not None:
            request = wanted.declare_table
            table = self._tables.new_table(view, tuple(request.id or ()), request.location)
            change = Change(Operation.CREATE, table.id, name=table.name, made=table)
            return _Planned(change, f"create {'.'.join(table.name)}", lambda: self._declared(table))
        if wanted.create_table_version is not None:
            table, pin, staged = self._staged(wanted.create_table_version)
            does = self._tables.admitted(table, staged)
            change = Change(meaning(does), table.id, pin, staged)
            return _Planned(
                change, f"{does} {'.'.join(table.name)}", lambda: self._committed(table, staged)
            )
        if wanted.deregister_table is not None:
            found = self._table(tuple(wanted.deregister_table.id or ()), fresh=False)
            table, change = registering.letting_go(self._warehouse, view, found.name)
            return _Planned(change, f"deregister {'.'.join(table.name)}", lambda: self._gone(table))
        raise UnsupportedOperationError(ADVICE["batch_delete_table_versions"])

    def _declared(self, table: Table) -> Any:
        told = api.DeclareTableResponse(
            location=uri_of(table), managed_versioning=True, storage_options=self._tables.options()
        )
        return api.CommitTableResult(declare_table=told)

    def _committed(self, table: Table, after: Pin) -> Any:
        # It is committed; if it cannot be shown now, whoever reads the table next does it.
        with suppress(StorageError):
            self._show(table, after)
        told = api.CreateTableVersionResponse(version=self._answer(table, after))
        return api.CommitTableResult(create_table_version=told)

    def _gone(self, table: Table) -> Any:
        self._warehouse.unmark(table)
        told = api.DeregisterTableResponse(id=list(table.name), location=uri_of(table))
        return api.CommitTableResult(deregister_table=told)

    @_answers(api.ListTableBranchesRequest)
    def list_table_branches(self, request: Any) -> Any:
        """List the table's forks that belong to branches, by the names that Lance's clients use."""
        table = self._table(tuple(request.id or ()), fresh=True)
        branches = self._session.view().manifest.branches
        found = self._tables.forks(table, {one.made: name for name, one in branches.items()})
        page, token = _page(sorted(found), request.page_token, request.limit)
        return api.ListTableBranchesResponse.from_dict(
            {"branches": {name: found[name] for name in page}, "page_token": token}
        )

    # -- a table's own tags ----------------------------------------------------------------------

    @_answers(api.ListTableTagsRequest)
    def list_table_tags(self, request: Any) -> Any:
        found = self._tags(request).all()
        page, token = _page(list(found), request.page_token, request.limit)
        return api.ListTableTagsResponse(
            tags={name: found[name] for name in page}, page_token=token
        )

    @_answers(api.GetTableTagVersionRequest)
    def get_table_tag_version(self, request: Any) -> Any:
        found = self._tags(request).get(request.tag)
        return api.GetTableTagVersionResponse(version=found.version, branch=found.branch)

    @_answers(api.CreateTableTagRequest)
    def create_table_tag(self, request: Any) -> Any:
        self._tags(request, request.version).create(request.tag, request.version)
        return api.CreateTableTagResponse()

    @_answers(api.UpdateTableTagRequest)
    def update_table_tag(self, request: Any) -> Any:
        self._tags(request, request.version).move(request.tag, request.version)
        return api.UpdateTableTagResponse()

    @_answers(api.DeleteTableTagRequest)
    def delete_table_tag(self, request: Any) -> Any:
        self._tags(request).delete(request.tag)
        return api.DeleteTableTagResponse()

    def _tags(self, request: Any, version: int = 0) -> OwnTags:
        """Return the tags of a table that has a version, and that one too."""
        self._immediate()
        table = self._table(tuple(request.id or ()), fresh=True)
        self._check_branch(table, getattr(request, "branch", None))
        pin = self._pin(table)
        if pin is None or version > pin.version:
            raise TableVersionNotFoundError(f"{'.'.join(table.name)} has no version {version}")
        self._show(table, pin)
        fork = forks.directory(pin.path)
        return OwnTags(uri_of(table, pin), fork, self._tables.options())

    def _expected(self, name: Name, version: int) -> tuple[Table, Pin | None]:
        """Return the table and its pin if the version is the next one, or raise Conflict."""
        if isinstance(self._session, Reading):
            raise self._session.refused()
        table, pin, after = self._next(name, fresh=False)
        if version != after:
            table, pin, after = self._next(name, fresh=True)
        session = self._session
        replaces = isinstance(session, Waiting) and session.may_replace(table, version)
        if version == after or replaces:
            return table, pin
        if isinstance(session, Waiting):
            pin, after = self._adopted(session, table, version)
            if version == after:
                return table, pin
        if pin is not None:
            # The client looks for it among the public ones.
            self._show(table, pin)
        if version > after:
            raise Refused(
                ErrorKind.DRIFT,
                f"a client asks for version {version} of {'.'.join(name)}, and the warehouse knows "
                f"it up to {after - 1}; somebody has written past the warehouse: see what it is with "
                f"lakewarden repair {self._warehouse.location.uri}",
            )
        raise Conflict(
            ErrorKind.CONFLICT, f"version {version} of {'.'.join(name)} is taken by somebody else"
        )

    def _adopted(self, session: Waiting, table: Table, version: int) -> tuple[Pin | None, int]:
        """Return what the table is outside the transaction; the client may have rebased on that."""
        head = self._warehouse.refresh().manifest
        pin = self._warehouse.view(head, session.base.branch).pins.get(table.id)
        after = pin.version + 1 if pin is not None else 1
        if pin is not None and version == after and table.id not in session.pins:
            session.base = replace(session.base, pins={**session.base.pins, table.id: pin})
        elif version <= after:
            raise Conflict(
                ErrorKind.CONFLICT,
                f"{'.'.join(table.name)} was changed by somebody else; nothing was committed: do "
                "it again",
            )
        return pin, after

    def _next(self, name: Name, *, fresh: bool) -> tuple[Table, Pin | None, int]:
        table = self._table(name, fresh=fresh)
        pin = self._session.view().pins.get(table.id)
        return table, pin, pin.version + 1 if pin is not None else 1

    def _version(self, table: Table, pin: Pin) -> Any:
        self._show(table, pin)
        return self._answer(table, pin)

    def _answer(self, table: Table, pin: Pin) -> Any:
        _, root = self._tables.store(table)
        waits = isinstance(self._session, Waiting) and table.id in self._session.pins
        path = pin.path if waits else self._tables.public(pin)
        return api.TableVersion(
            version=pin.version, manifest_path=f"{root}/{path}", manifest_size=pin.size
        )

    def _older(self, table: Table, pin: Pin, version: int) -> Any:
        """Return a version that came before the pin, or the pin's own."""
        if version == pin.version:
            return self._version(table, pin)
        waiting = self._session.pins.get(table.id) if isinstance(self._session, Waiting) else None
        if waiting is not None and version > waiting.version - len(waiting.through) - 1:
            path = waiting.through[version - waiting.version]
        else:
            within, _, name = self._tables.public(pin).rpartition("/")
            path = f"{within}/{forks.file_name(version, name)}"
        _, root = self._tables.store(table)
        return api.TableVersion(version=version, manifest_path=f"{root}/{path}")

    def _show(self, table: Table, pin: Pin) -> None:
        if not isinstance(self._session, Waiting) or table.id not in self._session.pins:
            self._tables.publish(table, pin)

    # -- the rest --------------------------------------------------------------------------------

    def _table(self, name: Name, *, fresh: bool) -> Table:
        found = self._session.view(fresh=fresh).find(name)
        if found is None or found.format is not Format.LANCE:
            self._trouble.append(NotFound(f"there is no table {'.'.join(name)} of Lance's"))
            raise TableNotFoundError(self._trouble[-1].message)
        return found

    def _immediate(self) -> None:
        if not isinstance(self._session, Immediate):
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                "tables are dropped, renamed, registered and tagged, and namespaces made, outside "
                "transactions, on the head of a branch",
            )

    def _pin(self, table: Table) -> Pin | None:
        """Return the current version as the session's clients find it."""
        view = self._session.view()
        if isinstance(self._session, Reading):
            return view.pins.get(table.id)
        return self._tables.on_branch(view, table)

    def _on(self, fork: str | None) -> Namespace:
        """Return the namespace of the branch whose fork a client has checked out by Lance's name."""
        made = forks.number(fork or "")
        if made is not None and isinstance(self._session, Immediate):
            for name, one in self._session.view(fresh=True).manifest.branches.items():
                if one.made == made:
                    return Namespace(self._warehouse, branch=name)
        return self

    def _check_branch(self, table: Table, branch: str | None) -> None:
        fork = forks.name(forks.own(self._session.view(), table))
        if branch not in (None, "", fork or MAIN):
            raise UnsupportedOperationError(
                f"branch {branch!r} is Lance's own; branches of the warehouse span all its tables: "
                "lakewarden branch"
            )


def _opened(uri: str, properties: Mapping[str, str]) -> Warehouse:
    storage = {
        name.removeprefix(_STORAGE): value
        for name, value in properties.items()
        if name.startswith(_STORAGE)
    }
    unknown = [
        name for name in properties if not name.startswith(_STORAGE) and name not in _PROPERTIES
    ]
    if unknown:
        raise UsageError(
            ErrorKind.USAGE,
            f"a namespace knows no property {unknown[0]}; there are warehouse, branch, "
            f"{', '.join(_PROPERTIES)} and {_STORAGE}…",
        )
    return Warehouse.open(
        uri,
        opener=Opener(storage),
        database=properties.get("log-database"),
        actor=properties.get("actor"),
    )


def _versions(listed: Iterable[Any], pin: Pin) -> Iterator[int]:
    for batch in listed:
        for key in batch.column("key").to_pylist():
            version = forks.version(key.rpartition("/")[2])
            if version is not None and version <= pin.version:
                yield version


def _single(entry: Any) -> Any:
    """Return an entry of a batch as the request that it would be alone."""
    return api.CreateTableVersionRequest.from_dict(entry.to_dict())


def _word(mode: str) -> str:
    return mode.lower().replace("_", "")


def _page(
    found: Sequence[Item], token: str | None, limit: int | None
) -> tuple[list[Item], str | None]:
    start = int(token or 0)
    end = len(found) if limit is None else start + limit
    return list(found[start:end]), str(end) if end < len(found) else None


def replay(warehouse: Warehouse, table: Table, waiting: Waiting, onto: View) -> Pin:
    """Put the one change of a table that waits on top of what the table is now."""
    tables = tables_of(warehouse)
    old = waiting.pins[table.id]
    anew = Waiting(tables, onto)
    before, after = Namespace(warehouse, waiting), Namespace(warehouse, anew)
    was = waiting.view().manifest.tables[table.id].name
    try:
        with after.told():
            made = lance.dataset(namespace_client=before, table_id=list(was), version=old.version)
            change = made.read_transaction(old.version)
            current = lance.dataset(namespace_client=after, table_id=list(table.name))
            lance.LanceDataset.commit(current, change)
    except (OSError, ValueError, RuntimeError, LanceNamespaceError) as error:
        never = isinstance(error, CommitConflictError) and not error.retryable
        raise Conflict(
            ErrorKind.INCOMPATIBLE if never else ErrorKind.CONFLICT,
            f"{'.'.join(table.name)} was changed by somebody else, and Lance cannot put this on top "
            f"({' '.join(str(error).split())[:160]}); nothing was committed",
        ) from error
    tables.discard(table, old)
    return anew.pins[table.id]
