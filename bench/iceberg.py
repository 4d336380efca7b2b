"""Measure Iceberg maintenance against Iceberg's own Spark procedures, on the same tables.

The peer is a Spark session of its own process with Iceberg's runtime, on the same catalog file, with
as many cores and as much memory as ours.  Both sessions are warm.  Times of procedures are those of
the CALL alone, without bringing its rows to Python.  Every run is checked: the files that are gone
are exactly those that the table was built to leave over.

PARTS names the parts for `scripts/bench` and their usual sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tables import Lake, appended, commit, directories, listed, overwritten, replaced, small_tables
from tables import Step as Commit

import lakewarden
from lakewarden.cli.session import Engine, start
from lakewarden.testing import iceberg, iceberg_spark
from lakewarden.testing.s3 import S3Server, s3_server

CORES = 2
MEMORY = "4g"
REPEATS = 3
#: Runs that take longer are not repeated.
LONG_SECONDS = 60
KEEP_OF_MANY = 10
KEEP_OF_DEEP = 100
KEEP_OF_SMALL = 5
#: Tables that the peer is given of a larger fleet; the rest is scaled.
FLEET_OF_PEER = 100
WARM_UPS = 3
BUCKET = "bench"
AWS = "org.apache.iceberg:iceberg-aws-bundle:1.12.0"
_DISCOVERY = "spark.sql.sources.parallelPartitionDiscovery.parallelism"

Found = dict[str, Any]


# -- our side --------------------------------------------------------------------------------------


class Ours:
    """Lakewarden on a warm session."""

    def __init__(self) -> None:
        # A long-lived session, as a worker's would be: compile hot code fully.
        conf = {"spark.driver.memory": MEMORY, "spark.driver.extraJavaOptions": "-XX:+UseSerialGC"}
        self.spark = start(Engine(master=None, conf=conf))

    def run(self, lake: Lake, operation: str, target: str = "db.t", *, preview: bool = False,
            **rules: Any) -> Found:  # fmt: skip
        """Plan and, unless it is a preview, execute; checks nothing."""
        catalog = rules.pop("opened", None) or lake.open()
        with catalog:
            lakes = {lake.name: catalog}
            where = f"iceberg://{lake.name}" + (f"/{target}" if target else "")
            plan_of = getattr(lakewarden, f"plan_{operation}")
            started = time.perf_counter()
            plan = plan_of(self.spark, where, catalog=lakes, tasks=2 * CORES, **rules)
            planned = time.perf_counter()
            assert not plan.failed, plan.failed[0].error
            found: Found = {
                "seconds": planned - started,
                "stages": dict(plan.seconds),
                "requests": dict(plan.requests),
                "files": plan.removal.files_removed,
            }
            if preview:
                found["paths"] = self._paths(plan)
                return found
            receipt = lakewarden.execute(self.spark, plan, catalog=lakes, tasks=2 * CORES)
            done = time.perf_counter()
        assert not receipt.failed, receipt.failed[0].error
        found |= {
            "seconds": done - started,
            "plan_seconds": planned - started,
            "execute_seconds": done - planned,
            "stages": {**plan.seconds, **receipt.seconds},
            "requests": _sum(plan.requests, receipt.requests),
        }
        return found

    @staticmethod
    def _paths(plan: Any) -> list[str]:
        places = {root.root_id: root.location.path for root in plan.roots}
        rows = plan.deletions.select("root_id", "path").collect()
        return [f"/{places[row.root_id]}/{row.path}" for row in rows]

    def stop(self) -> None:
        self.spark.stop()


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}


# -- the peer --------------------------------------------------------------------------------------


class Peer:
    """Iceberg's runtime in a process of its own, which answers one line of JSON with another."""

    def __init__(self, *packages: str) -> None:
        # Spark and Ivy talk a lot; what they say is wanted if the process dies.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--peer", *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
        )
        self._known: set[str] = set()
        self.ask(ready=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **order: Any) -> Found:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: Found = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer
        self._log.seek(0)
        raise RuntimeError(f"the peer is gone:\n{self._log.read()[-4000:]}")

    def call(self, lake: Lake, procedure: str, **arguments: str) -> Found:
        """Call a procedure for one table; `seconds` is the time of the call."""
        self.know(lake)
        given = ", ".join(f"{name} => {value}" for name, value in arguments.items())
        return self.ask(sql=f"CALL {lake.name}.system.{procedure}({given})")

    def know(self, lake: Lake, **settings: str) -> None:
        """Give the session the lake's catalog."""
        if lake.name not in self._known:
            mine = iceberg_spark.settings(str(lake.root)).items()
            old, new = (f"spark.sql.catalog.{name}" for name in (iceberg_spark.CATALOG, lake.name))
            made = {k.replace(old, new): v for k, v in mine if k.startswith(old)}
            self.ask(settings=made | {f"{new}.{k}": v for k, v in settings.items()})
            self._known.add(lake.name)

    def orphans(self, lake: Lake, table: str = "db.t", **arguments: str) -> Found:
        older = {"older_than": f"TIMESTAMP '{_stamp(-7)}'"}
        return self.call(lake, "remove_orphan_files", table=f"'{table}'", **older, **arguments)

    def expire(self, lake: Lake, table: str = "db.t", **arguments: str) -> Found:
        return self.call(lake, "expire_snapshots", table=f"'{table}'", **arguments)

    def expire_to(self, lake: Lake, keep: int, table: str = "db.t") -> Found:
        older = f"TIMESTAMP '{_stamp(-7)}'"
        return self.expire(lake, table, older_than=older, retain_last=str(keep))

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stamp(days: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + days * 86400))


