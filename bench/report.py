"""Turn bench/results.json into docs/benchmarks.md and its pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PICTURE = HERE.parent / "docs" / "benchmarks-growth.svg"
ICEBERG_PICTURE = HERE.parent / "docs" / "benchmarks-iceberg.svg"


def ratio(line: dict[str, Any]) -> str:
    return f"{line['native']['seconds'] / line['ours']['seconds']:.1f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def histories(lines: list[dict[str, Any]]) -> str:
    return table(
        ["versions", "Lakewarden s (plan + execute)", "Lance s", "Lance / Lakewarden"],
        [
            [
                f"{line['size']:,}",
                (
                    f"{line['ours']['seconds']:.2f} ({line['ours']['plan_seconds']:.2f} + "
                    f"{line['ours']['execute_seconds']:.2f})"
                ),
                f"{line['native']['seconds']:.2f}",
                ratio(line),
            ]
            for line in lines
        ],
    )


def requests(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))


def s3(lines: list[dict[str, Any]]) -> str:
    return table(
        [
            "versions",
            "Lakewarden s",
            "Lance s",
            "ratio",
            "Lakewarden requests",
            "floor",
            "Lance requests",
        ],
        [
            [
                f"{line['size']:,}",
                f"{line['ours']['seconds']:.2f}",
                f"{line['native']['seconds']:.2f}",
                ratio(line),
                requests(line["ours"]["on_the_wire"]),
                f"{line['floor']} (x {sum(line['ours']['on_the_wire'].values()) / line['floor']:.2f})",
                requests(line["native"]["on_the_wire"]),
            ]
            for line in lines
        ],
    )


def fleets(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        theirs = line.get("native")
        wire = line["ours"].get("on_the_wire")
        rows.append([
            f"{line['tables']:,}", line["store"], f"{line['ours']['seconds']:.2f}",
            f"{theirs['seconds']:.1f}" if theirs else "not run",
            f"{theirs['seconds'] / line['ours']['seconds']:.1f}" if theirs else "-",
            requests(wire or line["ours"]["requests"]),
            f"{line['floor']} (x {sum(wire.values()) / line['floor']:.2f})" if wire else "-",
            requests(theirs["on_the_wire"]) if theirs and "on_the_wire" in theirs else "-",
        ])  # fmt: skip
    return table(
        [
            "tables",
            "store",
            "Lakewarden s",
            "Lance one by one s",
            "ratio",
            "Lakewarden requests",
            "floor",
            "Lance requests",
        ],
        rows,
    )


def memory(lines: list[dict[str, Any]]) -> str:
    return table(
        [
            "objects",
            "preview s (first run of a process)",
            "driver Python MiB",
            "Java MiB",
            "Python worker MiB",
            "requests",
        ],
        [
            [
                f"{line['objects']:,}",
                f"{line['seconds']:.1f}",
                str(line["driver_mib"]),
                str(line["java_mib"]),
                str(line["worker_mib"]),
                requests(line["requests"]),
            ]
            for line in lines
        ],
    )


def stages(line: dict[str, Any]) -> str:
    return table(
        ["stage", "s"],
        [[name, f"{seconds:.2f}"] for name, seconds in line["ours"]["stages"].items()],
    )


def measured(line: dict[str, Any]) -> list[str]:
    """Return the columns in which both sides are compared."""
    mine, theirs = line["ours"], line["peer"]
    return [
        f"{mine['seconds']:.2f}",
        f"{theirs['seconds']:.2f}",
        f"{theirs['seconds'] / mine['seconds']:.1f}",
    ]


def compared(
    lines: list[dict[str, Any]],
    columns: dict[str, str],
    more: Callable[[Any], list[str]],
    *head: str,
) -> str:
    """Return a table with the given columns of the lines, and both times."""
    return table(
        [*columns, "Lakewarden s", "Iceberg s", "Iceberg / Lakewarden", *head],
        [
            [
                *(
                    one if isinstance(one := line[key], str) else f"{one:,}"
                    for key in columns.values()
                ),
                *measured(line),
                *more(line),
            ]
            for line in lines
        ],
    )


def stage_list(line: dict[str, Any]) -> list[str]:
    long = {name: s for name, s in line["ours"]["stages"].items() if s >= 0.1}
    return [", ".join(f"{name} {seconds:.1f}" for name, seconds in long.items())]


def tuned(line: dict[str, Any]) -> list[str]:
    seconds = line["peer_tuned"]["seconds"]
    return [f"{seconds:.2f}", f"{seconds / line['ours']['seconds']:.1f}", *stage_list(line)]


def iceberg_s3(line: dict[str, Any]) -> list[str]:
    wire = line["ours"]["on_the_wire"]
    return [
        requests(wire),
        f"{line['floor']} (x {sum(wire.values()) / line['floor']:.2f})",
        requests(line["peer"]["on_the_wire"]),
    ]


def mib(line: dict[str, Any]) -> list[str]:
    mine, theirs = line["ours"]["mib"], line["peer"]["mib"]
    return [f"{mine['java']} + {mine['driver']} + {mine['workers']}", str(theirs["java"])]


def iceberg_fleet(line: dict[str, Any]) -> list[str]:
    theirs = line["peer"]
    scaled = theirs["called"] < line["tables"]
    note = f"scaled from {theirs['called']} tables, {theirs['measured_seconds']:.1f} s"
    return [note if scaled else "all called", requests(line["ours"]["requests"])]


def iceberg(found: dict[str, Any]) -> dict[str, str]:
    """Return the tables on Iceberg; a part that was not measured says so."""
    shape = {"snapshots": "snapshots", "entries each": "entries"}
    expire = found.get("expire", {})
    parts = {
        "ICEBERG-ORPHANS": (found.get("orphans"), shape, stage_list, ["stages, s"]),
        "ICEBERG-LISTING": (
            found.get("listing"), {**shape, "files": "files"}, stage_list, ["stages, s"]
        ),
        "ICEBERG-PARTITIONS": (
            found.get("partitions"), {"directories": "directories", "files": "files"}, tuned,
            ["Iceberg tuned s", "ratio", "stages, s"],
        ),
        "ICEBERG-ONE": (expire.get("one"), shape, stage_list, ["stages, s"]),
        "ICEBERG-MANY": (
            expire.get("many"), {"snapshots": "snapshots", "kept": "keep", "files that go": "files"},
            stage_list, ["stages, s"],
        ),
        "ICEBERG-DEEP": (
            found.get("deep"), {"snapshots": "snapshots", "kept": "keep", "files that go": "files"},
            mib, ["Lakewarden MiB (Java + driver + worker)", "Iceberg MiB (Java)"],
        ),
        "ICEBERG-FLEET": (
            found.get("fleet"), {"tables": "tables", "operation": "operation"}, iceberg_fleet,
            ["Iceberg's time", "Lakewarden requests"],
        ),
        "ICEBERG-S3": (
            found.get("s3"), {"operation": "operation", "snapshots": "snapshots"}, iceberg_s3,
            ["Lakewarden requests", "floor", "Iceberg requests"],
        ),
    }  # fmt: skip
    shown = f"![Growth of time with size]({ICEBERG_PICTURE.name})\n\n" if "orphans" in found else ""
    return {"ICEBERG-PICTURE": shown} | {
        name: compared(lines, columns, more, *head) if lines else "Not measured yet."
        for name, (lines, columns, more, head) in parts.items()
    }


def warehouse(found: dict[str, Any]) -> dict[str, str]:
    """Return the tables on warehouses."""
    lines = found.get("commits", [])
    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    by_case = {(line["shared"], line["writers"], line["kind"]): line for line in lines}
    cases = list(dict.fromkeys((line["shared"], line["writers"]) for line in lines))
    commits = table(
        ["tables", "writers", *kinds],
        [
            [
                "one, shared" if shared else "one each",
                str(writers),
                *(_commits(by_case[shared, writers, kind]) for kind in kinds),
            ]
            for shared, writers in cases
        ],
    )
    opened = table(
        ["", "open ms", "requests", "commit ms", "requests"],
        [
            [
                f"{line['size']:,} {line['what']}",
                f"{1000 * line['open_seconds']:.1f}",
                str(line["open_requests"]),
                f"{1000 * line['commit_seconds']:.1f}",
                str(line["commit_requests"]),
            ]
            for line in found.get("opening", [])
        ],
    )
    return {
        "WAREHOUSE-COMMITS": commits if lines else "Not measured yet.",
        "WAREHOUSE-OPENING": opened if found.get("opening") else "Not measured yet.",
    }


def jobs(found: dict[str, Any]) -> dict[str, str]:
    """Return the table on task queues."""
    lines = found.get("pickup", [])
    shown = table(
        [
            "database",
            "pickers",
            "batch",
            "picked/s",
            "median ms",
            "longest ms",
            "picked and ended/s",
        ],
        [
            [
                line["database"],
                str(line["pickers"]),
                str(line["batch"]),
                f"{line['picked_per_second']:,.0f}",
                f"{1000 * line['median']:.1f}",
                f"{1000 * line['worst']:.1f}",
                f"{line['done_per_second']:,.0f}",
            ]
            for line in lines
        ],
    )
    tick = found.get("tick")
    ticked = "Not measured yet."
    if tick is not None:
        times = tick["singles_seconds"] / tick["seconds"]
        ticked = (
            f"{tick['tables']:,} tables in one run: {tick['seconds']:.1f} s. A run for one table: "
            f"{tick['single_seconds']:.2f} s, so that as many runs would take "
            f"{tick['singles_seconds']:,.0f} s, {times:.0f} times as long."
        )
    return {"JOBS-PICKUP": shown if lines else "Not measured yet.", "JOBS-TICK": ticked}


def service(found: dict[str, Any]) -> dict[str, str]:
    """Return the table on the HTTP API."""
    lines = found.get("api", [])
    shown = table(
        ["database", "request", "clients", "requests/s", "median ms", "99 % below ms"],
        [
            [
                line["database"],
                line["request"],
                str(line["clients"]),
                f"{line['per_second']:,.0f}",
                f"{line['median_ms']:.1f}",
                f"{line['p99_ms']:.1f}",
            ]
            for line in lines
        ],
    )
    return {"SERVICE-API": shown if lines else "Not measured yet."}


def _commits(line: dict[str, Any]) -> str:
    return f"{line['per_second']:.1f} ({1000 * line['median']:.0f}, {1000 * line['worst']:.0f})"


def optimize(found: dict[str, Any]) -> dict[str, str]:
    """Return the tables on optimize."""
    lines = []
    for part, peer, what in (
        ("plain", "pylance", "one Lance table"),
        ("lance", "pylance", "one Lance table with an index"),
        ("fleet", "pylance", "fifty Lance tables with an index"),
        ("iceberg", "iceberg", "one Iceberg table"),
    ):
        line = found.get(part)
        if line is None:
            continue
        mine, other = line["lakewarden"], line[peer]
        lines.append(
            [
                f"{what}, {line['mib']:,} MiB",
                f"{mine['seconds']:.1f}",
                "`compact_files`, `optimize_indices`"
                if peer == "pylance"
                else "`rewrite_data_files`",
                f"{other['seconds']:.1f}",
                f"{other['seconds'] / mine['seconds']:.2f}",
                f"{line['memory_mib']:,}",
            ]
        )
    head = ["", "Lakewarden s", "peer", "peer s", "peer / Lakewarden", "worker MiB"]
    spread = []
    for part, what in (("workers", "without an index"), ("workers_indexed", "with one")):
        counts = found.get(part, {})
        alone = counts.get("1", {})
        for number, line in counts.items():
            here = line["stages"]["rewrite"]
            spread.append(
                [
                    what,
                    number,
                    f"{line['seconds']:.1f}",
                    f"{alone['seconds'] / line['seconds']:.2f}",
                    f"{here:.1f}",
                    f"{alone['stages']['rewrite'] / here:.2f}",
                    f"{line['bare']:.1f}",
                    f"{alone['bare'] / line['bare']:.2f}",
                ]
            )
    times = "than one"
    spread_head = ["table", "workers", "s", times, "rewriting s", times, "Lance alone s", times]
    return {
        "OPTIMIZE": table(head, lines) if lines else "Not measured yet.",
        "OPTIMIZE-WORKERS": table(spread_head, spread) if spread else "Not measured yet.",
    }


def picture(results: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, kind in zip(axes, ("append", "overwrite"), strict=True):
        lines = results[kind]
        sizes = [line["size"] for line in lines]
        axis.plot(sizes, [line["native"]["seconds"] for line in lines], "o-", label="Lance")
        axis.plot(sizes, [line["ours"]["seconds"] for line in lines], "s-", label="Lakewarden")
        if kind == "append" and "young" in results:
            young = results["young"]
            axis.plot(
                [line["size"] for line in young], [line["ours"]["seconds"] for line in young],
                "s--", color="C1", alpha=0.5, label="Lakewarden, all versions young",
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="versions", title=f"{kind} history, keep 10")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.legend()
    axes[0].set_ylabel("seconds (warm, local disk)")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def iceberg_picture(found: dict[str, Any]) -> None:
    expire = found.get("expire", {})
    parts = {
        "find orphans in an inventory": (found["orphans"], lambda line: line["snapshots"] ** 2),
        "expire one snapshot": (expire.get("one", []), lambda line: line["snapshots"] ** 2),
        "expire all but 10 overwrites": (expire.get("many", []), lambda line: line["snapshots"]),
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    for axis, (title, (lines, size)) in zip(axes, parts.items(), strict=True):
        sizes = [size(line) for line in lines]
        for side, label, mark in (("peer", "Iceberg", "o-"), ("ours", "Lakewarden", "s-")):
            axis.plot(sizes, [line[side]["seconds"] for line in lines], mark, label=label)
        unit = "snapshots" if "overwrites" in title else "entries in all manifests"
        axis.set(xscale="log", yscale="log", xlabel=unit, title=title)
        axis.legend()
    axes[0].set_ylabel("seconds (warm, local disk)")
    figure.tight_layout()
    figure.savefig(ICEBERG_PICTURE, metadata={"Date": None})


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    picture(results)
    if "orphans" in results.get("iceberg", {}):
        iceberg_picture(results["iceberg"])
    largest = results["append"][-1]
    text = (HERE / "page.md").read_text()
    for name, content in {
        "APPEND": histories(results["append"]),
        "OVERWRITE": histories(results["overwrite"]),
        "YOUNG": histories(results["young"]),
        "S3": s3(results["s3"]),
        "FLEET": fleets(results["fleet"]),
        "MEMORY": memory(results["memory"]),
        "STAGES": stages(largest),
        "LARGEST": f"{largest['size']:,}",
        "COLD": table(
            ["command", "s"],
            [[f"`{name}`", f"{seconds:.2f}"] for name, seconds in results["cold"].items()],
        ),
        **iceberg(results.get("iceberg", {})),
        **warehouse(results.get("warehouse", {})),
        **optimize(results.get("optimize", {})),
        **jobs(results.get("jobs", {})),
        **service(results.get("service", {})),
    }.items():
        text = text.replace(f"<{name}>", content)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
