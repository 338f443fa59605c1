"""A stand-in for a model hub: the part of its HTTP interface that fetching a model uses, over real sockets."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast
from urllib.parse import parse_qs, unquote, urlsplit

PIECE: Final = 64 * 1024
SIGNATURE: Final = "signedsecret"
# A page of a listing, so that every test with more files asks for a second one.
PAGE: Final = 4


@dataclass(frozen=True)
class Refusal:
    """What the hub answers in place of what was asked for."""

    status: int
    code: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Seen:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]


class Repo:
    """A repository: its commits, and what its branches and tags are now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.private_to: str | None = None
        self.gated_to: str | None = None

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit that has these files, as what `ref` is from now on; return its hash."""
        text = repr([self.name, len(self.commits), sorted(files)])
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.refs[ref] = name
        return name


class Hub:
    """A hub that runs, what it has, how it misbehaves, and what it was asked for.

    `refuse` is asked first about each request. `cut_after`, by file: how many bytes of it are sent before the
    connection is closed, for as many requests as there are numbers. `pause_at`, by file: where sending waits for
    `go_on`. `spoil`: files that are sent as zeros. `large_files_at`: the address of the server to which it sends those
    who ask for a large file. `on_get` is called with a file's name when it is asked for.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, Repo] = {}
        self.refuse: Callable[[Seen], Refusal | None] = lambda seen: None
        self.cut_after: dict[str, list[int]] = {}
        self.pause_at: dict[str, int] = {}
        self.go_on = threading.Event()
        self.ranges = True
        self.spoil: set[str] = set()
        self.large_files_at: str | None = None
        self.requests: list[Seen] = []
        self.sent: Counter[str] = Counter()
        self.on_get: Callable[[str], None] = lambda path: None

    def repo(self, name: str, files: dict[str, bytes]) -> Repo:
        """Add a repository with one commit."""
        self.repos[name] = Repo(name)
        self.repos[name].commit(files)
        return self.repos[name]

    def fetched(self) -> dict[str, int]:
        """Return the bytes sent of each file."""
        return dict(self.sent)

    def refuse_all(self, refusal: Refusal, only: str = "") -> None:
        """Answer every request whose path has `only` in it with a refusal."""
        self.refuse = lambda seen: refusal if only in seen.path else None


def digest(content: bytes, name: str) -> tuple[str, bool]:
    """Return a file's ETag, and whether it is kept as a large file."""
    if name.endswith((".safetensors", ".gguf", ".bin")):
        return hashlib.sha256(content).hexdigest(), True
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        seen = Seen(self.command, self.path, dict(self.headers.items()))
        self.hub.requests.append(seen)
        refusal = self.hub.refuse(seen) or self._refusal()
        if refusal is not None:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self._send(b"", {**{k: v for k, v in headers.items() if v}, **refusal.headers}, refusal.status)
            return
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"))
        else:
            self._resolve(path)

    def _repo(self) -> Repo | None:
        parts = unquote(urlsplit(self.path).path).removeprefix("/api/models/").strip("/").split("/")
        return self.hub.repos.get("/".join(parts[:2]))

    def _refusal(self) -> Refusal | None:
        repo, token = self._repo(), (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if repo is None or repo.private_to not in (None, token):
            return Refusal(404 if token else 401, "RepoNotFound", "Repository not found")
        if repo.gated_to not in (None, token) and "/resolve/" in self.path:
            return Refusal(403 if token else 401, "GatedRepo", f"Access to model {repo.name} is restricted")
        return None

    def _api(self, path: str) -> None:
        org, name, what, rest = path.split("/", 3)
        repo = self.hub.repos[f"{org}/{name}"]
        revision = rest.split("/")[0] if what == "tree" else rest
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            self._send(b"", {"X-Error-Code": "RevisionNotFound"}, 404)
        elif what == "revision":
            self._json({"_id": "1", "id": repo.name, "sha": commit, "siblings": []})
        else:
            self._tree(repo, commit)

    def _tree(self, repo: Repo, commit: str) -> None:
        first = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        entries = [entry(name, content) for name, content in sorted(repo.commits[commit].items())]
        more = f"{self.hub.url}/api/models/{repo.name}/tree/{commit}?recursive=true&cursor={first + PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if first + PAGE < len(entries) else {}
        self._json(
            [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "d"}] * (not first), headers, entries, first
        )

    def _json(
        self, body: Any, headers: dict[str, str] | None = None, entries: Iterable[Any] = (), first: int = 0
    ) -> None:
        if isinstance(body, list):
            body = [*cast(list[Any], body), *list(entries)[first : first + PAGE]]
        self._send(json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _resolve(self, path: str) -> None:
        repo_name, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        repo = self.hub.repos[repo_name]
        commit = repo.refs.get(revision, revision)
        content = repo.commits.get(commit, {}).get(name)
        if content is None:
            self._send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
            return
        self.hub.on_get(name)
        etag, is_large = digest(content, name)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_large:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        if is_large and self.hub.large_files_at:
            self._send(b"", {**headers, "Location": f"{self.hub.large_files_at}{self.path}?signature={SIGNATURE}"}, 302)
            return
        begin = 0
        if self.hub.ranges and self.headers["Range"]:
            begin = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if name in self.hub.spoil:
            content = bytes(len(content))
        self._start(206 if "Content-Range" in headers else 200, len(content) - begin, headers)
        if self.command == "GET":
            self._pour(name, content, begin)

    def _pour(self, name: str, content: bytes, begin: int) -> None:
        """Send a file from `begin` on, in pieces, as far as it goes this time."""
        cuts = self.hub.cut_after.get(name)
        end = begin + cuts.pop(0) if cuts else len(content)
        pause = self.hub.pause_at.get(name)
        while begin < min(end, len(content)):
            if pause is not None and begin >= pause:
                assert self.hub.go_on.wait(60)
                pause = None
            upto = min(begin + PIECE, end, len(content), pause if pause and pause > begin else len(content))
            self.wfile.write(content[begin:upto])
            self.hub.sent[name] += upto - begin
            begin = upto
        if begin < len(content):
            self.close_connection = True

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self._start(status, len(body), headers)
        if self.command == "GET":
            self.wfile.write(body)

    def _start(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def entry(name: str, content: bytes) -> dict[str, Any]:
    """Return a file as a listing has it."""
    etag, is_large = digest(content, name)
    if not is_large:
        return {"type": "file", "oid": etag, "size": len(content), "path": name}
    lfs = {"oid": etag, "size": len(content), "pointerSize": 134}
    return {"type": "file", "oid": "1" * 40, "size": len(content), "lfs": lfs, "path": name}


@contextmanager
def running_hub() -> Generator[Hub]:
    """Run a hub for as long as the block takes."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that goes away is no error of the test's."""

    class Handler(_Handler):
        pass

    with Server(("127.0.0.1", 0), Handler) as server:
        Handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Handler.hub
        finally:
            Handler.hub.go_on.set()
            server.shutdown()
            thread.join()
