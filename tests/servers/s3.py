"""A real S3 API server on loopback, whose answers a test can spoil."""

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"
GONE = "gone"
Spoil = Callable[[str, str], str | None]
"""Gets method and path of a request; returns an HTTP status to answer with, `GONE` to break the connection,
or None to let it pass."""

_CODES = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}


class S3Server:
    """Moto's server in threads of this process; `spoil` decides over every request."""

    def __init__(self) -> None:
        self.spoil: Spoil = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=self.url, **keys)
        self.reset()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        status = self.spoil(method, path)
        if status is None:
            return self._application(environ, start_response)
        if status == GONE:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{status} Spoiled", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{_CODES[status]}</Code><Message>spoiled</Message></Error>".encode()]

    def reset(self) -> None:
        """Empty the server down to one bucket, and let all requests pass."""
        self.spoil = lambda method, path: None
        for bucket in self.client.list_buckets()["Buckets"]:
            for name in self.names(bucket["Name"]):
                self.client.delete_object(Bucket=bucket["Name"], Key=name)
            self.client.delete_bucket(Bucket=bucket["Name"])
        self.client.create_bucket(Bucket=BUCKET)
        self.requests.clear()

    def names(self, bucket: str = BUCKET) -> list[str]:
        return [item["Key"] for item in self.client.list_objects_v2(Bucket=bucket).get("Contents", [])]

    def write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=data)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.client.close()
