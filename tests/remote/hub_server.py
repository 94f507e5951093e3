"""The part of the Hugging Face hub's protocol that its client uses for small files, on localhost and in memory."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Repositories = dict[str, dict[str, bytes]]
COMMIT = "0" * 40


class Handler(BaseHTTPRequestHandler):
    """Model repositories by "owner/name", in the dict `repositories` of the server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/models/"):
            self._tell(path.removeprefix("api/models/"))
        else:
            parts = path.split("/")
            self._send(self.repositories.get("/".join(parts[:2]), {}).get("/".join(parts[4:])))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path).strip("/"), self._body()
        if path == "api/repos/create":
            asked = json.loads(body)
            repository = f"{asked.get('organization', 'owner')}/{asked['name']}"
            known = repository in self.repositories
            self.repositories.setdefault(repository, {})
            self._json({"url": f"https://huggingface.co/{repository}"}, 409 if known else 200)
            return
        if path == "api/validate-yaml":
            self._json({"errors": [], "warnings": []})
            return
        owner, name, what, *_ = path.removeprefix("api/models/").split("/")
        files = self.repositories[f"{owner}/{name}"]
        if what == "preupload":
            asked = json.loads(body)["files"]
            self._json(
                {"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in asked]}
            )
        elif what == "paths-info":
            asked = json.loads(body)["paths"]
            self._json(
                [_entry(file, files[file]) for file in asked if file in files] + _folders(files, asked)
            )
        elif what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            self._json(
                {"commitUrl": f"https://huggingface.co/{owner}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
            )
        else:
            self._json({"error": path}, 501)

    @property
    def repositories(self) -> Repositories:
        return self.server.repositories  # type: ignore[attr-defined]

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _tell(self, path: str) -> None:
        owner, name, *rest = path.split("/")
        files = self.repositories.get(f"{owner}/{name}")
        if files is None:
            self._json({"error": "Repository not found"}, 404)
        elif rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            self._json([_entry(file, data) for file, data in files.items() if file.startswith(below)])
        else:
            siblings = [{"rfilename": file} for file in files]
            self._json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings})

    def _send(self, data: bytes | None) -> None:
        if data is None:
            self._json({"error": "Entry not found"}, 404)
            return
        self.send_response(200)
        tag = hashlib.sha256(data).hexdigest()
        for name, value in {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, answer: Any, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""


def _entry(file: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _folders(files: dict[str, bytes], asked: list[str]) -> list[dict[str, Any]]:
    inside = [path for path in asked if any(file.startswith(f"{path}/") for file in files)]
    return [{"type": "directory", "path": path, "oid": COMMIT} for path in inside]


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, Repositories]]:
    """Yield the address of a hub, and its repositories."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.repositories  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
