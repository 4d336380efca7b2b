"""Small warehouses, and stores that fail or let others in between when they are told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lance
import pyarrow as pa
from lance_namespace.errors import LanceNamespaceError
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from lakewarden.errors import ErrorKind, LakewardenError, StorageError
from lakewarden.model import Format
from lakewarden.storage.location import Location
from lakewarden.storage.opening import Opener
from lakewarden.storage.store import DeleteResult, Deletion, Request, Store
from lakewarden.testing.faults import FaultyOpener, When
from lakewarden.testing.memory import MemoryStore
from lakewarden.testing.simulation import World
from lakewarden.warehouse.commit import stands
from lakewarden.warehouse.formats import with_formats
from lakewarden.warehouse.lance import Namespace
from lakewarden.warehouse.manifest import MAIN, Change, Name, Operation, Pin, Table
from lakewarden.warehouse.warehouse import Warehouse

Opening = Callable[[Location], Store]
#: What happens to a call, given its method and its key; None lets it through.
Rule = Callable[[str, str], When | None]
Answer = TypeVar("Answer")
# Inside the class `list` is the method.
DeleteResults = list[DeleteResult]

MEMORY = "memory://lake/wh"
T: Name = ("db", "t")
IDS = pa.schema([("id", pa.int64())])
IMPL = "lakewarden.warehouse.iceberg.WarehouseCatalog"
VERSIONS = "__manifest/_versions"
#: What may be raised when storage fails: our own errors, or those that clients know.
Failure = (
    LakewardenError | CommitFailedException | CommitStateUnknownException | LanceNamespaceError
)
FAILURES = (
    LakewardenError,
    CommitFailedException,
    CommitStateUnknownException,
    LanceNamespaceError,
)


# -- stores ----------------------------------------------------------------------------------------


def calm(method: str, key: str) -> When | None:
    """Let every call through."""
    return None


class Tampered:
    """Opens stores that ask `rule` before every call; it may fail the call, or do something first."""

    def __init__(self, inner: Opening | None = None) -> None:
        self.inner: Opening = inner or Opener()
        self.rule: Rule = calm

    def __call__(self, location: Location) -> Store:
        return _TamperedStore(self.inner(location), self)

    def once(self, method: str, part: str, act: Callable[[], object]) -> None:
        """Do something right before the first call of a method on a key that contains `part`."""

        def rule(called: str, key: str) -> When | None:
            if called == method and part in key:
                self.rule = calm
                act()
            return None

        self.rule = rule

    def failing(self, method: str, part: str, times: int = 10**6, when: When = "before") -> None:
        """Fail the next calls of a method on keys that contain `part`."""
        left = [times]

        def rule(called: str, key: str) -> When | None:
            if called == method and part in key and left[0]:
                left[0] -= 1
                return when
            return None

        self.rule = rule


class _TamperedStore:
    def __init__(self, inner: Store, tampered: Tampered) -> None:
        self.requests = inner.requests
        self.lists_ranges = inner.lists_ranges
        self._inner = inner
        self._tampered = tampered

    def list(
        self, prefix: str, *, after: str | None = None, before: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        yield from self._call(
            "list", prefix, lambda: [*self._inner.list(prefix, after=after, before=before)]
        )

    def list_directory(self, prefix: str) -> tuple[Sequence[str], Sequence[str]]:
        return self._call("list_directory", prefix, lambda: self._inner.list_directory(prefix))

    def get(self, key: str) -> bytes:
        return self._call("get", key, lambda: self._inner.get(key))

    def exists(self, key: str) -> bool:
        return self._call("exists", key, lambda: self._inner.exists(key))

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, lambda: self._inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._call("put_if_absent", key, lambda: self._inner.put_if_absent(key, data))

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        try:
            return self._call("delete", " ".join(keys), lambda: self._inner.delete(keys))
        except StorageError as error:
            return [DeleteResult(key, Deletion.FAILED, error.message) for key in keys]

    def prune_directory(self, prefix: str) -> bool:
        return self._inner.prune_directory(prefix)

    def _call(self, method: str, key: str, call: Callable[[], Answer]) -> Answer:
        wrong = self._tampered.rule(method, key)
        if wrong == "before":
            raise StorageError(ErrorKind.STORAGE, f"injected before {method} {key}")
        answer = call()
        if wrong == "after":
            raise StorageError(ErrorKind.STORAGE, f"injected after {method} {key}")
        return answer


class Overwriting(MemoryStore):
    """A store that takes create-if-absent for a put, like some gateways do."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.put(key, data)


class Hasty:
    """Chance that never lets anybody wait."""

    def below(self, number: int) -> int:
        return 0


def is_open(raised: BaseException) -> bool:
    """Tell whether an error leaves open whether something was committed."""
    unknown = isinstance(raised, LakewardenError) and raised.kind is ErrorKind.COMMIT_UNKNOWN
    return unknown or isinstance(raised, CommitStateUnknownException)


def keys(store: Store, prefix: str = "") -> list[str]:
    """Return all keys below a prefix."""
    return [key for batch in store.list(prefix) for key in batch.column("key").to_pylist()]


def objects(store: Store) -> dict[str, bytes]:
    """Return everything that a store holds."""
    return {key: store.get(key) for key in keys(store)}


# -- fail at every step ----------------------------------------------------------------------------


