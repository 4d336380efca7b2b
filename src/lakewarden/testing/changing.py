"""A real process that changes a Lance table all the time, and tells of every change it made.

Rows are pairs of an id and a value; both columns are indexed.  The log names changes, not rows: a
test replays them by itself, and so knows what every version of the table must hold.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakewarden.testing.processes import START_SECONDS, running

#: What Lance and the warehouse say to who was outrun; anything else ends the process.
_OUTRUN = ("conflict", "preempted", "concurrent", "retries", "somebody else")


@dataclass(frozen=True, slots=True)
class Changed:
    """A change that was acknowledged: the version that it made, and what it did."""

    version: int
    did: str
    #: Ids from the first to before the second.
    first: int
    last: int
    value: int
    #: Times that it was refused before.
    refused: int

    def apply(self, rows: dict[int, int]) -> None:
        """Do the same to rows that are held in memory."""
        if self.did in ("append", "upsert"):
            for one in range(self.first, self.last):
                rows[one] = self.value
            return
        for one in [one for one in rows if self.first <= one < self.last]:
            if self.did == "delete":
                del rows[one]
            else:
                rows[one] = self.value


@dataclass(frozen=True, slots=True)
class Changer:
    """The process, and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def changes(self) -> list[Changed]:
        """Return what was acknowledged so far."""
        lines = self.log.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.startswith("{") and line.endswith("}\n")]
        return [Changed(**json.loads(line)) for line in whole]

    def wait_for(self, number: int) -> None:
        """Wait until so many more changes were made."""
        enough, give_up = len(self.changes()) + number, time.monotonic() + START_SECONDS
        while len(self.changes()) < enough:
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"the writer stopped:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)  # another process is at work: there is nothing to wait on but time

    def stop(self) -> list[Changed]:
        """Let it finish the change under way; returns everything acknowledged."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        if code != 0:
            raise AssertionError(f"the writer failed:\n{self.log.read_text()[-2000:]}")
        return self.changes()


@contextmanager
def changer(
    place: Path,
    *,
    log: Path,
    seed: int,
    pause: float = 0,
    warehouse: bool = False,
    stable: bool = False,
) -> Iterator[Changer]:
    """Create a table, at a path or as db.t of the warehouse there, and change it all the time."""
    flags = [*(["--warehouse"] if warehouse else []), *(["--stable"] if stable else [])]
    command = [sys.executable, "-m", __name__, str(place), str(seed), str(pause), *flags]
    with running(command, log=log) as process:
        made = Changer(process, log)
        made.wait_for(4)
        yield made


# -- in the process --------------------------------------------------------------------------------


class _Table:
    """The table, as the process reaches it."""

    def __init__(self, place: str, *, warehouse: bool, stable: bool) -> None:
        # Only this process needs them.
        import lance  # noqa: PLC0415

        self._lance = lance
        self._where: dict[str, Any] = {"uri": place}
        self._made_with = {"enable_stable_row_ids": True} if stable else {}
        if warehouse:
            from lakewarden.warehouse.lance import Namespace  # noqa: PLC0415
            from lakewarden.warehouse.warehouse import Warehouse  # noqa: PLC0415

            space = Namespace(Warehouse.open(place, actor="writer"))
            self._where = {"namespace_client": space, "table_id": ["db", "t"]}

    def write(self, rows: Any, mode: str) -> Any:
        made = self._made_with if mode == "create" else {}
        return self._lance.write_dataset(rows, **self._where, mode=mode, **made)

    def open(self) -> Any:
        return self._lance.dataset(**self._where)


def change(table: _Table, seed: int, pause: float) -> None:
    """Be the process: one JSON line for each acknowledged change, until SIGTERM."""
    import pyarrow as pa  # noqa: PLC0415

    def batch(first: int, last: int, value: int) -> Any:
        ids = pa.array(range(first, last), pa.int64())
        return pa.table({"id": ids, "value": pa.array([value] * (last - first), pa.int64())})

    def once(did: str, first: int, last: int, value: int) -> int:
        if did in ("create", "append"):
            return int(table.write(batch(first, last, value), did).version)
        found = table.open()
        if did == "upsert":
            merge = found.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merge.execute(batch(first, last, value))
        elif did == "update":
            found.update({"value": str(value)}, where=f"id >= {first} AND id < {last}")
        else:
            found.delete(f"id >= {first} AND id < {last}")
        return int(found.version)

    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    source = random.Random(seed)
    following = value = 0
    while not stopping:
        value += 1
        did = source.choice(("append", "append", "append", "append", "upsert", "update", "delete"))
        first, last = following, following + source.randrange(1, 20)
        if not following:
            did = "create"
        elif did == "upsert":
            first = max(0, following - source.randrange(40))
        elif did in ("update", "delete"):
            # Mostly a few rows, sometimes rows of every fragment.
            first = source.randrange(following)
            last = first + source.choice((2, 10, 40, following if did == "update" else 20))
        version, refused = _until_done(lambda: once(did, first, last, value))  # noqa: B023
        following = max(following, last if did in ("create", "append", "upsert") else 0)
        if did == "create":
            did = "append"
            version = _index(table)
        _tell(Changed(version, did, first, last, value, refused))
        time.sleep(pause)  # as it was asked for


def _until_done(change: Any) -> tuple[int, int]:
    """Repeat what others were in the way of; return the version and how often it was refused."""
    refused = 0
    while True:
        try:
            return change(), refused
        except (OSError, RuntimeError) as error:
            if not any(word in str(error).lower() for word in _OUTRUN):
                raise
            refused += 1


def _index(table: _Table) -> int:
    table.open().create_scalar_index("id", "BTREE")
    table.open().create_scalar_index("value", "BTREE")
    return int(table.open().version)


def _tell(made: Changed) -> None:
    told = {name: getattr(made, name) for name in Changed.__dataclass_fields__}
    print(json.dumps(told), flush=True)  # noqa: T201


def main(arguments: Sequence[str]) -> None:
    """Read the command line."""
    place, seed, pause, *flags = arguments
    table = _Table(place, warehouse="--warehouse" in flags, stable="--stable" in flags)
    change(table, int(seed), float(pause))


if __name__ == "__main__":
    main(sys.argv[1:])
