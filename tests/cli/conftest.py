from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakewarden.testing.s3 import S3Server, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server
