"""Measure cleanup against pylance's own, in the same run, on the same files.

    make bench                       everything (about an hour)
    scripts/bench history fleet      some parts
    scripts/bench --sizes 500,1000   smaller
    scripts/bench iceberg-orphans --iceberg-sizes 100,300

Parts that begin with `iceberg` are in bench/iceberg.py.  Results go to bench/results.json;
`bench/report.py` turns them into the page in the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import iceberg
import jobs
import lance
import optimize
import service
import ticks
import warehouse
from tables import age, fleet, grow, linked, rows

import lakewarden
from lakewarden.cli.session import Engine, start
from lakewarden.testing.s3 import s3_server

RESULTS = Path(__file__).with_name("results.json")
KEEP = 10
REPEATS = 3


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = work()
    return time.perf_counter() - started, answer


def ours(spark: Any, targets: list[str], **rules: Any) -> dict[str, Any]:
    """Plan and execute; the numbers a receipt reports."""
    rules = {"keep": KEEP, "min_age": "0s", "tasks": 2 * (os.cpu_count() or 1), **rules}
    options = rules.get("storage_options")
    plan_seconds, plan = timed(lambda: lakewarden.plan_cleanup(spark, targets, **rules))
    seconds, receipt = timed(
        lambda: lakewarden.execute(spark, plan, tasks=rules["tasks"], storage_options=options)
    )
    assert not receipt.failed, receipt.failed[0]
    requests = dict(plan.requests)
    for kind, number in receipt.requests.items():
        requests[kind] = requests.get(kind, 0) + number
    return {
        "plan_seconds": plan_seconds,
        "execute_seconds": seconds,
        "seconds": plan_seconds + seconds,
        "requests": requests,
        "stages": {**plan.seconds, **receipt.seconds},
        "files": receipt.removed.files_removed,
        "versions": receipt.removed.old_versions_removed,
    }


def native(place: str, options: dict[str, str] | None = None) -> dict[str, Any]:
    table = lance.dataset(place, storage_options=options)
    seconds, stats = timed(
        lambda: table.cleanup_old_versions(retain_versions=KEEP, error_if_tagged_old_versions=False)
    )
    return {"seconds": seconds, "versions": stats.old_versions}


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median time."""
    return sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]


def history(
    spark: Any, base: Path, scratch: Path, sizes: list[int], kind: str, days: float
) -> list[dict[str, Any]]:
    found = []
    for size, source in grow(base, kind, sizes).items():
        age(source, days)
        mine = best(
            [ours(spark, [str(linked(source, scratch / "a.lance"))]) for _ in range(REPEATS)]
        )
        theirs = best([native(str(linked(source, scratch / "b.lance"))) for _ in range(REPEATS)])
        assert mine["versions"] == theirs["versions"], (mine, theirs)
        survivors = lance.dataset(str(scratch / "a.lance"))
        assert survivors.count_rows() == lance.dataset(str(scratch / "b.lance")).count_rows()
        found.append({"size": size, "ours": mine, "native": theirs})
        print(
            f"  {kind} {size} ({days:g} days old): {mine['seconds']:.2f} s, native {theirs['seconds']:.2f} s, "
            f"ratio {theirs['seconds'] / mine['seconds']:.1f}  {mine['stages']}",
            flush=True,
        )
    return found


