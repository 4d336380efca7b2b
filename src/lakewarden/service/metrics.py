"""Numbers for Prometheus.

What is in the queues is counted when somebody asks.  What has ended is read from the task log and
added up from the start of this process on, whichever process ran it: every instance shows the same
work, so take one of them or the maximum, not the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from lakewarden.jobs.database import Database
from lakewarden.jobs.listing import TaskCount, TaskLists
from lakewarden.jobs.queues import QUEUES
from lakewarden.jobs.schema import TASK_LOG
from lakewarden.jobs.tasks import ACTIVE, TaskStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: A row may become visible this much later than the time it carries.
_LATE = timedelta(seconds=60)
_SECONDS = (0.1, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass
class _Ended:
    """How far the task log was read."""

    since: datetime
    #: Read already, though later than `since`.
    seen: dict[tuple[UUID, int], datetime] = field(default_factory=dict)


class Metrics:
    """The numbers of one process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lists = TaskLists(database)
        self._lock = Lock()
        self._registry = CollectorRegistry()
        with database.reading() as connection:
            self._ended = _Ended(database.moment(connection))
        self._requests = Counter(
            "lakewarden_http_requests_total",
            "HTTP requests that were answered.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._request_seconds = Histogram(
            "lakewarden_http_request_duration_seconds",
            "How long answers took.",
            ("method", "route"),
            buckets=_REQUEST_SECONDS,
            registry=self._registry,
        )
        self._attempts = Counter(
            "lakewarden_task_attempts_total",
            "Attempts at tasks that have ended, by how.",
            ("queue", "outcome"),
            registry=self._registry,
        )
        self._task_seconds = Histogram(
            "lakewarden_task_duration_seconds",
            "How long attempts at tasks took.",
            ("queue",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._bytes = Counter(
            "lakewarden_reclaimed_bytes_total",
            "Bytes of files that tasks have removed.",
            ("queue",),
            registry=self._registry,
        )
        self._storage_requests = Counter(
            "lakewarden_storage_requests_total",
            "Requests to object stores that tasks have made.",
            ("queue", "kind"),
            registry=self._registry,
        )
        self._registry.register(_Queues(self._lists))

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        """Return all numbers, as Prometheus reads them."""
        with self._lock:
            self._read_log()
        return generate_latest(self._registry)

    def _read_log(self) -> None:
        with self._database.reading() as connection:
            rows = connection.execute(
                sa.select(
                    TASK_LOG.c.task_id,
                    TASK_LOG.c.attempt,
                    TASK_LOG.c.queue_name,
                    TASK_LOG.c.status,
                    TASK_LOG.c.duration_seconds,
                    TASK_LOG.c.ended_at,
                    TASK_LOG.c.result,
                ).where(TASK_LOG.c.ended_at >= self._ended.since)
            ).all()
            now = self._database.moment(connection)
        for row in rows:
            key = (row.task_id, row.attempt)
            if key not in self._ended.seen:
                self._ended.seen[key] = row.ended_at
                self._attempts.labels(row.queue_name, row.status).inc()
                if row.duration_seconds is not None:
                    self._task_seconds.labels(row.queue_name).observe(row.duration_seconds)
                self._add_result(row.queue_name, row.result or {})
        # Never backwards: what this process did not see at first it does not count later.
        since = max(self._ended.since, now - _LATE)
        late = {key: ended for key, ended in self._ended.seen.items() if ended >= since}
        self._ended = _Ended(since, late)

    def _add_result(self, queue: str, result: Mapping[str, Any]) -> None:
        reclaimed = result.get("deleted_bytes")
        if isinstance(reclaimed, int) and reclaimed > 0:
            self._bytes.labels(queue).inc(reclaimed)
        requests = result.get("requests")
        for kind, number in (requests if isinstance(requests, Mapping) else {}).items():
            if isinstance(number, int) and number > 0:
                self._storage_requests.labels(queue, kind).inc(number)


class _Queues:
    """Counts what is in the queues, when somebody asks."""

    def __init__(self, lists: TaskLists) -> None:
        self._lists = lists

    def describe(self) -> list[Metric]:
        # Without this the registry would ask the database when it is made.
        return []

    def collect(self) -> Iterator[Metric]:
        counts = {(one.queue, one.status): one for one in self._lists.counts()}
        depth = GaugeMetricFamily(
            "lakewarden_tasks", "Active tasks in the queues.", labels=("queue", "status")
        )
        nearest = GaugeMetricFamily(
            "lakewarden_task_next_run_timestamp_seconds",
            "When the next task that waits is due.",
            labels=("queue",),
        )
        for queue in sorted(QUEUES):
            for status in ACTIVE:
                depth.add_metric((queue, status.value), _number(counts.get((queue, status))))
            waiting = counts.get((queue, TaskStatus.SCHEDULED))
            if waiting is not None:
                nearest.add_metric((queue,), waiting.next_at.timestamp())
        yield depth
        yield nearest


def _number(count: TaskCount | None) -> int:
    return 0 if count is None else count.number
