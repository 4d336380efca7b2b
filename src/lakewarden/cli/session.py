"""Starts Spark: local and sized to the machine, on a cluster, or through Spark Connect."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lakewarden.errors import ErrorKind, LakewardenError, UsageError
from lakewarden.world import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Java releases that Spark 4.1 runs Arrow functions on.
_JAVA_OLDEST, _JAVA_NEWEST = 17, 23
_GIB = 1024**3
#: A short life: compile fast, collect with one thread, and keep the JVM's own remarks to itself.
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -Xlog:disable"
#: A half-written class archive is younger than this.
_ARCHIVE_SETTLED_SECONDS = 60
#: Between two looks at what is running.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """Where Spark runs: `master` for a cluster, `remote` for Spark Connect, neither for here."""

    master: str | None = None
    remote: str | None = None
    conf: Mapping[str, str] | None = None
    #: Make the archive of Spark's classes that later starts profit from.
    archive: bool = False

    def __post_init__(self) -> None:
        if self.master and self.remote:
            raise UsageError(ErrorKind.USAGE, "--master and --remote exclude each other; give one")

    @property
    def words(self) -> str:
        return self.remote or self.master or f"local Spark, {cores()} cores"


def cores() -> int:
    """Return the processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tasks_for(spark: SparkSession, engine: Engine) -> int:
    """Return how many tasks a stage is cut into."""
    asked = (engine.conf or {}).get("lakewarden.tasks")
    if asked is not None:
        return int(asked)
    from lakewarden.pipeline.frames import slots

    return slots(spark)


def start(engine: Engine) -> SparkSession:
    """Start a session, or raise one clear line."""
    if engine.remote is None:
        _check_java(os.environ)
    _check_reachable(engine)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("lakewarden")
    if engine.remote is not None:
        builder = builder.remote(engine.remote)
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(engine.master or f"local[{cores()}]")
        for name, value in _settings(engine).items():
            builder = builder.config(name, value)
    for name, value in (engine.conf or {}).items():
        builder = builder.config(name, value)
    handle, name = tempfile.mkstemp(prefix="lakewarden-spark-", suffix=".log")
    os.close(handle)
    log = Path(name)
    try:
        with _errors_to(log):
            session = builder.getOrCreate()
        atexit.register(log.unlink, missing_ok=True)
        return session
    except (PySparkException, RuntimeError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LakewardenError(
            ErrorKind.SPARK,
            f"Spark did not start on {engine.words} ({first}); see {log}, check --master or --remote",
        ) from error


def watch(spark: SparkSession, tell: Callable[[int, int], None]) -> None:
    """Tell from now on, about once a second, how many tasks of the running stages are done."""
    register = getattr(spark, "registerProgressHandler", None)
    if register is not None and not hasattr(spark, "_jsparkSession"):

        def handler(stages: Any = (), **_: Any) -> None:
            tell(
                sum(one.num_completed_tasks for one in stages), sum(one.num_tasks for one in stages)
            )

        register(handler)
        return
    # Only to be shown; what is computed goes through the DataFrame API alone.
    tracker = spark.sparkContext.statusTracker()

    def look() -> None:
        while True:
            SystemClock().sleep(_LOOK_SECONDS)
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            running = [one for one in stages if one is not None]
            if running:
                done = sum(one.numCompletedTasks for one in running)
                tell(done, sum(one.numTasks for one in running))

    Thread(target=_until_it_ends, args=(look,), daemon=True).start()


def _until_it_ends(look: Callable[[], None]) -> None:
    # The session is gone, and with it what there was to look at.
    with suppress(Exception):
        look()


def failure_of_spark(error: Exception) -> LakewardenError | None:
    """Say in one line what Spark reported in a hundred; None if the error is not Spark's."""
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() or java.toString()) if java is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A Python worker reports its own error at the end of its traceback.
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    found = (raised or lines or [type(error).__name__])[-1 if raised else 0]
    return LakewardenError(
        ErrorKind.SPARK,
        f"Spark gave up ({found[:300]}); what was done until then stays done: check the cluster and "
        "the plan's directory, then run again",
    )


