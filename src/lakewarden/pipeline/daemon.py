"""Forks Spark's Python workers from a process that has the imports done.

Named in `spark.python.daemon.module`.  A worker then starts in milliseconds instead of importing
Arrow, protobuf and this package, and each task is some 100 ms shorter: Spark puts its own zipped
Python and the jar of its core on the path, and has every task read the directories of all archives
anew.  The jar holds no Python; the installed pyspark is used where it is the same release.
"""

import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path


def without_archives(path: list[str]) -> list[str]:
    """Return the path without jars, and without zipped packages if the same pyspark is installed."""
    path = [entry for entry in path if not entry.endswith(".jar")]
    plain = [entry for entry in path if not entry.endswith(".zip")]
    installed = PathFinder.find_spec("pyspark", plain)
    if installed is None or installed.origin is None or PathFinder.find_spec("py4j", plain) is None:
        return path
    version = Path(installed.origin).with_name("version.py").read_bytes()
    for entry in path:
        if entry.endswith("pyspark.zip") and Path(entry).is_file():
            with zipfile.ZipFile(entry) as archive:
                if archive.read("pyspark/version.py") != version:
                    return path
    return plain


if __name__ == "__main__":
    sys.path[:] = without_archives(sys.path)
    sys.path_importer_cache.clear()

    from pyspark.daemon import manager

    manager()  # type: ignore[no-untyped-call]
