"""A small Hub on loopback: it serves config.json files with the headers and error codes of the real one.

    with HubServer([Repository("org/name", {"model_type": "llama", ...})]) as hub:
        ... HF_ENDPOINT=hub.endpoint ...
        hub.requests  # (method, path, status) of every request, in order

Answers `/{org}/{name}/resolve/{revision}/{file}` (HEAD and GET) and `/api/models/{org}/{name}[/revision/{revision}]`.
As on the Hub: a repository that does not exist is 401 RepoNotFound for the anonymous and 404 RepoNotFound with a token;
a gated one is 401 GatedRepo without a token and 403 GatedRepo with a token that has no access.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@dataclass
class Repository:
    """A repository with one config.json (None: it has no such file) at `main` and other revisions.

    `gated` and `private` need a token of `tokens`. `files` are served beside config.json (name -> text).
    """

    id: str
    config: dict[str, Any] | str | None = None
    revisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    tokens: tuple[str, ...] = ()

    def commit(self, revision: str) -> str | None:
        """The commit of a revision (a name, or a commit itself), None if there is no such revision."""
        commits = {name: hashlib.sha1(f"{self.id}@{name}".encode()).hexdigest() for name in ("main", *self.revisions)}
        return commits.get(revision) or next((commit for commit in commits.values() if commit == revision), None)

    def content(self, revision: str, file: str) -> bytes | None:
        if file != "config.json":
            return self.files[file].encode() if file in self.files else None
        name = next(name for name in ("main", *self.revisions) if self.commit(name) == self.commit(revision))
        config = self.revisions.get(name, self.config)
        if config is None:
            return None
        return (config if isinstance(config, str) else json.dumps(config)).encode()


class HubServer:
    """Serves repositories from a thread until the `with` block ends; `endpoint` is its address.

    `status` other than None is the answer to everything (an outage); answers come after `delay_seconds`.
    """

    def __init__(self, repositories: list[Repository], status: int | None = None, delay_seconds: float = 0.0):
        self.repositories = {repository.id: repository for repository in repositories}
        self.status, self.delay_seconds = status, delay_seconds
        self.requests: list[tuple[str, str, int]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) for a path and the bearer token that came with it."""
        if self.status is not None:
            return self.status, {}, b""
        name, _, rest = path.removeprefix("/").removeprefix("api/models/").partition("/resolve/")
        if path.startswith("/api/models/"):
            name, _, rest = name.partition("/revision/")
        repository = self.repositories.get(name)
        allowed = repository is not None and (
            token in repository.tokens or not (repository.gated or repository.private)
        )
        if repository is None or (repository.private and not allowed):
            return self._error(404 if token else 401, "RepoNotFound")
        revision, _, file = rest.partition("/")
        commit = repository.commit(unquote(revision) or "main")
        if commit is None:
            return self._error(404, "RevisionNotFound")
        if path.startswith("/api/models/"):
            return 200, {}, json.dumps({"id": repository.id, "sha": commit, "gated": repository.gated}).encode()
        if not allowed:
            return self._error(403 if token else 401, "GatedRepo")
        body = repository.content(unquote(revision), file)
        if body is None:
            return self._error(404, "EntryNotFound", {"X-Repo-Commit": commit})
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body

    @staticmethod
    def _error(status: int, code: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
        return status, {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}, b""

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._respond(with_body=False)

            def do_GET(self) -> None:
                self._respond(with_body=True)

            def _respond(self, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                authorization = self.headers.get("Authorization", "")
                token = authorization.removeprefix("Bearer ") if authorization.startswith("Bearer ") else None
                time.sleep(hub.delay_seconds)
                status, headers, body = hub.answer(path, token)
                hub.requests.append((self.command, path, status))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # the client gave up waiting
                    super().handle()

            def log_message(self, *_: object) -> None:
                pass

        return Handler
