"""Real processes for acceptance tests: a writer without pause, cleanups to race and to kill, Spark.

Every process gets a process group of its own, and a group is ended whole: a Spark driver brings a
Java process and Python workers with it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

START_SECONDS = 60.0


def end(process: subprocess.Popen[Any], how: signal.Signals = signal.SIGTERM) -> None:
    """End a process and all it started; returns when the process is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@contextmanager
def running(
    command: Sequence[str], *, log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background until the block ends; its output goes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process)


# -- the command line ------------------------------------------------------------------------------


def lakewarden_command(*arguments: object) -> list[str]:
    """Return the command line that runs lakewarden with this Python."""
    return [sys.executable, "-m", "lakewarden.cli.main", *(str(one) for one in arguments)]


@dataclass(slots=True)
class Started:
    """A lakewarden process under way; `stage` waits until it says that a stage has begun."""

    process: subprocess.Popen[str]

    def stage(self, name: str) -> bool:
        """Wait for a stage to begin; False if the process ended before."""
        said = _readable(self.process.stderr)
        return any(line.startswith(f"stage    {name}") for line in iter(said.readline, ""))

    def result(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, stdout, and what of stderr was not read yet."""
        stdout, stderr = self.process.communicate(timeout=120)
        return self.process.returncode, stdout, stderr

    def kill(self) -> None:
        """Stop it as a power cut would."""
        end(self.process, signal.SIGKILL)
        self._close()

    def kill_driver_only(self) -> None:
        """Kill the Python driver and let what it started find out by itself."""
        self.process.kill()
        self.process.wait(10)
        _wait_until(lambda: not _group_lives(self.process.pid), "its Java process to end")
        self._close()

    def _close(self) -> None:
        _readable(self.process.stdout).close()
        _readable(self.process.stderr).close()


@contextmanager
def started(*arguments: object, environ: Mapping[str, str] | None = None) -> Iterator[Started]:
    """Start `lakewarden ARGUMENTS` in a process of its own."""
    process = subprocess.Popen(
        lakewarden_command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
    )
    with process:
        try:
            yield Started(process)
        finally:
            end(process)


# -- a writer --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A write that Lance said was done: the version, and what the table then held."""

    version: int
    rows: int
    total: int


@dataclass(frozen=True, slots=True)
class Writer:
    """A process that appends, deletes and overwrites without pause until it is told to stop."""

    process: subprocess.Popen[bytes]
    log: Path

    def writes(self) -> list[Acknowledged]:
        """Return what was acknowledged so far."""
        lines = self.log.read_text().splitlines()
        return [Acknowledged(**json.loads(line)) for line in lines if line.startswith("{")]

    def stop(self) -> list[Acknowledged]:
        """Let it finish the write under way; returns everything acknowledged."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        if code != 0:
            raise AssertionError(f"the writer failed:\n{self.log.read_text()[-2000:]}")
        return self.writes()


@contextmanager
def writer(table: Path, *, log: Path, seed: int) -> Iterator[Writer]:
    """Create a table and write to it from another process."""
    command = [sys.executable, "-m", __name__, "write", str(table), str(seed)]
    with running(command, log=log) as process:
        made = Writer(process, log)
        _wait_until(lambda: len(made.writes()) > 2, "the writer's first writes")
        yield made


def write_without_pause(table: str, seed: int) -> None:
    """Be the writer: one JSON line for each acknowledged write, until SIGTERM."""
    # Only this process needs pylance.
    import lance  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    source = random.Random(seed)
    ids: set[int] = set()
    following = 0
    while not stopping:
        action = source.choice(("append", "append", "append", "delete", "overwrite"))
        if action == "delete" and following:
            remainder = source.randrange(5)
            dataset = lance.dataset(table)
            dataset.delete(f"id % 5 = {remainder}")
            ids = {one for one in ids if one % 5 != remainder}
        else:
            new = range(following, following + source.randrange(1, 20))
            following = new.stop
            mode = "create" if not new.start else "append" if action == "append" else "overwrite"
            dataset = lance.write_dataset(pa.table({"id": pa.array(new)}), table, mode=mode)
            ids = ids | set(new) if mode == "append" else set(new)
        print(  # noqa: T201
            json.dumps({"version": dataset.version, "rows": len(ids), "total": sum(ids)}),
            flush=True,
        )


# -- Spark -----------------------------------------------------------------------------------------


def spark_class() -> str:
    """Return pyspark's own launcher of Java classes."""
    return str(_spark_home() / "bin" / "spark-class")


@contextmanager
def spark_cluster(directory: Path, *, workers: int = 2) -> Iterator[str]:
    """Run a standalone cluster on loopback, one core a worker; yields the master's URL."""
    host, port = "127.0.0.1", free_port()
    url = f"spark://{host}:{port}"
    master = [
        spark_class(), "org.apache.spark.deploy.master.Master",
        "--host", host, "--port", str(port), "--webui-port", "0",
    ]  # fmt: skip
    with running(master, log=directory / "master.log", environ=_environ()):
        _wait_until(lambda: _answers(port), "the Spark master")
        with _workers(directory, url, workers):
            yield url


@contextmanager
def _workers(directory: Path, url: str, number: int) -> Iterator[None]:
    if not number:
        yield
        return
    log, work = directory / f"worker-{number}.log", directory / f"work-{number}"
    command = [
        spark_class(), "org.apache.spark.deploy.worker.Worker",
        "--host", "127.0.0.1", "--webui-port", "0", "-c", "1", "-m", "1g", "-d", str(work), url,
    ]  # fmt: skip
    with running(command, log=log, environ=_environ()), _workers(directory, url, number - 1):
        _wait_until(lambda: "registered with master" in log.read_text(), "a Spark worker")
        yield


@contextmanager
def connect_server(directory: Path) -> Iterator[str]:
    """Run a Spark Connect server on loopback; yields its URL."""
    port = free_port()
    command = [
        str(_spark_home() / "bin" / "spark-submit"),
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2]", "--driver-memory", "1g",
        "--conf", "spark.connect.grpc.binding.address=127.0.0.1",
        "--conf", f"spark.connect.grpc.binding.port={port}",
        "--conf", "spark.driver.host=127.0.0.1",
        "--conf", "spark.driver.bindAddress=127.0.0.1",
        "--conf", "spark.ui.enabled=false",
        "--conf", "spark.sql.shuffle.partitions=4",
        "--conf", f"spark.sql.warehouse.dir={directory / 'warehouse'}",
        "spark-internal",
    ]  # fmt: skip
    with running(command, log=directory / "connect.log", environ=_environ()):
        _wait_until(lambda: _answers(port), "the Spark Connect server")
        yield f"sc://127.0.0.1:{port}"


def free_port() -> int:
    """Return a port that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environ() -> dict[str, str]:
    return {
        "SPARK_HOME": str(_spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_NO_DAEMONIZE": "1",
    }


def _spark_home() -> Path:
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise RuntimeError("pyspark is not installed")
    return Path(found.origin).parent


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(happened: Any, what: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while not happened():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {START_SECONDS:g} s for {what}")
        time.sleep(0.05)  # another process is at work: there is nothing to wait on but time


def _readable(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def copy_tree(source: Path, target: Path) -> Path:
    """Copy a table with its times."""
    shutil.copytree(source, target, copy_function=shutil.copy2)
    return target


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_without_pause(sys.argv[2], int(sys.argv[3]))