def _settings(engine: Engine) -> dict[str, str]:
    log4j = Path(__file__).with_name("log4j2.properties").as_uri()
    options = (
        f"{_JAVA_OPTIONS} {_class_archive(make=engine.archive)} -Dlog4j2.configurationFile={log4j}"
    )
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.driver.extraJavaOptions": options,
    }
    if engine.master is None:
        settings |= {
            "spark.driver.memory": f"{max(1, min(8, _memory() // _GIB // 4))}g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(cores()),
            # Few partitions and no surprises: replanning at every stage costs more than it saves.
            "spark.sql.adaptive.enabled": "false",
            # Forks workers from a process that has the imports done.
            "spark.python.daemon.module": "lakewarden.pipeline.daemon",
            # Half the time of a short task is its conversation with Python.
            "spark.python.unix.domain.socket.enabled": "true",
        }
    return settings


def _class_archive(*, make: bool) -> str:
    """Return the option that reads Spark's classes from an archive, or makes it at exit.

    Loading and verifying some ten thousand classes is most of Spark's start; the archive (some
    100 MB in the user's cache) saves seconds of every later start.  The JVM
    ignores an archive that does not fit.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lakewarden"
    spark = find_spec("pyspark")
    mark = f"{spark.origin if spark else ''} {_java_binary(os.environ)} {_java_release(os.environ)}"
    archive = cache / f"spark-{zlib.crc32(mark.encode()):08x}.jsa"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        now = SystemClock().now().timestamp()
        for made in cache.glob("*.made-*"):
            if now - made.stat().st_mtime > _ARCHIVE_SETTLED_SECONDS:
                if made.name.startswith(archive.name) and not archive.exists():
                    made.replace(archive)
                else:
                    made.unlink(missing_ok=True)
    except OSError:
        # No cache to write to: start slower.
        return ""
    if archive.exists():
        return f"-XX:SharedArchiveFile={archive}"
    return f"-XX:ArchiveClassesAtExit={archive}.made-{os.getpid()}" if make else ""


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 4 * _GIB


def _check_reachable(engine: Engine) -> None:
    """Tell within seconds that nobody listens; Spark tries for a minute, its client for ten."""
    url = engine.remote or engine.master or ""
    scheme, _, rest = url.partition("://")
    port = {"sc": 15002, "spark": 7077}.get(scheme)
    if port is None:
        return
    problem = ""
    for host in rest.partition("/")[0].split(","):
        try:
            place = urlsplit(f"//{host}")
            with socket.create_connection((place.hostname or "", place.port or port), timeout=5):
                return
        except (OSError, ValueError) as error:
            problem = str(error)
    option = "--remote" if engine.remote else "--master"
    raise LakewardenError(
        ErrorKind.SPARK, f"nobody answers at {url} ({problem}); check {option} and that Spark runs"
    )


def _check_java(environ: Mapping[str, str]) -> None:
    """Tell what is wrong with Java before Spark does it in forty lines."""
    advice = (
        "install a JRE from 17 to 23 (Debian: apt-get install openjdk-17-jre-headless) or set "
        "JAVA_HOME"
    )
    home, binary = environ.get("JAVA_HOME"), _java_binary(environ)
    if binary is None:
        where = f"in JAVA_HOME ({home})" if home else "on PATH"
        raise LakewardenError(ErrorKind.SPARK, f"no java {where}, which Spark needs; {advice}")
    found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', _java_release(environ))
    if found and not _JAVA_OLDEST <= int(found[1]) <= _JAVA_NEWEST:
        raise LakewardenError(
            ErrorKind.SPARK, f"Java {found[1]} ({binary}) does not run Spark 4.1; {advice}"
        )


def _java_binary(environ: Mapping[str, str]) -> str | None:
    home = environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home) / "bin") if home else None)


def _java_release(environ: Mapping[str, str]) -> str:
    """Return what the Java installation says about itself; empty if it says nothing."""
    release = Path(_java_binary(environ) or "").resolve().parent.parent / "release"
    return release.read_text() if release.is_file() else ""


@contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Give the Java process a file as standard error: its start-up talk is not the user's."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
