"""What Lance tables do for a warehouse: show versions, take them back, restore, fork."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import lance

from lakewarden.errors import (
    AlreadyExists,
    Damaged,
    ErrorKind,
    NotFound,
    Refused,
    StorageError,
)
from lakewarden.formats.lance.manifest import decode, transaction_file
from lakewarden.formats.lance.transaction import operation, restored
from lakewarden.model import Format
from lakewarden.storage.location import Location
from lakewarden.storage.store import LinkStore, Store
from lakewarden.warehouse import forks
from lakewarden.warehouse.manifest import Name, Pin, Table
from lakewarden.warehouse.reclaiming import keeps
from lakewarden.warehouse.warehouse import View, Warehouse
from lakewarden.world import fresh_id

#: How every manifest ends.
_END = b"LANC"
#: What the configuration of a table says if clients are to clean it after commits.
_CLEANS_ITSELF = b"lance.auto_cleanup"


class LanceTables:
    """What Lance tables do for the warehouse: show versions, take them back, restore."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._warehouse = warehouse
        #: Versions that are known to be public.
        self._shown: set[tuple[str, str]] = set()
        #: Forks that are known to be there, by table and directory, with what they begin with.
        self._forked: dict[tuple[str, str], Pin] = {}

    def store(self, table: Table) -> tuple[Store, str]:
        """Return the table's store and its key there."""
        location = Location.parse(table.location)
        return self._warehouse.opener(location), location.key

    def public(self, pin: Pin) -> str:
        """Return the path, below the table, under which everybody finds a version."""
        return forks.public(pin.path)

    def publish(self, table: Table, pin: Pin) -> None:
        if (table.id, pin.path) in self._shown:
            return
        store, root = self.store(table)
        # Lance looks at all versions since the one that a writer has read: none may be left out.
        for path in (*pin.through, pin.path):
            self._show(table, store, root, path)
        self._shown.add((table.id, pin.path))

    def _show(self, table: Table, store: Store, root: str, path: str) -> None:
        public = forks.public(path)
        if path == public:
            return
        source, target = f"{root}/{path}", f"{root}/{public}"
        try:
            if not isinstance(store, LinkStore) or not store.link(source, target):
                store.put_if_absent(target, whole(store, source))
        except NotFound:
            if store.exists(target):
                return
            raise NotFound(
                f"version {public} of {'.'.join(table.name)} was reclaimed by a cleanup; tag versions "
                "that must stay",
                ErrorKind.RECLAIMED,
            ) from None
        except AlreadyExists:
            if not _same(store, source, target):
                raise Refused(
                    ErrorKind.DRIFT,
                    f"somebody has written {public} of {'.'.join(table.name)} past the warehouse; what "
                    f"the warehouse committed under that number is in {path}: put that in its place, and "
                    f"look for more with lakewarden repair {self._warehouse.location.uri}",
                ) from None
        store.delete([source])

    def discard(self, table: Table, pin: Pin) -> None:
        store, root = self.store(table)
        store.delete([f"{root}/{path}" for path in (*pin.through, pin.path)])

    def restore(self, table: Table, current: Pin, target: Pin) -> Pin:
        # Not above: it imports this module.
        from lakewarden.warehouse.lance import Namespace, Waiting  # noqa: PLC0415

        self.publish(table, current)
        manifest = self._warehouse.known.manifest
        # It may have been dropped, and somebody else have its name: here it is alone.
        alone = replace(manifest, tables={table.id: replace(table, dropped=None)})
        views = (View(alone, branch, {table.id: current}) for branch in manifest.branches)
        at = forks.directory(current.path)
        waiting = Waiting(self, next(one for one in views if forks.own(one, table) == at))
        namespace = Namespace(self._warehouse, waiting)
        try:
            with namespace.told():
                lance.dataset(
                    namespace_client=namespace, table_id=list(table.name), version=target.version
                ).restore()
        except (OSError, ValueError) as error:
            raise NotFound(
                f"version {target.version} of {'.'.join(table.name)} was reclaimed by a cleanup; it "
                f"cannot be brought back ({' '.join(str(error).split())[:100]})",
                ErrorKind.RECLAIMED,
            ) from error
        return waiting.pins[table.id]

    def new_table(self, view: View, name: Name, location: str | None) -> Table:
        table = self._warehouse.new_table(view, name, Format.LANCE, location=location)
        self._warehouse.mark(table)
        return table

    def staged(self, view: View, table: Table, key: str) -> str:
        """Return the path of a manifest that a client has staged, given by its key in the store.

        Raises Refused if it is not where versions of the table on that branch are: it may be one of
        another table, or of a branch that was deleted and made again.
        """
        root = Location.parse(table.location).key
        if not key.startswith(f"{root}/{forks.own(view, table)}_versions/"):
            raise Refused(
                ErrorKind.LOCATION_OVERLAP,
                f"the manifest {key} is not one of table {'.'.join(table.name)} ({root}) on branch "
                f"{view.branch}; open the table again, and write what is to be written there",
            )
        return key[len(root) + 1 :]

    def on_branch(self, view: View, table: Table) -> Pin | None:
        """Return the version that is current on a branch, where a client can go on from there.

        A client tells where it writes when it opens a table, long before it does: so this is when
        the table is forked.  If that cannot be done, by somebody who may only read perhaps, the
        version is where it was; what is written from there is refused.
        """
        pin, fork = view.pins.get(table.id), forks.own(view, table)
        if pin is None or forks.directory(pin.path) == fork:
            return pin
        if (table.id, fork) not in self._forked:
            made = self._fork(table, pin, fork)
            if made is None:
                return pin
            self._forked[table.id, fork] = made
        return self._forked[table.id, fork]

    def _fork(self, table: Table, base: Pin, fork: str) -> Pin | None:
        """Make a branch of Lance's own of a version, or find the one that somebody else has made.

        The version that it begins with comes first and is created if absent, then the ref that
        protects what it needs; whoever finds the one without the other adds it.
        """
        self.publish(table, base)
        store, root = self.store(table)
        made = replace(base, path=f"{fork}_versions/{forks.file_name(base.version)}")
        made = replace(made, size=None, e_tag=None, through=())
        ref = f"{root}/_refs/branches/{forks.name(fork)}.json"
        with suppress(StorageError):
            if store.exists(f"{root}/{made.path}") and store.exists(ref):
                return made
        source = f"{uri_of(table)}/{forks.directory(base.path)}".rstrip("/")
        try:
            found = lance.dataset(source, version=base.version, storage_options=self.options())
            found.create_branch(forks.name(fork))
        except (OSError, ValueError, RuntimeError):
            # Somebody else was faster, or died before the ref, or we may not write here.
            if not store.exists(f"{root}/{made.path}"):
                return None
            self._add_ref(table, base, fork)
        return made

    def _add_ref(self, table: Table, base: Pin, fork: str) -> None:
        store, root = self.store(table)
        parent = forks.name(forks.directory(base.path))
        before: list[Any] = []
        if parent is not None:
            told = json.loads(store.get(f"{root}/_refs/branches/{parent}.json"))
            before = told["identifier"]["version_mapping"]
        manifest = store.get(f"{root}/{forks.public(base.path)}")
        ref = {
            "parentBranch": parent,
            "identifier": {"version_mapping": [*before, [base.version, fresh_id()]]},
            "parentVersion": base.version,
            "createAt": int(self._warehouse.log.clock.now().timestamp()),
            "manifestSize": len(manifest),
            "metadata": {},
        }
        with suppress(AlreadyExists):
            key = f"{root}/_refs/branches/{forks.name(fork)}.json"
            store.put_if_absent(key, json.dumps(ref).encode())

    def forks(self, table: Table, branches: Mapping[int, str]) -> dict[str, Any]:
        """Return the refs of a table's forks, with the names of the branches that they belong to."""
        store, root = self.store(table)
        _, names = store.list_directory(f"{root}/_refs/branches")
        found = {}
        for name in (one.removesuffix(".json") for one in names):
            made = forks.number(name)
            if made is not None and made in branches:
                told = json.loads(store.get(f"{root}/_refs/branches/{name}.json"))
                found[name] = {**told, "metadata": {"lakewarden.branch": branches[made]}}
        return found

    def options(self) -> dict[str, str] | None:
        """Return how clients reach the tables' store."""
        return dict(getattr(self._warehouse.opener, "options", {})) or None

    def admitted(self, table: Table, pin: Pin) -> str:
        """Return what a version that was staged does, in Lance's words, if it may become one.

        Refused are those that go back to what was reclaimed, let clients clean the table on their own
        from now on, or lose an index.
        """
        store, root = self.store(table)
        manifest = whole(store, f"{root}/{pin.path}")
        _check_cleaning(table, manifest)
        named = transaction_file(manifest)
        if not named:
            raise Damaged(
                ErrorKind.UNSUPPORTED_FEATURE,
                f"version {pin.version} of {'.'.join(table.name)} does not say what it changes",
            )
        fork = forks.directory(pin.path)
        told = store.get(f"{root}/{fork}_transactions/{named}")
        target = restored(told)
        if target is not None and not keeps(self._warehouse, table, pin, target):
            raise NotFound(
                f"version {target} of {'.'.join(table.name)} was reclaimed by a cleanup; it cannot be "
                "brought back",
                ErrorKind.RECLAIMED,
            )
        does = operation(told)
        if does == "rewrite" and fork:
            _check_indices(store, root, table, fork, manifest)
        return does

    def check_head(self, table: Table, pin: Pin) -> None:
        """Raise Refused if a version that everybody sees must not become one of the warehouse."""
        store, root = self.store(table)
        manifest = whole(store, f"{root}/{pin.path}")
        _check_cleaning(table, manifest)
        fork = forks.directory(pin.path)
        if fork:
            _check_indices(store, root, table, fork, manifest)