def history_s3(spark: Any, base: Path, sizes: list[int]) -> list[dict[str, Any]]:
    found = []
    with s3_server() as server:
        server.create_bucket("bench")
        options = server.options
        for size, source in grow(base, "append", sizes).items():
            server.latency(0)
            for name in ("a", "b"):
                server.load("bench", f"{name}{size}.lance", str(source), age_days=30)
            objects = sum(len(names) for _, _, names in os.walk(source))
            server.latency(20)
            server.reset()
            mine = ours(spark, [f"s3://bench/a{size}.lance"], storage_options=options)
            mine["on_the_wire"] = {kind.value: number for kind, number in server.requests().items()}
            server.reset()
            theirs = native(f"s3://bench/b{size}.lance", options)
            theirs["on_the_wire"] = {
                kind.value: number for kind, number in server.requests().items()
            }
            floor = -(-objects // 1000) + KEEP + -(-mine["files"] // 1000)
            found.append({"size": size, "ours": mine, "native": theirs, "floor": floor})
            print(
                f"  append {size} on S3 +20 ms: {mine['seconds']:.2f} s, native {theirs['seconds']:.2f} s; "
                f"requests {sum(mine['on_the_wire'].values())} (floor {floor}), native "
                f"{sum(theirs['on_the_wire'].values())}  {mine['stages']}",
                flush=True,
            )
    return found


def fleets(spark: Any, base: Path, scratch: Path) -> list[dict[str, Any]]:
    found = []
    for number in (300, 1000):
        source = fleet(base, number)
        age(source, 30)
        mine = best(
            [
                ours(spark, [str(linked(source, scratch / "fa"))], recursive=True)
                for _ in range(REPEATS)
            ]
        )
        copy = linked(source, scratch / "fb")
        seconds, _ = timed(
            lambda copy=copy: [native(str(place)) for place in sorted(copy.iterdir())]
        )
        found.append(
            {"tables": number, "store": "local", "ours": mine, "native": {"seconds": seconds}}
        )
        print(
            f"  {number} tables: {mine['seconds']:.2f} s, native one by one {seconds:.2f} s  {mine['stages']}",
            flush=True,
        )
    with s3_server() as server:
        server.create_bucket("bench")
        options = server.options
        for number in (300, 1000):
            source = fleet(base, number)
            server.latency(0)
            for name in ("a", "b"):
                server.load("bench", f"{name}{number}", str(source), age_days=30)
            objects = sum(len(names) for _, _, names in os.walk(source))
            server.latency(20)
            server.reset()
            mine = ours(spark, [f"s3://bench/a{number}"], recursive=True, storage_options=options)
            mine["on_the_wire"] = {kind.value: count for kind, count in server.requests().items()}
            floor = -(-objects // 1000) + KEEP * number + -(-mine["files"] // 1000)
            line = {"tables": number, "store": "S3 +20 ms", "ours": mine, "floor": floor}
            if number == 300:
                server.reset()
                places = [
                    f"s3://bench/b{number}/{table.name}" for table in sorted(source.iterdir())
                ]
                seconds, _ = timed(
                    lambda places=places: [native(place, options) for place in places]
                )
                counted = {kind.value: count for kind, count in server.requests().items()}
                line["native"] = {"seconds": seconds, "on_the_wire": counted}
            found.append(line)
            print(
                f"  {number} tables on S3 +20 ms: {mine['seconds']:.2f} s, native "
                f"{line.get('native', {}).get('seconds', float('nan')):.1f} s; requests "
                f"{sum(mine['on_the_wire'].values())} (floor {floor}) {mine['stages']}",
                flush=True,
            )
    return found


def memory(base: Path) -> list[dict[str, Any]]:
    """Preview tables of many objects, each in a process of its own, and see what it holds."""
    found = []
    for number in (10_000, 100_000, 1_000_000):
        place = base / f"objects-{number}.lance"
        if not place.exists():
            lance.write_dataset(rows(1), str(place))
            data = place / "data"
            for step in range(number):
                (data / f"{step * 2796203 % 2**24:024b}{step:026x}.lance").touch()
        answer = subprocess.run(
            [sys.executable, __file__, "--probe", str(place)],
            capture_output=True,
            text=True,
            check=True,
        )
        found.append({"objects": number, **json.loads(answer.stdout.splitlines()[-1])})
        print(f"  {found[-1]}", flush=True)
    return found


def probe(place: str) -> None:
    spark = start(Engine())
    seconds, plan = timed(lambda: lakewarden.plan_cleanup(spark, [place], keep=1, tasks=4))
    peak = {"java": 0, "worker": 0}
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            status = (process / "status").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        mine = f"PPid:\t{os.getpid()}" in status or "lakewarden.pipeline.daemon" in command
        if mine and "VmHWM" in status:
            kind = "java" if "java" in command.partition("\0")[0] else "worker"
            kib = int(status.partition("VmHWM:")[2].split()[0])
            peak[kind] = max(peak[kind], kib // 1024)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "driver_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "java_mib": peak["java"],
                "worker_mib": peak["worker"],
                "requests": dict(plan.requests),
                "stages": dict(plan.seconds),
            }
        )
    )


