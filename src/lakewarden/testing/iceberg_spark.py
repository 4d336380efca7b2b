"""Iceberg's own Spark runtime, in a process of its own, on the catalog that PyIceberg uses.

`run` starts a Java process with Iceberg's runtime, which Spark fetches by its coordinates, executes
SQL in it, and returns the rows.  The catalog `lake` is Iceberg's JDBC catalog on the SQLite file
that `testing.iceberg.catalog` opens, so both see the same tables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: What Spark fetches; the runtime goes with the version of Spark.
PACKAGES = (
    "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
    "org.xerial:sqlite-jdbc:3.50.3.0",
)
CATALOG = "lake"
SECONDS = 300.0
#: SQL, or a setting of the session to make (`None` takes it back): `{"spark.wap.id": "audit"}`.
Step = str | Mapping[str, str | None]
Rows = list[dict[str, Any]]


class UnavailableError(RuntimeError):
    """Iceberg's runtime could not be fetched."""


def run(root: Path | str, steps: Sequence[Step], *, seconds: float = SECONDS) -> list[Rows]:
    """Execute steps one after the other; returns the rows of each, none for a setting."""
    with tempfile.TemporaryDirectory() as scratch:
        script, answer = Path(scratch, "steps.json"), Path(scratch, "answer.json")
        script.write_text(
            json.dumps([step if isinstance(step, str) else {**step} for step in steps])
        )
        command = [sys.executable, "-m", __name__, str(Path(root).absolute())]
        done = subprocess.run(
            [*command, str(script), str(answer)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
        )
        if "unresolved dependency" in done.stderr:
            raise UnavailableError(f"Spark could not fetch {', '.join(PACKAGES)}")
        if done.returncode:
            raise RuntimeError(f"the steps failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        rows: list[Rows] = json.loads(answer.read_text())
    return rows


def settings(root: str) -> dict[str, str]:
    """Return the settings of a session whose catalog is the one below `root`."""
    lake = f"spark.sql.catalog.{CATALOG}"
    return {
        "spark.jars.packages": ",".join(PACKAGES),
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        lake: "org.apache.iceberg.spark.SparkCatalog",
        f"{lake}.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        f"{lake}.uri": f"jdbc:sqlite:{root}/catalog.db",
        # The columns that PyIceberg's catalog has too.
        f"{lake}.jdbc.schema-version": "V1",
        f"{lake}.warehouse": f"file://{root}/warehouse",
        # PyIceberg may have committed since the last look.
        f"{lake}.cache-enabled": "false",
        "spark.sql.defaultCatalog": CATALOG,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": f"{root}/spark-warehouse",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


def execute(root: str, script: str, answer: str) -> None:
    """Be the process with the runtime."""
    # Only this process needs Spark.
    from pyspark.sql import SparkSession  # noqa: PLC0415

    builder = SparkSession.builder.master("local[2]").appName("iceberg test kit")
    for name, value in settings(root).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    results: list[Rows] = []
    for step in json.loads(Path(script).read_text()):
        results.append([])
        if isinstance(step, str):
            results[-1] = [row.asDict(recursive=True) for row in session.sql(step).collect()]
            continue
        for name, value in step.items():
            if value is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, value)
    Path(answer).write_text(json.dumps(results, default=str))
    session.stop()


if __name__ == "__main__":
    execute(*sys.argv[1:4])
