"""Forks Spark's Python workers from a process that has the imports done.

Named in `spark.python.daemon.module`; a worker then starts in milliseconds instead of importing
Arrow, protobuf and this package once each.
"""

from pyspark.daemon import manager

import lakewarden.pipeline.classification
import lakewarden.pipeline.deletion
import lakewarden.pipeline.history
import lakewarden.pipeline.references  # noqa: F401

if __name__ == "__main__":
    manager()  # type: ignore[no-untyped-call]
