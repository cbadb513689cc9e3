"""A W&B server on this machine: as much of it as `wandb.init(mode="online")`, resuming and `wandb sync` need."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StubRun:
    """What has arrived of one run."""

    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By line number at the server."""
    summary: dict[str, Any] = field(default_factory=dict)
    upsert: dict[str, Any] = field(default_factory=dict)
    """The latest value of each variable of the requests that create and change the run."""
    exit_code: int | None = None
    preempting: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {key: entry["value"] for key, entry in json.loads(self.upsert["config"]).items() if key != "_wandb"}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history in order, without the keys that W&B adds."""
        lines = (line for _, line in sorted(self.history.items()))
        return [{key: value for key, value in line.items() if not key.startswith("_")} for line in lines]


class Stub(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, StubRun] = {}
        self.requests: list[str] = []
        self.uploads: dict[str, bytes] = {}
        """Files, by their path in the run."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def run(self, name: str) -> StubRun:
        return self.runs.setdefault(name, StubRun())


@contextmanager
def serving() -> Iterator[Stub]:
    """A server for the time of a test."""
    stub = Stub()
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self.server.uploads[self.path.removeprefix("/upload/")] = self._body()
        self._answer({})

    def do_CONNECT(self) -> None:
        """Somebody takes the stub for a proxy."""
        self._answer({}, 502)

    def do_POST(self) -> None:
        body = self._body()
        stream = re.match(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream", self.path)
        with self.server.lock:
            if stream:
                self._receive(self.server.run(stream[3]), json.loads(body))
                self._answer({"limits": {}})
            elif self.path.startswith("/graphql"):
                request = json.loads(body)
                named = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
                operation = request.get("operationName") or (named[1] if named else "")
                self._answer({"data": self._graphql(operation, request.get("variables") or {})})
            else:
                self._answer({})

    def _receive(self, run: StubRun, sent: dict[str, Any]) -> None:
        for name, chunk in (sent.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                for line, content in enumerate(chunk["content"], chunk["offset"]):
                    run.history[line] = json.loads(content)
            elif name == "wandb-summary.json":
                run.summary = json.loads(chunk["content"][-1])
        run.preempting = run.preempting or bool(sent.get("preempting"))
        run.exit_code = sent.get("exitcode", run.exit_code)

    def _graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "UpsertBucket":
            name = variables.get("name") or "unnamed"
            run = self.server.run(name)
            run.upsert |= {key: value for key, value in variables.items() if value is not None}
            return {"upsertBucket": {"bucket": _bucket(name, run), "inserted": True}}
        if operation == "RunResumeStatus":
            name = variables["name"]
            known = _resumed(name, self.server.runs[name]) if name in self.server.runs else None
            return {"model": {"id": "P", "name": "p", "entity": {"id": "E", "name": "me"}, "bucket": known}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.server.url}/upload/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        if operation == "Viewer":
            who = {"id": "U", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": who}
        if "ServerInfo" in operation:
            versions = {"max_cli_version": "9.9.9"}
            return {"serverInfo": {"cliVersionInfo": versions, "latestLocalVersionInfo": None, "features": []}}
        if operation == "ArtifactType":
            return {"project": None}
        if operation == "CreateArtifact":  # "committed": I have its content already
            sequence = {"id": "S", "latestArtifact": {"id": "A", "versionIndex": 0}}
            return {"createArtifact": {"artifact": {"id": "A", "state": "COMMITTED", "artifactSequence": sequence}}}
        if operation == "RunStoppedStatus":
            return {"project": {"run": {"stopped": False}}}
        return {}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, value: Any, code: int = 200) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _bucket(name: str, run: StubRun) -> dict[str, Any]:
    project = {"id": "P", "name": run.upsert.get("project") or "uncategorized", "entity": {"id": "E", "name": "me"}}
    return {
        "id": "R",
        "name": name,
        "displayName": run.upsert.get("displayName") or name,
        "description": None,
        "config": run.upsert.get("config") or "{}",
        "sweepName": None,
        "project": project,
        "historyLineCount": len(run.history),
    }


def _resumed(name: str, run: StubRun) -> dict[str, Any]:
    tail = [json.dumps(run.history[max(run.history)])] if run.history else []
    counts = {"historyLineCount": len(run.history), "eventsLineCount": 0, "logLineCount": 0}
    tails = {"historyTail": json.dumps(tail), "eventsTail": "[]", "summaryMetrics": json.dumps(run.summary)}
    return _bucket(name, run) | counts | tails | {"tags": run.upsert.get("tags") or [], "wandbConfig": '{"t": 1}'}
