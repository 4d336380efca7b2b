"""A real S3 protocol server for tests and benchmarks: moto in a process of its own.

Around moto sits a small layer that counts requests the way S3 bills them, adds latency, checks the
access key (moto does not), and on request refuses to delete chosen keys or throttles, because no
public server can be asked to misbehave.  Everything listens on the loopback interface only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from lakewarden.storage.store import Request

ACCESS_KEY = "lakewarden-test"
SECRET_KEY = "lakewarden-test-secret"  # not a secret: the server only lives in tests

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Application = Callable[[Environ, Any], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server; `options` are the storage options that reach it."""

    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        return {
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "aws_region": "us-east-1",
            "aws_endpoint": self.endpoint,
            "allow_http": "true",
        }

    def create_bucket(self, name: str) -> None:
        self._control("PUT", f"/__buckets/{name}", b"")

    def requests(self) -> dict[Request, int]:
        """Return the requests served since the last reset, by kind."""
        counts = json.loads(self._control("GET", "/__requests"))
        return {Request(kind): number for kind, number in counts.items()}

    def reset(self) -> None:
        """Forget the requests counted so far."""
        self._control("POST", "/__reset")

    def deny_deletes(self, keys: Sequence[str]) -> None:
        """Refuse from now on to delete exactly these keys."""
        self._control("POST", "/__deny", json.dumps(list(keys)).encode())

    def throttle(self, number: int) -> None:
        """Answer the next `number` requests with 503 SlowDown."""
        self._control("POST", "/__throttle", str(number).encode())

    def latency(self, milliseconds: int) -> None:
        """Delay every answer from now on."""
        self._control("POST", "/__latency", str(milliseconds).encode())

    def load(self, bucket: str, prefix: str, directory: str, *, age_days: float = 0) -> None:
        """Put a directory's files into a bucket as objects of the given age, without requests."""
        order = {"bucket": bucket, "prefix": prefix, "directory": directory, "age_days": age_days}
        self._control("POST", "/__load", json.dumps(order).encode())

    def _control(self, method: str, path: str, body: bytes | None = None) -> bytes:
        url = self.endpoint + path
        request = urllib.request.Request(url, data=body, method=method)
        # A proxy from the environment must not see, or break, loopback traffic.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=600) as answer:
            data: bytes = answer.read()
        return data