def _check_cleaning(table: Table, manifest: bytes) -> None:
    """Refuse a version that lets clients clean the table on their own from then on."""
    if _CLEANS_ITSELF in manifest:
        raise Refused(
            ErrorKind.UNSUPPORTED_FEATURE,
            f"{'.'.join(table.name)} would clean itself by {_CLEANS_ITSELF.decode()}.*, which knows "
            "nothing of the warehouse's tags and branches; take that out, and set the properties "
            "lakewarden.auto-cleanup.* instead",
        )


def _check_indices(store: Store, root: str, table: Table, fork: str, manifest: bytes) -> None:
    """Refuse a compaction on a branch that would lose an index.

    Lance 14 rewrites an index that a branch has from its base in the branch's directory, and goes on
    to name the base's: whoever reads with it would find nothing.
    """
    for base, path in decode(manifest).named:
        if base is None or not path.startswith("_indices/"):
            continue
        directories, files = store.list_directory(f"{root}/{fork}{path.rstrip('/')}")
        if directories or files:
            raise Refused(
                ErrorKind.UNSUPPORTED_FEATURE,
                f"compaction of {'.'.join(table.name)} on a branch would lose an index that the branch "
                "has from its base; nothing was committed: use "
                "compact_files(defer_index_remap=True), or build the index anew on the branch first",
            )


def whole(store: Store, key: str) -> bytes:
    """Return a manifest, after checking that it was not cut short on its way."""
    data = store.get(key)
    if not data.endswith(_END):
        raise StorageError(
            ErrorKind.STORAGE, f"{key} does not end like a manifest; it was read in part: try again"
        )
    return data


def _same(store: Store, source: str, target: str) -> bool:
    """Tell whether what is public is what was committed; somebody else may have shown it first."""
    try:
        return whole(store, source) == whole(store, target)
    except NotFound:
        return store.exists(target)


def uri_of(table: Table, pin: Pin | None = None) -> str:
    """Return where Lance finds a table, or the fork of it that a version is one of."""
    location = Location.parse(table.location)
    root = f"/{location.path}" if location.is_local else table.location.rstrip("/")
    return f"{root}/{forks.directory(pin.path)}".rstrip("/") if pin is not None else root


def tables_of(warehouse: Warehouse) -> LanceTables:
    """Return the warehouse's own view of its Lance tables."""
    found = warehouse.formats.setdefault(Format.LANCE, LanceTables(warehouse))
    assert isinstance(found, LanceTables)
    return found