def cold(base: Path, scratch: Path) -> dict[str, float]:
    """From pressing return: the command line on a small table."""
    source = grow(base, "append", [500])[500]
    place = str(linked(source, scratch / "cold.lance"))
    command = str(Path(sys.executable).with_name("lakewarden"))
    lines = {
        "--help": [command, "--help"],
        "versions": [command, "versions", place],
        "refs": [command, "refs", place],
        "cleanup, preview": [command, "cleanup", place, "--keep", "10", "--min-age", "0s"],
    }
    found = {}
    for name, line in lines.items():
        runs = [
            timed(lambda line=line: subprocess.run(line, capture_output=True, check=True))[0]
            for _ in range(REPEATS)
        ]
        found[name] = statistics.median(runs)
        print(f"  {name}: {found[name]:.2f} s", flush=True)
    return found


PARTS = ("history", "young", "s3", "fleet", "memory", "cold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = [
        *PARTS,
        *iceberg.PARTS,
        *warehouse.PARTS,
        *jobs.PARTS,
        *service.PARTS,
        *ticks.PARTS,
        *optimize.PARTS,
    ]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(known)}")
    parser.add_argument("--sizes", default="500,1000,2000,4000,8000")
    parser.add_argument("--iceberg-sizes", help="instead of each part's own")
    parser.add_argument("--optimize-mib", type=int, default=optimize.MIB)
    parser.add_argument("--jobs-database", help="an empty PostgreSQL database, beside SQLite")
    parser.add_argument("--tick-tables", type=int, default=ticks.TABLES)
    parser.add_argument("--base", default=str(Path(tempfile.gettempdir()) / "lakewarden-bench"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--probe")
    args = parser.parse_args()
    if args.probe:
        probe(args.probe)
        return
    parts = args.parts or known
    if not set(parts) <= set(known):
        parser.error(f"the parts are {', '.join(known)}")
    base = Path(args.base)
    base.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}

    def keep(found: dict[str, Any]) -> None:
        results.update(found)
        args.results.write_text(json.dumps(results, indent=1) + "\n")

    def keep_iceberg(found: dict[str, Any]) -> None:
        keep({"iceberg": {**results.get("iceberg", {}), **found}})

    keep(measure(parts, base, [int(size) for size in args.sizes.split(",")]))
    sizes = [int(size) for size in args.iceberg_sizes.split(",")] if args.iceberg_sizes else None
    iceberg.measure(parts, base, sizes, keep_iceberg)
    warehouse.measure(
        parts, lambda found: keep({"warehouse": {**results.get("warehouse", {}), **found}})
    )
    optimize.measure(
        parts,
        base,
        args.optimize_mib,
        lambda found: keep({"optimize": {**results.get("optimize", {}), **found}}),
    )
    jobs.measure(
        parts,
        args.jobs_database,
        lambda found: keep({"jobs": {**results.get("jobs", {}), **found}}),
    )
    ticks.measure(
        parts,
        base,
        args.tick_tables,
        lambda found: keep({"jobs": {**results.get("jobs", {}), **found}}),
    )
    service.measure(parts, args.jobs_database, lambda found: keep({"service": found}))


def measure(parts: list[str], base: Path, sizes: list[int]) -> dict[str, Any]:
    scratch = base / "scratch"
    results: dict[str, Any] = {}
    if "cold" in parts:
        results["cold"] = cold(base, scratch)
    if "memory" in parts:
        results["memory"] = memory(base)
    warm = {"history", "young", "s3", "fleet"} & set(parts)
    if warm:
        spark = start(Engine())
        small = linked(grow(base, "append", [500])[500], scratch / "warm.lance")
        for _ in range(3):
            lakewarden.plan_cleanup(spark, [str(small)], keep=KEEP, tasks=4)
        if "history" in warm:
            results["append"] = history(spark, base, scratch, sizes, "append", 30)
            results["overwrite"] = history(spark, base, scratch, sizes, "overwrite", 30)
        if "young" in warm:
            results["young"] = history(
                spark, base, scratch, [s for s in sizes if s <= 4000], "append", 0
            )
        if "s3" in warm:
            results["s3"] = history_s3(spark, base, [s for s in sizes if s <= 2000])
        if "fleet" in warm:
            results["fleet"] = fleets(spark, base, scratch)
        spark.stop()
    return results


if __name__ == "__main__":
    main()