@contextmanager
def s3_server(latency_ms: int = 0) -> Iterator[S3Server]:
    """Run a server in its own process until the block ends."""
    command = [sys.executable, "-m", __name__, "--latency-ms", str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise RuntimeError("the S3 test server did not start; see its output above")
            yield S3Server(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()


class Counted:
    """Wrap moto's application: count, delay, check the key, misbehave on request."""

    def __init__(self, application: Application, latency_ms: int) -> None:
        self._moto = application
        # moto's own state is not made for threads: concurrent deletes fail now and then.
        self._one_at_a_time = Lock()
        self._latency_seconds = latency_ms / 1000
        self._lock = Lock()
        self._counts: Counter[Request] = Counter()
        self._denied: frozenset[str] = frozenset()
        self._throttle = 0

    def __call__(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/__"):
            return self._control(path, environ, start)
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        kind = request_kind(environ["REQUEST_METHOD"], path, query)
        with self._lock:
            self._counts[kind] += 1
            throttled = self._throttle > 0
            self._throttle -= throttled
        if self._latency_seconds:
            time.sleep(self._latency_seconds)  # the latency that was asked for
        if throttled:
            return refuse(start, "503 Slow Down", "SlowDown")
        if f"Credential={ACCESS_KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            return refuse(start, "403 Forbidden", "InvalidAccessKeyId")
        if kind is Request.DELETE and self._denied:
            return self._delete_with_denials(environ, start)
        return self._application(environ, start)

    def _application(self, environ: Environ, start: Any) -> Iterable[bytes]:
        with self._one_at_a_time:
            return list(self._moto(environ, start))

    def _control(self, path: str, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        match path.split("/")[1:]:
            case ["__buckets", name]:
                environ["PATH_INFO"] = environ["RAW_URI"] = environ["REQUEST_URI"] = f"/{name}"
                return self._application(environ, start)
            case ["__reset"]:
                with self._lock:
                    self._counts.clear()
            case ["__deny"]:
                self._denied = frozenset(json.loads(body_of(environ)))
            case ["__throttle"]:
                self._throttle = int(body_of(environ))
            case ["__latency"]:
                self._latency_seconds = int(body_of(environ)) / 1000
            case ["__load"]:
                load(**json.loads(body_of(environ)))
            case _:
                pass  # only asks for the counts
        with self._lock:
            body = json.dumps(self._counts).encode()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _delete_with_denials(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        """Delete like S3 with a policy that protects some keys: errors for those keys only."""
        if environ["REQUEST_METHOD"] == "DELETE":
            if environ["PATH_INFO"].split("/", 2)[-1] in self._denied:
                return refuse(start, "403 Forbidden", "AccessDenied")
            return self._application(environ, start)
        body = body_of(environ).decode()
        objects = re.findall(r"<Object>.*?</Object>", body, re.DOTALL)
        refused = [key for entry in objects if (key := object_key(entry)) in self._denied]
        for entry in objects:
            if object_key(entry) in self._denied:
                body = body.replace(entry, "")
        errors = "".join(
            f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            for key in refused
        )
        data = body.encode()
        environ["wsgi.input"] = BytesIO(data)
        environ["CONTENT_LENGTH"] = str(len(data))
        environ.pop("HTTP_CONTENT_MD5", None)
        if len(refused) == len(objects):
            return answer_xml(start, "200 OK", f"<DeleteResult>{errors}</DeleteResult>")
        held: list[tuple[str, list[tuple[str, str]]]] = []
        answer = b"".join(self._application(environ, lambda s, h, *_: held.append((s, h))))
        answer = answer.replace(b"</DeleteResult>", errors.encode() + b"</DeleteResult>")
        status, headers = held[0]
        kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start(status, [*kept, ("Content-Length", str(len(answer)))])
        return [answer]


def request_kind(method: str, path: str, query: Mapping[str, Sequence[str]]) -> Request:
    """Name the request as S3's bill would; a bulk delete is one DELETE."""
    in_bucket = bool(path.strip("/").partition("/")[2])
    match method:
        case "POST" if "delete" in query:
            return Request.DELETE
        case "GET":
            return Request.GET if in_bucket else Request.LIST
        case "HEAD" | "DELETE":
            return Request(method)
        case _:
            return Request.PUT


def object_key(entry: str) -> str:
    found = re.search(r"<Key>(.*?)</Key>", entry, re.DOTALL)
    return found.group(1) if found else ""


def body_of(environ: Environ) -> bytes:
    data: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return data


def refuse(start: StartResponse, status: str, code: str) -> Iterable[bytes]:
    return answer_xml(start, status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")


def answer_xml(start: StartResponse, status: str, text: str) -> Iterable[bytes]:
    body = text.encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def load(bucket: str, prefix: str, directory: str, age_days: float) -> None:
    """Put files into moto's memory; only this process needs moto."""
    from moto.core.utils import utcnow  # noqa: PLC0415
    from moto.s3.models import s3_backends  # noqa: PLC0415

    backend = s3_backends["123456789012"]["aws"]
    modified = utcnow() - timedelta(days=age_days)
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file():
            name = f"{prefix}/{path.relative_to(directory)}"
            backend.put_object(bucket, name, path.read_bytes()).last_modified = modified


def serve(latency_ms: int) -> None:
    """Print the port, then answer until the process ends."""
    # Only this process needs moto.
    from moto.moto_server.werkzeug_app import create_backend_app  # noqa: PLC0415
    from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: PLC0415

    class Quiet(WSGIRequestHandler):
        # Keep-alive: a connection per request would run out of ports in benchmarks.
        protocol_version = "HTTP/1.1"

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    application = Counted(create_backend_app("s3"), latency_ms)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)  # noqa: T201  # how the parent learns the port
    server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency-ms", type=int, default=0)
    serve(parser.parse_args().latency_ms)
