"""Iceberg's own REST catalog server for tests, in a Java process, on the catalog PyIceberg uses.

The server is the one that Iceberg's project tests its clients with.  Its parts are fetched by their
coordinates with Ivy, which comes with pyspark.  It serves the SQLite file that
`testing.iceberg.catalog` opens, under the same name, so the same tables can be seen without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from pyiceberg.catalog import Catalog, load_catalog

from lakewarden.testing.processes import end, free_port

VERSION = "1.11.0"
START_SECONDS = 60.0
FETCH_SECONDS = 300.0
#: What the server consists of; Hadoop, which its catalog needs, comes with pyspark.
_PARTS = f"""\
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="lakewarden" module="rest-catalog"/>
  <dependencies defaultconfmapping="default->default">
    <dependency org="org.apache.iceberg" name="iceberg-open-api" rev="{VERSION}" transitive="false">
      <artifact name="iceberg-open-api" type="jar" ext="jar" m:classifier="test-fixtures"/>
    </dependency>
    <dependency org="org.apache.iceberg" name="iceberg-core" rev="{VERSION}">
      <artifact name="iceberg-core" type="jar" ext="jar"/>
      <artifact name="iceberg-core" type="jar" ext="jar" m:classifier="tests"/>
    </dependency>
    <dependency org="org.eclipse.jetty.ee10" name="jetty-ee10-servlet" rev="12.1.5"/>
    <dependency org="org.eclipse.jetty.compression" name="jetty-compression-server" rev="12.1.5"/>
    <dependency org="org.eclipse.jetty.compression" name="jetty-compression-gzip" rev="12.1.5"/>
    <dependency org="org.xerial" name="sqlite-jdbc" rev="3.50.3.0"/>
  </dependencies>
</ivy-module>
"""


class UnavailableError(RuntimeError):
    """The server's parts could not be fetched."""


def classpath(scratch: Path) -> str:
    """Fetch the server's parts, unless they are there already, and return where they are."""
    jars = _jars()
    (scratch / "ivy.xml").write_text(_PARTS)
    found = scratch / "classpath.txt"
    command = [
        _java(), "-jar", str(next(jars.glob("ivy-*.jar"))), "-ivy", str(scratch / "ivy.xml"),
        "-confs", "default", "-types", "jar", "bundle", "-cachepath", str(found),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
    )
    if done.returncode or not found.exists():
        raise UnavailableError(f"Ivy could not fetch the REST server:\n{done.stdout[-1000:]}")
    hadoop = [str(jar) for jar in sorted(jars.glob("hadoop-client-*.jar"))]
    return os.pathsep.join([found.read_text().strip(), *hadoop])


@contextmanager
def rest_catalog(root: Path | str, name: str = "lake") -> Iterator[Catalog]:
    """Run a server for the catalog below `root` until the block ends; yields PyIceberg's client.

    Its properties, for `testing.iceberg.configure`, are in `properties` of what is yielded.
    """
    directory = Path(root).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environ = {
        **os.environ,
        "CATALOG_REST_PORT": str(port),
        "CATALOG_CATALOG_NAME": name,
        "CATALOG_URI": f"jdbc:sqlite:{directory / 'catalog.db'}",
        "CATALOG_WAREHOUSE": f"file://{directory / 'warehouse'}",
    }
    command = [
        _java(), "-Xmx512m", "-cp", classpath(directory), "org.apache.iceberg.rest.RESTCatalogServer"
    ]  # fmt: skip
    log = directory / "rest.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        try:
            client = _connected(process, name, f"http://127.0.0.1:{port}/", log)
            yield client
            client.close()
        finally:
            end(process)


def _connected(process: subprocess.Popen[bytes], name: str, uri: str, log: Path) -> Catalog:
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            return load_catalog(name, type="rest", uri=uri)
        except OSError as reason:  # what requests raises while nobody listens
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the REST server did not start:\n{log.read_text()}") from reason
        time.sleep(0.1)  # until the server listens


def _java() -> str:
    found = shutil.which("java")
    if found is None:
        raise UnavailableError("there is no java")
    return found


def _jars() -> Path:
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "jars"
