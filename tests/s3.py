"""A real S3 server on loopback (moto's), and a proxy before it that counts requests and puts faults in."""

from __future__ import annotations

import functools
import http.client
import itertools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from mmcompile.format import store

__all__ = ["Asked", "Bucket", "Proxy", "s3_bucket", "s3_proxy", "s3_server"]

_numbers = itertools.count()


class Asked(NamedTuple):
    """A request: its number from 0, method, and path with query, percent-decoded."""

    number: int
    method: str
    path: str


class Proxy:
    """Passes requests on to a server, one at a time for each connection, and writes them down in `asked`.

    `fault(asked)` may say what goes wrong: "drop" (the connection ends without an answer), "truncate" (the body ends half-way), "lost" (the request
    is carried out, its answer lost), a number (that status, without asking the server), a float (seconds to wait first); None: nothing.
    """

    def __init__(self, upstream: str) -> None:
        self.asked: list[Asked] = []
        self.fault: Callable[[Asked], str | int | float | None] = lambda asked: None
        self._lock = threading.Lock()
        there = urlsplit(upstream).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _pass(self) -> None:
                body = self._body()
                with proxy._lock:
                    asked = Asked(len(proxy.asked), self.command, unquote(self.path))
                    proxy.asked.append(asked)
                fault = proxy.fault(asked)
                if isinstance(fault, float):
                    time.sleep(fault)
                if fault == "drop":
                    self.close_connection = True
                    return
                if isinstance(fault, int):
                    self.send_response(fault)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                connection = http.client.HTTPConnection(there, timeout=60)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "content-length", "connection", "expect")}
                connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
                answer = connection.getresponse()
                data = answer.read()
                connection.close()
                if fault == "lost":
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                length = answer.getheader("Content-Length") or str(len(data))
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if fault == "truncate" else data)
                if fault == "truncate":
                    self.close_connection = True

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away, killed or tired of waiting, is what these tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def count(self, method: str, part: str = "") -> int:
        """How many requests of this method had `part` in their path."""
        return sum(a.method == method and part in a.path for a in list(self.asked))

    def forget(self) -> None:
        with self._lock:
            self.asked.clear()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Bucket:
    """A new bucket: `url`, and what lies in it."""

    def __init__(self, server: str) -> None:
        import boto3

        self.name = f"bucket-{next(_numbers)}"
        self.url = f"s3://{self.name}"
        self.client = boto3.client("s3", endpoint_url=server)
        self.client.create_bucket(Bucket=self.name)

    def fill(self, files: dict[str, bytes], folder: str = "") -> str:
        """Put objects below a folder; returns the folder's URL."""
        for name, data in files.items():
            self.client.put_object(Bucket=self.name, Key=f"{folder}/{name}" if folder else name, Body=data)
        return f"{self.url}/{folder}" if folder else self.url

    def files(self, folder: str = "") -> dict[str, bytes]:
        """The objects below a folder, by name in it."""
        prefix = folder.rstrip("/") + "/" if folder else ""
        found: dict[str, bytes] = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix):
            for entry in page.get("Contents", []):
                found[entry["Key"].removeprefix(prefix)] = self.client.get_object(Bucket=self.name, Key=entry["Key"])["Body"].read()
        return found

    def delete(self, *names: str) -> None:
        for name in names:
            self.client.delete_object(Bucket=self.name, Key=name)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server that lasts for the session; what clients read about S3 when they are made is parsed once in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that the server is made of
        from botocore.loaders import JSONFileLoader
        from moto.server import ThreadedMotoServer
    parse = functools.cache(JSONFileLoader().load_file)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: parse(path))
        yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    server.stop()


@pytest.fixture
def s3_proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server; the environment leads every client, also of processes started here, to it.  Waits between tries are short."""
    proxy = Proxy(s3_server)
    for name, value in {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "WAITS_S", (0.01, 0.02, 0.05))
    yield proxy
    proxy.stop()


@pytest.fixture
def s3_bucket(s3_proxy: Proxy, s3_server: str) -> Bucket:
    """A new bucket; what a test puts or looks up itself goes past the proxy."""
    return Bucket(s3_server)
