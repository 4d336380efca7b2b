"""Workers that start fast."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from zipimport import zipimporter

import pyarrow as pa
import pytest

from lakewarden.pipeline.daemon import without_archives

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_jars_go_and_a_pyspark_of_another_release_stays(tmp_path: Path) -> None:
    assert without_archives(["/spark-core.jar", *sys.path]) == [
        entry for entry in sys.path if not entry.endswith((".jar", ".zip"))
    ]
    # Nothing is installed in an empty directory: what is zipped is all there is.
    assert without_archives([str(tmp_path), "/p/pyspark.zip", "/p/spark-core.jar"]) == [
        str(tmp_path),
        "/p/pyspark.zip",
    ]


@pytest.mark.spark
def test_no_task_reads_directories_of_archives(spark: SparkSession) -> None:
    def archives(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        importers = [str(one) for one in sys.path_importer_cache.values() if _is_zip(one)]
        yield pa.RecordBatch.from_pydict({"name": importers}, pa.schema([("name", pa.string())]))

    def _is_zip(one: object) -> bool:
        return isinstance(one, zipimporter)

    assert spark.range(1).mapInArrow(archives, "name string").collect() == []
