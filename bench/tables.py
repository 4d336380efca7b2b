"""Histories to clean, built once and copied by hard links, so both sides clean the same files."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import fastavro
import lance
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table

from lakewarden.testing import iceberg, iceberg_oracle
from lakewarden.testing.iceberg import LakeCatalog

DAY = 86400


def rows(first: int, number: int = 3) -> pa.Table:
    return pa.table({"id": range(first, first + number), "value": [0.5] * number})


def grow(base: Path, kind: str, sizes: list[int]) -> dict[int, Path]:
    """Build one history and keep a copy of it at every size."""
    copies = {size: base / f"{kind}-{size}.lance" for size in sizes}
    if all(copy.exists() for copy in copies.values()):
        return copies
    growing = base / f"{kind}-growing.lance"
    shutil.rmtree(growing, ignore_errors=True)
    mode = "append" if kind == "append" else "overwrite"
    table = None
    for version in range(1, max(sizes) + 1):
        target = table if table is not None else str(growing)
        table = lance.write_dataset(rows(version), target, mode=mode if version > 1 else "create")
        if version in copies:
            shutil.rmtree(copies[version], ignore_errors=True)
            shutil.copytree(growing, copies[version])
            print(f"  built {kind} {version}", flush=True)
    shutil.rmtree(growing)
    return copies


def fleet(base: Path, number: int, versions: int = 20) -> Path:
    """Build `number` small tables by copying one."""
    place = base / f"fleet-{number}"
    if place.exists():
        return place
    one = base / "fleet-one.lance"
    shutil.rmtree(one, ignore_errors=True)
    for version in range(versions):
        lance.write_dataset(rows(version), str(one), mode="overwrite" if version else "create")
    making = base / "fleet-making"
    shutil.rmtree(making, ignore_errors=True)
    for table in range(number):
        shutil.copytree(one, making / f"t{table:04d}.lance")
    making.rename(place)
    return place


def age(place: Path, days: float) -> None:
    """Set every file's modification time back."""
    moment = time.time() - days * DAY
    for directory, _, names in os.walk(place):
        for name in names:
            os.utime(Path(directory) / name, (moment, moment))


def linked(source: Path, target: Path) -> Path:
    """Copy by hard links: cheap, and deleting the copy leaves the source."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-al", str(source), str(target)], check=True)
    return target


# -- Iceberg ---------------------------------------------------------------------------------------

#: What an operation should delete: an operation's name, and paths below the warehouse.
Expected = dict[str, list[str]]
#: Histories up to this length are also checked with PyIceberg, which is slow.
CHECKED = 300
_ADDED, _DELETED = 1, 2


@dataclass(frozen=True, slots=True)
class Lake:
    """A catalog of Iceberg tables that can be brought back to what it was.

    Metadata names files by their whole path, so a copy elsewhere would name the original: there is
    one place, to which the files are linked again before every run.
    """

    root: Path
    name: str

    @property
    def warehouse(self) -> Path:
        return self.root / "warehouse"

    @property
    def inventory(self) -> Path:
        return self.root / "inventory.parquet"

    @property
    def expected(self) -> Expected:
        found: Expected = json.loads((self.root / "expected.json").read_text())
        return found

    @property
    def tables(self) -> list[str]:
        return [name for name, _ in json.loads((self.root / "pointers.json").read_text())]

    def open(self) -> LakeCatalog:
        return iceberg.catalog(self.root, self.name)

    def restore(self) -> Lake:
        """Bring back every file and every pointer."""
        linked(self.root / "master", self.warehouse)
        with closing(sqlite3.connect(self.root / "catalog.db")) as base, base:
            base.executemany(
                "UPDATE iceberg_tables SET metadata_location = ?2, previous_metadata_location = NULL"
                " WHERE table_namespace || '.' || table_name = ?1",
                json.loads((self.root / "pointers.json").read_text()),
            )
        return self

    def files(self) -> set[str]:
        """Return what is there, below the warehouse, without Hadoop's checksums."""
        return {
            os.path.relpath(os.path.join(directory, name), self.warehouse)  # noqa: PTH118
            for directory, _, names in os.walk(self.warehouse)
            for name in names
            if not name.endswith(".crc")
        }

    def freeze(self, expected: Expected) -> None:
        """Keep what was built, 30 days old, as what `restore` brings back."""
        age(self.warehouse, 30)
        with closing(sqlite3.connect(self.root / "catalog.db")) as base:
            pointers = base.execute(
                "SELECT table_namespace || '.' || table_name, metadata_location FROM iceberg_tables"
            ).fetchall()
        (self.root / "pointers.json").write_text(json.dumps(pointers))
        self.warehouse.rename(self.root / "master")
        (self.root / "expected.json").write_text(json.dumps(expected))