def serve(*packages: str) -> None:
    """Be the peer's process."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    scratch = tempfile.TemporaryDirectory(prefix="lakewarden-peer-")
    settings = iceberg_spark.settings(scratch.name)
    settings = {k: v for k, v in settings.items() if not k.startswith("spark.sql.catalog.")}
    del settings["spark.sql.defaultCatalog"]
    settings["spark.driver.memory"] = MEMORY
    settings["spark.jars.packages"] = ",".join((settings["spark.jars.packages"], *packages))
    builder = SparkSession.builder.master(f"local[{CORES}]").appName("peer")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    for line in sys.stdin:
        try:
            answer = _answer(session, json.loads(line))
        except Exception as error:  # noqa: BLE001
            answer = {"error": str(error)[:4000]}
        print(json.dumps(answer, default=str), flush=True)
    session.stop()
    scratch.cleanup()


def _answer(session: Any, order: Found) -> Found:
    for name, value in order.get("settings", {}).items():
        if value is None:
            session.conf.unset(name)
        else:
            session.conf.set(name, value)
    if "view" in order:
        frame = session.read.parquet(order["view"])
        frame.selectExpr(
            "path AS file_path", "modified_at AS last_modified"
        ).createOrReplaceTempView("listed")
    if "sql" not in order:
        return {"pid": os.getpid()}
    started = time.perf_counter()
    # A CALL is executed here, and its rows are then on the driver.
    frame = session.sql(order["sql"])
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "rows": [row.asDict() for row in frame.collect()]}


# -- checks ----------------------------------------------------------------------------------------


def checked(lake: Lake, expected: Sequence[str], work: Callable[[], Found]) -> Found:
    """Run on a fresh copy; everything that is expected to go goes, and nothing else."""
    before = lake.restore().files()
    found = work()
    after = lake.files()
    wanted, gone = set(expected), before - after
    assert gone == wanted, _difference(gone, wanted)
    new = {path for path in after - before if not path.endswith(".metadata.json")}
    assert not new, sorted(new)[:3]
    found.pop("rows", None)
    return found


def reported(lake: Lake, paths: Sequence[str], expected: Sequence[str]) -> None:
    """Check what a preview says."""
    said = {os.path.relpath(path.removeprefix("file:"), lake.warehouse) for path in paths}
    assert said == set(expected), _difference(said, set(expected))


def _difference(gone: set[str], wanted: set[str]) -> str:
    more, less = sorted(gone - wanted), sorted(wanted - gone)
    return f"{len(more)} too many: {more[:3]}, {len(less)} missing: {less[:3]}"


def median(work: Callable[[], Found]) -> Found:
    """Return the run with the median time, of three unless they are long."""
    runs: list[Found] = []
    while len(runs) < REPEATS and not (runs and runs[0]["seconds"] > LONG_SECONDS):
        runs.append(work())
    return sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]


def say(what: str, line: Found) -> None:
    mine = line["ours"]
    text = f"  {what}: {mine['seconds']:.2f} s"
    for name, theirs in line.items():
        if name != "ours" and isinstance(theirs, dict) and "seconds" in theirs:
            text += (
                f", {name} {theirs['seconds']:.2f} s (x {theirs['seconds'] / mine['seconds']:.1f})"
            )
    stages = {name: round(seconds, 2) for name, seconds in mine["stages"].items()}
    print(f"{text}  {stages} {mine['requests']}", flush=True)


# -- parts -----------------------------------------------------------------------------------------


def warm_up(base: Path, ours: Ours, peer: Peer) -> None:
    """Do everything on small tables until it is compiled."""
    few, some, real = replaced(base, 50, 5), appended(base, 20, 20), listed(base, 5, 20)
    for _ in range(WARM_UPS):
        checked(few, few.expected["expire"], lambda: ours.run(few, "cleanup", keep=5))
        checked(few, few.expected["expire"], lambda: peer.expire_to(few, 5))
        checked(real, real.expected["orphans"], lambda: ours.run(real, "orphans"))
        checked(real, real.expected["orphans"], lambda: peer.orphans(real))
        some.restore()
        ours.run(some, "orphans", preview=True, inventory=str(some.inventory))
        peer.ask(view=str(some.inventory))
        peer.orphans(some, dry_run="true", file_list_view="'listed'")


def orphans(base: Path, ours: Ours, peer: Peer, sizes: Sequence[int]) -> list[Found]:
    """Find orphans with a list of files instead of a listing; nothing is deleted."""
    found = []
    for size in sizes:
        lake = appended(base, size, size).restore()
        expected = lake.expected["orphans"]

        def mine(lake: Lake = lake, expected: Sequence[str] = expected) -> Found:
            answer = ours.run(lake, "orphans", preview=True, inventory=str(lake.inventory))
            reported(lake, answer.pop("paths"), expected)
            return answer

        def theirs(lake: Lake = lake, expected: Sequence[str] = expected) -> Found:
            peer.ask(view=str(lake.inventory))
            answer = peer.orphans(lake, dry_run="true", file_list_view="'listed'")
            rows = answer.pop("rows")
            reported(lake, [row["orphan_file_location"] for row in rows], expected)
            return answer

        found.append(
            {"snapshots": size, "entries": size, "ours": median(mine), "peer": median(theirs)}
        )
        say(f"orphans by inventory, {size} x {size}", found[-1])
    return found


def listing(base: Path, ours: Ours, peer: Peer, sizes: Sequence[int]) -> list[Found]:
    """Remove orphans among files that exist."""
    found = []
    for size in sizes:
        lake = listed(base, size, size)
        found.append({"snapshots": size, "entries": size, **_removed(lake, ours, peer)})
        say(f"orphans by listing, {size} x {size}", found[-1])
    return found


def wide(base: Path, ours: Ours, peer: Peer, sizes: Sequence[int]) -> list[Found]:
    """Remove orphans from many directories."""
    found = []
    for size in sizes:
        lake = directories(base, size)
        line = {"directories": size, **_removed(lake, ours, peer)}
        gone = lake.expected["orphans"]
        # Left alone, Iceberg makes a task for each directory, up to this number.
        peer.ask(settings={_DISCOVERY: str(2 * CORES)})
        line["peer_tuned"] = median(
            lambda lake=lake, gone=gone: checked(lake, gone, lambda: peer.orphans(lake))
        )
        peer.ask(settings={_DISCOVERY: None})
        found.append(line)
        say(f"orphans in {size} directories", found[-1])
    return found


def _removed(lake: Lake, ours: Ours, peer: Peer) -> Found:
    """Remove orphans with a listing on both sides.

    Not with `prefix_listing`: on a local disk Hadoop's library then starts a process for each file,
    which says nothing about a store of objects.
    """
    expected = lake.expected["orphans"]
    return {
        "files": len(lake.restore().files()),
        "ours": median(lambda: checked(lake, expected, lambda: ours.run(lake, "orphans"))),
        "peer": median(lambda: checked(lake, expected, lambda: peer.orphans(lake))),
    }


def expire(
    base: Path, ours: Ours, peer: Peer, sizes: Sequence[int], histories: Sequence[int]
) -> Found:
    """Expire one of many snapshots, and all but a few."""
    one, many = [], []
    for size in sizes:
        lake = appended(base, size, size).restore()
        with lake.open() as catalog:
            oldest = catalog.load_table("db.t").metadata.snapshots[0].snapshot_id
        never = "TIMESTAMP '2000-01-01 00:00:00'"
        ids = {"snapshot_ids": f"ARRAY({oldest}L)", "older_than": never}
        gone = lake.expected["oldest"]
        one.append(
            {
                "snapshots": size,
                "entries": size,
                "ours": median(
                    lambda lake=lake, gone=gone, oldest=oldest: checked(
                        lake, gone, lambda: ours.run(lake, "cleanup", versions=[oldest])
                    )
                ),
                "peer": median(
                    lambda lake=lake, gone=gone, ids=ids: checked(
                        lake, gone, lambda: peer.expire(lake, **ids)
                    )
                ),
            }
        )
        say(f"expire one snapshot, {size} x {size}", one[-1])
    for size in histories:
        lake = replaced(base, size, KEEP_OF_MANY)
        many.append({"snapshots": size, "keep": KEEP_OF_MANY, **_expired(lake, ours, peer)})
        say(f"expire all but {KEEP_OF_MANY} of {size} overwrites", many[-1])
    return {"one": one, "many": many}


def _expired(lake: Lake, ours: Ours, peer: Peer) -> Found:
    gone = lake.expected["expire"]
    keep = KEEP_OF_MANY
    return {
        "files": len(gone),
        "ours": median(lambda: checked(lake, gone, lambda: ours.run(lake, "cleanup", keep=keep))),
        "peer": median(lambda: checked(lake, gone, lambda: peer.expire_to(lake, keep))),
    }


def deep(base: Path, sizes: Sequence[int]) -> list[Found]:
    """Expire most of a long history, each side in a process of its own; see what it holds."""
    found = []
    for size in sizes:
        lake = replaced(base, size, KEEP_OF_DEEP)
        line: Found = {
            "snapshots": size,
            "keep": KEEP_OF_DEEP,
            "files": len(lake.expected["expire"]),
        }
        for side in ("ours", "peer"):
            command = [sys.executable, __file__, f"--deep-{side}", str(base), str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line[side] = json.loads(done.stdout.splitlines()[-1])
        found.append(line)
        say(f"expire all but {KEEP_OF_DEEP} of {size}", line)
        print(f"    MiB: {line['ours']['mib']}, peer {line['peer']['mib']}", flush=True)
    return found


def deep_side(side: str, base: Path, size: int) -> None:
    """Warm up, expire, and print what it took."""
    small, lake = replaced(base, 200, KEEP_OF_DEEP), replaced(base, size, KEEP_OF_DEEP)

    def both(work: Callable[[Lake], Found], pid: int) -> Found:
        for _ in range(2):
            checked(small, small.expected["expire"], lambda: work(small))
        return checked(lake, lake.expected["expire"], lambda: work(lake) | {"mib": peaks(pid)})

    if side == "ours":
        ours = Ours()
        found = both(lambda one: ours.run(one, "cleanup", keep=KEEP_OF_DEEP), os.getpid())
        ours.stop()
    else:
        with Peer() as peer:
            found = both(lambda one: peer.expire_to(one, KEEP_OF_DEEP), peer.pid)
    print(json.dumps(found))


def peaks(pid: int) -> dict[str, int]:
    """Return the peak resident memory of a process and those below it, in MiB."""
    parents: dict[int, int] = {}
    peak: dict[int, tuple[str, int]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                status = (process / "status").read_text()
                fields = dict(line.split(":\t", 1) for line in status.splitlines())
                parents[int(process.name)] = int(fields["PPid"])
                kib = int(fields["VmHWM"].split()[0])
                peak[int(process.name)] = fields["Name"].strip(), kib // 1024
            except (OSError, KeyError, ValueError):
                continue
    found = {"driver": 0, "java": 0, "workers": 0}
    for one, (name, mib) in peak.items():
        above = one
        while above not in (pid, 0):
            above = parents.get(above, 0)
        if above == pid:
            kind = "driver" if one == pid else "java" if name == "java" else "workers"
            found[kind] = max(found[kind], mib)
    return found


def fleet(base: Path, ours: Ours, peer: Peer, numbers: Sequence[int]) -> list[Found]:
    """Maintain all tables of a catalog: one run, against one call for each table."""
    found = []
    for number in numbers:
        lake = small_tables(base, number, KEEP_OF_SMALL)
        called = sorted(lake.tables)[:FLEET_OF_PEER]
        share = tuple(f"db/{name.partition('.')[2]}/" for name in called)
        for operation, rules in (("cleanup", {"keep": KEEP_OF_SMALL}), ("orphans", {})):
            gone = lake.expected["expire" if operation == "cleanup" else "orphans"]
            some = [path for path in gone if path.startswith(share)]

            def one_by_one(
                operation: str = operation, lake: Lake = lake, called: Sequence[str] = called
            ) -> Found:
                seconds = 0.0
                for name in called:
                    if operation == "cleanup":
                        answer = peer.expire_to(lake, KEEP_OF_SMALL, name)
                    else:
                        answer = peer.orphans(lake, name)
                    seconds += answer["seconds"]
                return {"seconds": seconds}

            theirs = checked(lake, some, one_by_one)
            theirs |= {"called": len(called), "measured_seconds": theirs["seconds"]}
            theirs["seconds"] *= number / len(called)
            mine = median(
                lambda lake=lake, gone=gone, operation=operation, rules=rules: checked(
                    lake, gone, lambda: ours.run(lake, operation, "", **rules)
                )
            )
            found.append({"tables": number, "operation": operation, "ours": mine, "peer": theirs})
            say(f"{operation} of {number} tables ({len(called)} called)", found[-1])
    return found


# -- on S3 -----------------------------------------------------------------------------------------


def on_s3(base: Path, ours: Ours, sizes: Sequence[int]) -> list[Found]:
    """Count requests, and take times with 20 ms for each."""
    found = []
    with s3_server() as server, Peer(AWS) as peer:
        server.create_bucket(BUCKET)
        for operation in ("cleanup", "orphans"):
            for step in range(WARM_UPS):
                _on_s3(base, server, ours, peer, (operation, 12 + step))
        for size in sizes:
            for operation in ("cleanup", "orphans"):
                found.append(_on_s3(base, server, ours, peer, (operation, size)))
                line = found[-1]
                say(f"{operation}, {size} snapshots on S3 +20 ms", line)
                print(
                    f"    requests {line['ours']['on_the_wire']}, floor {line['floor']}, "
                    f"peer {line['peer']['on_the_wire']}",
                    flush=True,
                )
    return found


def _on_s3(base: Path, server: S3Server, ours: Ours, peer: Peer, case: tuple[str, int]) -> Found:
    operation, size = case
    line: Found = {"operation": operation, "snapshots": size}
    keep = KEEP_OF_MANY
    for side in ("ours", "peer"):
        server.latency(0)
        with _s3_lake(base, server, f"{operation}_{size}_{side}") as (lake, catalog, place):
            table = iceberg.create(catalog)
            if operation == "cleanup":
                gone = overwritten(table, size, keep, place)
                steps = size - keep
                # Metadata, lists of going snapshots and of their neighbour, a manifest for each
                # file that went; then a commit and the deletes.
                floor = 1 + (steps + 1) + steps + 1
            else:
                commit(table, [Commit([f"{one:05}.parquet"]) for one in range(size)])
                gone = [f"db/t/data/orphan-{one}.parquet" for one in range(size // 10)]
                for path in gone:
                    with (
                        catalog.load_table("db.t").io.new_output(f"{place}/{path}").create() as new
                    ):
                        new.write(b"")
                floor = 1 + 2 * size
            with tempfile.TemporaryDirectory() as scratch:
                iceberg.age_on_s3(server, place, 30, Path(scratch))
            before = _objects(catalog, place)
            floor += -(-len(gone) // 1000)
            floor += -(-len(before) // 1000) if operation == "orphans" else 0
            server.latency(20)
            server.reset()
            if side == "ours":
                rules = {"keep": keep} if operation == "cleanup" else {}
                answer = ours.run(lake, operation, opened=catalog, **rules)
            else:
                peer.know(lake, **_s3_settings(server, place))
                if operation == "cleanup":
                    answer = peer.expire_to(lake, keep)
                else:
                    answer = peer.orphans(lake, prefix_listing="true")
                answer.pop("rows")
            counted = server.requests().items()
            server.latency(0)
            after = _objects(iceberg.catalog(lake.root, lake.name, **_s3(server, place)), place)
            assert before - after == set(gone), _difference(before - after, set(gone))
            answer["on_the_wire"] = {kind.value: number for kind, number in counted}
            line[side] = answer
            line |= {"floor": floor, "objects": len(before), "files": len(gone)}
    return line


def _s3(server: S3Server, place: str) -> dict[str, str]:
    return iceberg.s3_properties(server) | {"warehouse": place}


def _s3_settings(server: S3Server, place: str) -> dict[str, str]:
    known = iceberg.s3_properties(server)
    return {
        "warehouse": place,
        "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
        "s3.endpoint": known["s3.endpoint"],
        "s3.access-key-id": known["s3.access-key-id"],
        "s3.secret-access-key": known["s3.secret-access-key"],
        "s3.path-style-access": "true",
        "client.region": known["s3.region"],
    }


@contextmanager
def _s3_lake(base: Path, server: S3Server, name: str) -> Iterator[tuple[Lake, Any, str]]:
    with tempfile.TemporaryDirectory(dir=base) as root:
        lake, place = Lake(Path(root), f"s3_{name}"), f"s3://{BUCKET}/{name}"
        with iceberg.catalog(lake.root, lake.name, **_s3(server, place)) as catalog:
            yield lake, catalog, place


def _objects(catalog: Any, place: str) -> set[str]:
    from lakewarden.testing.iceberg_oracle import on_disk  # noqa: PLC0415

    found = on_disk(place, catalog.properties)
    return {path.removeprefix(f"{place}/") for path in found}


# -- all of it -------------------------------------------------------------------------------------

#: Part, and the sizes it is measured with unless others are given.
PARTS: Mapping[str, Sequence[int]] = {
    "iceberg-orphans": (100, 300, 1000),
    "iceberg-listing": (100, 300),
    "iceberg-expire": (100, 300, 1000),
    "iceberg-deep": (2000, 5000, 20_000),
    "iceberg-partitions": (2000, 20_000),
    "iceberg-fleet": (25, 100, 1000),
    "iceberg-s3": (100, 300),
}


def measure(
    parts: Sequence[str], base: Path, sizes: Sequence[int] | None, keep: Callable[[Found], None]
) -> None:
    """Measure parts, and hand over the results of each as it is done."""
    asked = {part: sizes or usual for part, usual in PARTS.items() if part in parts}
    if "iceberg-deep" in asked:
        keep({"deep": deep(base, asked.pop("iceberg-deep"))})
    if not asked:
        return
    ours = Ours()
    with Peer() as peer:
        warm_up(base, ours, peer)
        for part, chosen in asked.items():
            match part:
                case "iceberg-orphans":
                    keep({"orphans": orphans(base, ours, peer, chosen)})
                case "iceberg-listing":
                    keep({"listing": listing(base, ours, peer, chosen)})
                case "iceberg-expire":
                    keep({"expire": expire(base, ours, peer, chosen, chosen)})
                case "iceberg-partitions":
                    keep({"partitions": wide(base, ours, peer, chosen)})
                case "iceberg-fleet":
                    keep({"fleet": fleet(base, ours, peer, chosen)})
                case _:
                    keep({"s3": on_s3(base, ours, chosen)})
    ours.stop()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--peer", *packages]:
            serve(*packages)
        case ["--deep-ours" | "--deep-peer" as side, base, size]:
            deep_side(side.removeprefix("--deep-"), Path(base), int(size))