def every_step(
    counter: Path,
    prepare: Callable[[], Opening],
    act: Callable[[Opening], object],
    check: Callable[[Opening, Failure | None, str], None],
    only: frozenset[Request] | None = None,
) -> int:
    """Fail the n-th storage call of `act`, before and after its effect, for every n.

    `prepare` makes a fresh world; `check` gets its undisturbed opener, what was raised, and where the
    fault was.  Returns how many calls an undisturbed run makes.
    """
    number = 0
    while True:
        number += 1
        done = False
        for when in ("before", "after"):
            counter.unlink(missing_ok=True)
            opener = prepare()
            faulty = FaultyOpener(opener, number, _when(when), str(counter), only)
            raised: Failure | None = None
            try:
                act(faulty)
            except FAILURES as error:
                raised = error
            done = faulty.plan.calls() < number
            check(opener, raised, f"call {number}, {when}")
        if done:
            return number - 1


def _when(text: str) -> When:
    return "before" if text == "before" else "after"


# -- warehouses and their tables -------------------------------------------------------------------


def make(root: Path, **options: Any) -> Warehouse:
    """Make a warehouse on the local disk that knows both formats."""
    return with_formats(Warehouse.init(str(root), **options))


def filled(root: Path, *more: Name, **options: Any) -> Warehouse:
    """Make a warehouse with Lance table db.t and others with id 1, and Iceberg table db.facts with 10."""
    warehouse = make(root, **options)
    for name in (T, *more):
        write(Namespace(warehouse), "create", 1, name=name)
    first = catalog(root)
    first.create_namespace_if_not_exists("db")
    first.create_table("db.facts", IDS, properties={"commit.retry.num-retries": "0"})
    first.load_table("db.facts").append(id_rows(10))
    warehouse.refresh()
    return warehouse


def reopen(root: Path | str, **options: Any) -> Warehouse:
    """Open a warehouse as another process would: nothing is remembered."""
    return with_formats(Warehouse.open(str(root), **options))


def write(namespace: Namespace, mode: str, *ids: int, name: Name = T) -> Any:
    """Write ids to a Lance table."""
    return lance.write_dataset(
        pa.table({"id": pa.array(ids, pa.int64())}),
        namespace_client=namespace,
        table_id=list(name),
        mode=mode,
    )


def dataset(namespace: Namespace, name: Name = T, **options: Any) -> Any:
    """Open a Lance table through a namespace."""
    return lance.dataset(namespace_client=namespace, table_id=list(name), **options)


def lance_ids(warehouse: Warehouse, name: Name = T) -> list[int]:
    """Read a Lance table through the warehouse, and check that its path shows the same."""
    found = dataset(Namespace(warehouse), name)
    ids: list[int] = sorted(found.to_table()["id"].to_pylist())
    by_path = lance.dataset(warehouse.read().table(name).location)
    assert sorted(by_path.to_table()["id"].to_pylist()) == ids
    assert by_path.version == found.version
    return ids


def catalog(root: Path | str, **properties: str) -> Catalog:
    """Load the catalog of a warehouse the way PyIceberg's users do."""
    return load_catalog("lake", **{"py-catalog-impl": IMPL, "warehouse": str(root), **properties})


def on_branch(root: Path | str, branch: str) -> Catalog:
    return catalog(root, **{"lakewarden.branch": branch})


def id_rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def iceberg_ids(where: Catalog, name: str = "db.facts") -> list[int]:
    found: list[int] = sorted(where.load_table(name).scan().to_arrow()["id"].to_pylist())
    return found


def names_of(warehouse: Warehouse, **at: Any) -> list[str]:
    return [".".join(one.name) for one in warehouse.read(**at).tables()]


# -- warehouses in memory ---------------------------------------------------------------------------


def made_in(store: Store, world: World | None = None) -> Warehouse:
    return Warehouse.init(MEMORY, opener=lambda _: store, clock=world, chance=world, actor="anna")


def opened(store: Store, world: World | None = None) -> Warehouse:
    return Warehouse.open(MEMORY, opener=lambda _: store, clock=world, chance=world, actor="bob")


def declared(lake: Warehouse, *name: str, branch: str = MAIN) -> Table:
    return lake.declare(name or T, Format.LANCE, branch=branch)


def moved(lake: Warehouse, table: Table, version: int, branch: str = MAIN) -> Pin:
    """Move a table's pin, as a commit to it does; nothing is written."""
    view = lake.read(branch=branch)
    pin = Pin(version, f"_versions/{version}.manifest")
    change = Change(Operation.APPEND, table.id, view.pins.get(table.id), pin)
    lake.commit([change], base=lake.known, branch=branch, message=f"append {version}")
    return pin


def pinned(lake: Warehouse, name: tuple[str, ...] = T, **at: Any) -> int | None:
    """Return the version of a table, or None without the table or a version of it."""
    view = lake.read(**at)
    table = view.find(name)
    pin = view.pins.get(table.id) if table is not None else None
    return pin.version if pin is not None else None


def prepared(lake: Warehouse, table: Table, branch: str) -> Callable[[], object]:
    """Return a commit to a branch that was prepared now and is tried when it is called."""
    base = lake.refresh()
    change = Change(Operation.APPEND, table.id, None, Pin(66, "_versions/66.manifest"))
    return lambda: lake.commit([change], base=base, branch=branch, rebase=stands)
