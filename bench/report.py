"""Turn bench/results.json into docs/benchmarks.md and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PICTURE = HERE.parent / "docs" / "benchmarks-growth.svg"


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


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    picture(results)
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
    }.items():
        text = text.replace(f"<{name}>", content)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
