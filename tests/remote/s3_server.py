"""The part of Amazon S3's protocol that our clients use, on localhost and in memory."""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
XMLNS = f'xmlns="{NAMESPACE}"'
DATE = ("2026-01-01T00:00:00.000Z", "Thu, 01 Jan 2026 00:00:00 GMT")


class Handler(BaseHTTPRequestHandler):
    """Objects of all buckets by `bucket/key`, in the dict `objects` of the server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name, asked = self._asked()
        if "list-type" in asked:
            self._answer(200, _listing(self.objects, name.rstrip("/"), asked).encode())
        elif name not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._object(self.objects[name])

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.objects.pop(self._asked()[0], None)
        self._answer(204, b"")

    def do_PUT(self) -> None:
        name, asked = self._asked()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if "partNumber" in asked:
            self.parts[name, int(asked["partNumber"])] = data
        else:
            self._store(name, data)
        self._answer(200, b"", ETag=_etag(data))

    def do_POST(self) -> None:
        """Begins an object of several parts, ends it, or removes the objects that the body names."""
        name, asked = self._asked()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "uploads" in asked:
            answer = f"<InitiateMultipartUploadResult {XMLNS}><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, answer.encode())
        elif "uploadId" in asked:
            numbers = sorted(number for key, number in self.parts if key == name)
            data = b"".join(self.parts.pop((name, number)) for number in numbers)
            self._store(name, data)
            kind = "CompleteMultipartUploadResult"
            self._answer(200, f"<{kind} {XMLNS}><ETag>{_etag(data)}</ETag></{kind}>".encode())
        else:
            self._remove(name, ElementTree.fromstring(body))

    def _store(self, name: str, data: bytes) -> None:
        self.objects[name] = data
        self.server.log.append(name)  # pyright: ignore[reportAttributeAccessIssue]

    def _remove(self, bucket: str, body: ElementTree.Element) -> None:
        keys = [str(key.text) for key in body.iter(f"{{{NAMESPACE}}}Key")]
        for key in keys:
            self.objects.pop(f"{bucket}/{key}", None)
        removed = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult {XMLNS}>{removed}</DeleteResult>".encode())

    @property
    def objects(self) -> dict[str, bytes]:
        return self.server.objects  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def parts(self) -> dict[tuple[str, int], bytes]:
        return self.server.parts  # pyright: ignore[reportAttributeAccessIssue]

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        return unquote(parts.path).lstrip("/"), {name: values[0] for name, values in query.items()}

    def _object(self, data: bytes) -> None:
        headers = {"ETag": _etag(data), "Last-Modified": DATE[1]}
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            end = min(int(last or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
            self._answer(206, data[int(first) : end + 1], **headers)
        else:
            self._answer(200, data, **headers)

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _listing(objects: dict[str, bytes], bucket: str, asked: dict[str, str]) -> str:
    prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
    contents, folders = [], {}
    for name, data in sorted(objects.items()):
        key = name.removeprefix(f"{bucket}/")
        if not name.startswith(f"{bucket}/") or not key.startswith(prefix):
            continue
        rest = key.removeprefix(prefix)
        if delimiter and delimiter in rest:
            folders[prefix + rest.split(delimiter)[0] + delimiter] = None
        else:
            fields = {"Key": key, "LastModified": DATE[0], "ETag": _etag(data), "Size": len(data)}
            contents.append("".join(f"<{k}>{escape(str(v))}</{k}>" for k, v in fields.items()))
    rows = "".join(f"<Contents>{row}</Contents>" for row in contents)
    rows += "".join(
        f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders
    )
    head = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(contents) + len(folders)}</KeyCount>"
    return f"<ListBucketResult {XMLNS}>{head}<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """The server's address, its objects, and the names in the order in which they were written."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.objects, server.log, server.parts = {}, [], {}  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.objects, server.log  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