def lake(base: Path, name: str, make: Callable[[Lake, LakeCatalog], Expected]) -> Lake:
    """Build a catalog once."""
    found = Lake(base / f"iceberg-{name.replace('_', '-')}", name)
    if not (found.root / "expected.json").exists():
        shutil.rmtree(found.root, ignore_errors=True)
        started = time.perf_counter()
        with found.open() as catalog:
            expected = make(found, catalog)
        found.freeze(expected)
        print(f"  built {name} in {time.perf_counter() - started:.0f} s", flush=True)
    return found


def appended(base: Path, snapshots: int, entries: int) -> Lake:
    """Appends of files that nobody has written, and an inventory with 10 % orphans in it."""

    def make(here: Lake, catalog: LakeCatalog) -> Expected:
        table = iceberg.create(catalog)
        iceberg.synthetic(table, snapshots, entries)
        iceberg.backdate(table, 30)
        paths = contents(table)
        assert len(paths) == snapshots * entries
        orphans = [f"db/t/data/orphan-{step:07}.parquet" for step in range(len(paths) // 10)]
        listed = paths + [f"file://{here.warehouse}/{path}" for path in orphans]
        # Not in the order of the table.
        listed.sort(key=lambda path: path[::-1])
        then = pa.scalar(int((time.time() - 30 * DAY) * 1e6), pa.timestamp("us", tz="UTC"))
        columns = {"path": listed, "size": [500] * len(listed)}
        described = pa.table(columns).append_column("modified_at", pa.repeat(then, len(listed)))
        pq.write_table(described, here.inventory, row_group_size=1 << 17)
        oldest = iceberg.local(table.metadata.snapshots[0].manifest_list)
        return {"orphans": orphans, "oldest": [str(oldest.relative_to(here.warehouse))]}

    return lake(base, f"appended_{snapshots}x{entries}", make)


def contents(table: Table) -> list[str]:
    """Return the content files of the current snapshot."""
    current = table.current_snapshot()
    assert current is not None
    return [
        entry["data_file"]["file_path"]
        for manifest in _read(table, current.manifest_list)[1]
        for entry in _read(table, manifest["manifest_path"])[1]
    ]


def listed(base: Path, snapshots: int, entries: int) -> Lake:
    """Appends of files that exist and are empty, with 10 % orphans among them."""
    steps = [
        Step([f"{one:05}-{two:05}.parquet" for two in range(entries)]) for one in range(snapshots)
    ]
    orphans = [f"orphan-{step:07}.parquet" for step in range(snapshots * entries // 10)]
    return _with_orphans(base, f"listed_{snapshots}x{entries}", steps, orphans)


def directories(base: Path, number: int) -> Lake:
    """One to five empty files in each of many directories, and an orphan in every tenth."""
    names = [[f"day={one:06}/{two}.parquet" for two in range(1 + one % 5)] for one in range(number)]
    cut = -(-number // 20)
    steps = [Step(list(chain(*names[start : start + cut]))) for start in range(0, number, cut)]
    orphans = [f"day={one:06}/orphan.parquet" for one in range(0, number, 10)]
    return _with_orphans(base, f"directories_{number}", steps, orphans)


def replaced(base: Path, snapshots: int, keep: int) -> Lake:
    """Overwrites: every snapshot adds a file and takes the one before away."""

    def make(here: Lake, catalog: LakeCatalog) -> Expected:
        table = iceberg.create(catalog)
        return {"expire": overwritten(table, snapshots, keep, here.warehouse)}

    return lake(base, f"replaced_{snapshots}_{keep}", make)


def small_tables(base: Path, number: int, keep: int, snapshots: int = 10) -> Lake:
    """Many tables with a few overwrites and two orphans each."""

    def make(here: Lake, catalog: LakeCatalog) -> Expected:
        expected: Expected = {"expire": [], "orphans": []}
        for one in range(number):
            table = iceberg.create(catalog, f"db.t{one:04}")
            expected["expire"] += overwritten(table, snapshots, keep, here.warehouse)
            for two in range(2):
                left = f"db/t{one:04}/data/orphan-{two}.parquet"
                iceberg.orphan(here.warehouse, left)
                expected["orphans"].append(left)
        return expected

    return lake(base, f"small_{number}_{keep}", make)


def overwritten(table: Table, snapshots: int, keep: int, below: Path | str) -> list[str]:
    """Overwrite a table; returns what keeping the last `keep` snapshots leaves over."""
    names = [f"{one:06}.parquet" for one in range(snapshots)]
    gone = commit(
        table,
        [
            Step([name], names[one - 1 : one] if one else [], carry=False)
            for one, name in enumerate(names)
        ],
    )
    left = [path for made in gone[: snapshots - keep] for path in made]
    if snapshots <= CHECKED and table.location().startswith("file:"):
        _check(table, snapshots - keep, left)
    start = len(str(below).removeprefix("file://")) + 1
    return [path.removeprefix("file://")[start:] for path in left]


def _check(table: Table, going: int, left: Sequence[str]) -> None:
    """Compare what the history is built to leave over with what PyIceberg says it leaves."""
    now = iceberg.read_metadata(table, table.metadata_location)
    later = f"{table.location()}/metadata/later.metadata.json"
    iceberg.write_metadata(table, later, {**now, "snapshots": now["snapshots"][going:],
                                          "snapshot-log": now["snapshot-log"][going:]})  # fmt: skip
    named = iceberg_oracle.leftovers(table, later)
    iceberg.local(later).unlink()
    assert named == {iceberg_oracle.normal(path) for path in left}


def _with_orphans(base: Path, name: str, steps: Sequence[Step], orphans: Sequence[str]) -> Lake:
    def make(here: Lake, catalog: LakeCatalog) -> Expected:
        table = iceberg.create(catalog)
        commit(table, steps)
        data = here.warehouse / "db" / "t" / "data"
        for path in orphans:
            (data / path).touch()
        return {"orphans": [f"db/t/data/{path}" for path in orphans]}

    return lake(base, name, make)


@dataclass(frozen=True, slots=True)
class Step:
    """A snapshot to make: files that come and go, below the table's data directory."""

    adds: Sequence[str]
    removes: Sequence[str] = ()
    #: Whether the manifests of the snapshot before stay.
    carry: bool = True


def commit(table: Table, steps: Iterable[Step]) -> list[list[str]]:
    """Give a table a history at once, a month old, with empty data files.

    Returns what each snapshot alone needs if none carries manifests over: its list, its manifests
    and the files that it adds.  The schemas and headers are those of the test kit's manifests.
    """
    iceberg.synthetic(table, 1, 1)
    metadata = iceberg.read_metadata(table, table.metadata_location)
    [first] = metadata["snapshots"]
    lists = _read(table, first["manifest-list"])
    manifests = _read(table, lists[1][0]["manifest_path"])
    for path in (first["manifest-list"], lists[1][0]["manifest_path"]):
        table.io.delete(path)
    made: list[list[str]] = []
    held: list[dict[str, Any]] = []
    history = []
    steps = list(steps)
    start = int((time.time() - 30 * DAY) * 1000) - 1000 * len(steps)
    for number, step in enumerate(steps, 1):
        one = first | {"snapshot-id": 10**12 + number, "sequence-number": number,
                       "timestamp-ms": start + 1000 * number}  # fmt: skip
        if number > 1:
            one["parent-snapshot-id"] = one["snapshot-id"] - 1
        new = [
            _manifest(table, manifests, lists[1][0], (number, part), status, names)
            for part, (status, names) in enumerate(((_ADDED, step.adds), (_DELETED, step.removes)))
            if names
        ]
        held = new + (held if step.carry else [])
        place = f"{table.location()}/metadata/snap-{one['snapshot-id']}.avro"
        header = {"snapshot-id": str(one["snapshot-id"]), "sequence-number": str(number)}
        _write(table, place, lists, header, held)
        one["manifest-list"] = place
        history.append(one)
        adds = [f"{table.location()}/data/{name}" for name in step.adds]
        for path in adds:
            _put(table, path, b"")
        made.append([place, *(manifest["manifest_path"] for manifest in new), *adds])
    log = [{key: one[key] for key in ("snapshot-id", "timestamp-ms")} for one in history]
    head = history[-1]["snapshot-id"]
    metadata |= {"snapshots": history, "snapshot-log": log, "current-snapshot-id": head,
                 "last-sequence-number": len(history), "last-updated-ms": start + 1000 * len(steps),
                 "refs": {"main": {"snapshot-id": head, "type": "branch"}}}  # fmt: skip
    for entry in metadata["metadata-log"]:
        entry["timestamp-ms"] = start
    iceberg.write_metadata(table, table.metadata_location, metadata)
    table.refresh()
    return made


#: An Avro file's schema and header, and what is in it.
Avro = tuple[tuple[Any, dict[str, str]], list[Any]]


def _manifest(
    table: Table, like: Avro, described: dict[str, Any], number: tuple[int, int], status: int,
    names: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    snapshot, part = number
    place = f"{table.location()}/metadata/{snapshot:06}-m{part}.avro"
    [entry] = like[1]
    marks = {"status": status, "snapshot_id": 10**12 + snapshot}
    if status == _DELETED:
        marks |= {"sequence_number": snapshot - 1, "file_sequence_number": snapshot - 1}
    entries = [
        entry
        | marks
        | {"data_file": entry["data_file"] | {"file_path": f"{table.location()}/data/{name}"}}
        for name in names
    ]
    return described | {
        "manifest_path": place,
        "manifest_length": _write(table, place, like, {}, entries),
        "sequence_number": snapshot,
        "min_sequence_number": snapshot,
        "added_snapshot_id": 10**12 + snapshot,
        "added_files_count": len(names) if status == _ADDED else 0,
        "added_rows_count": len(names) if status == _ADDED else 0,
        "deleted_files_count": len(names) if status == _DELETED else 0,
        "deleted_rows_count": len(names) if status == _DELETED else 0,
    }


def _read(table: Table, path: str) -> Avro:
    with table.io.new_input(path).open() as file:
        reader = fastavro.reader(BytesIO(file.read()))
        held = list(reader)
    header = {k: v for k, v in reader.metadata.items() if not k.startswith("avro.")}
    schema = fastavro.parse_schema(reader.writer_schema) if reader.writer_schema else {}
    return (schema, header), held


def _write(table: Table, path: str, like: Avro, header: dict[str, str], held: list[Any]) -> int:
    (schema, known), _ = like
    buffer = BytesIO()
    fastavro.writer(buffer, schema, held, codec="deflate", metadata=known | header)
    _put(table, path, buffer.getvalue())
    return buffer.tell()


def _put(table: Table, path: str, data: bytes) -> None:
    if path.startswith("file://"):
        file = Path(path.removeprefix("file://"))
        try:
            file.write_bytes(data)
        except FileNotFoundError:
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
        return
    with table.io.new_output(path).create() as stream:
        stream.write(data)
