"""A stand-in for the hub on 127.0.0.1: it answers what huggingface_hub 2.4 asks for, and no more.

Anything else is a 404. Xet, TLS, proxies and headers about rate limits are left out.
"""

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

TOKEN = "hf_of_the_tests"
LARGE = (".safetensors", ".bin", ".parquet")  # kept apart, as on the hub, where a link leads
Files = dict[str, bytes]


@dataclass
class Repository:
    commits: dict[str, Files] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # such as main, and its commit
    is_private: bool = False
    is_gated: bool = False
    files: Files = field(default_factory=dict)  # of the last commit


class Hub(ThreadingHTTPServer):
    """Repositories by "models/owner/name" or "datasets/owner/name", and the requests so far."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        # A pattern of method and path; a status, "cut" (the body) or "slow"; how many times
        self.faults: list[list] = []
        self.large: Files = {}  # by hash
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def add(self, path: str, files: Path | Files, name: str = "main") -> str:
        """Commit these files, or a folder's, to a repository, which is made; returns the hash."""
        if isinstance(files, Path):
            files = {str(f.relative_to(files)): f.read_bytes() for f in files.rglob("*.*")}
        repository = self.repositories.setdefault(path, Repository())
        content = repr((name, len(repository.commits), sorted(files.items())))
        commit = repository.names[name] = hashlib.sha1(content.encode()).hexdigest()
        repository.commits[commit] = repository.files = files
        return commit

    def taken(self) -> list[str]:
        """The requests since the last call; some clients first ask who they are run by."""
        taken, self.requests = self.requests, []
        return [line for line in taken if "agent" not in line]


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.is_cut = False
        place, line = unquote(self.path.partition("?")[0]), f"{self.command} {unquote(self.path)}"
        self.server.requests.append(line)
        for fault in self.server.faults:
            if fault[2] > 0 and re.search(fault[0], line):
                fault[2] -= 1
                if isinstance(fault[1], int):
                    return self.send(fault[1])
                self.is_cut = fault[1] == "cut"
                time.sleep(0 if self.is_cut else 1.5)
        if self.token not in ("", TOKEN, "other"):
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        for pattern, answer in ROUTES.items():
            if found := re.fullmatch(pattern, place):
                return answer(self, **found.groupdict())
        self.send(404)

    do_HEAD = do_POST = do_PUT = do_GET

    def send(self, status: int, body: bytes | object = b"", **headers: str) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers | {"Content_Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.is_cut else body)
        self.close_connection = self.close_connection or self.is_cut

    def refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        self.send(status, X_Error_Code=code, X_Error_Message=message, **headers)

    def find(self, path: str, revision: str, *, is_content: bool) -> tuple[str, Files] | None:
        """The commit and its files, unless this was refused; all may see what a gated one has."""
        repository = self.server.repositories.get(path)
        if repository is None or (repository.is_private and self.token != TOKEN):
            return self.refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if is_content and repository.is_gated and self.token != TOKEN:
            return self.refuse(403 if self.token else 401, "GatedRepo", f"{path} is restricted")
        commit = repository.names.get(revision, revision)
        if commit not in repository.commits:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def resolve(self, path: str, revision: str, name: str) -> None:
        path = path if path.startswith("datasets/") else f"models/{path}"
        if (found := self.find(path, revision, is_content=True)) is None:
            return
        about = {"X_Repo_Commit": found[0]}
        if name not in found[1]:
            return self.refuse(404, "EntryNotFound", "Entry not found", **about)
        content = found[1][name]
        if not name.endswith(LARGE):
            etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            return self.send(200, content, ETag=f'"{etag}"', **about)
        etag = hashlib.sha256(content).hexdigest()
        self.server.large[etag] = content
        about |= {"X_Linked_Etag": f'"{etag}"', "X_Linked_Size": str(len(content))}
        self.send(302, Location=f"http://localhost:{self.server.server_port}/large/{etag}", **about)

    def large(self, oid: str) -> None:
        if self.command == "PUT":
            self.server.large[oid] = self.body
            return self.send(200)
        content = self.server.large[oid]
        start = int(re.match(r"bytes=(\d+)", self.headers.get("Range", "bytes=0"))[1])
        reach = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send(206 if start else 200, content[start:], Content_Range=reach)

    def info(self, path: str, revision: str | None) -> None:
        if found := self.find(path, revision or "main", is_content=False):
            siblings = [{"rfilename": name} for name in found[1]]
            about = {"id": path.split("/", 1)[1], "sha": found[0], "siblings": siblings}
            self.send(200, about | {"private": False, "gated": False, "tags": []})

    def tree(self, path: str, revision: str, folder: str | None) -> None:
        if found := self.find(path, revision, is_content=False):
            files = {n: text for n, text in found[1].items() if n.startswith(folder or "")}
            if not files:
                return self.refuse(404, "EntryNotFound", "no such folder", X_Repo_Commit=found[0])
            about = {"type": "file", "oid": "0" * 40}
            self.send(200, [about | {"path": n, "size": len(files[n])} for n in files])

    def create(self) -> None:
        asked = json.loads(self.body)
        path = f"models/{asked['organization']}/{asked['name']}"
        if path in self.server.repositories:
            return self.send(409, {"url": f"{self.server.address}/{path}"})
        self.server.add(path, {".gitattributes": b""})
        self.server.repositories[path].is_private = asked["visibility"] == "private"
        self.send(200, {"url": f"{self.server.address}/{path}"})

    def validate(self) -> None:
        metadata = json.loads(self.body)["content"].split("---")[1]
        # owner/name:configuration
        errors = [{"message": line} for line in re.findall(r"^- \S+/\S+:", metadata, re.M)]
        self.send(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, path: str, revision: str) -> None:
        names = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {n: "lfs" if n.endswith(LARGE) else "regular" for n in names}
        files = [{"path": n, "uploadMode": modes[n], "shouldIgnore": False} for n in names]
        self.send(200, {"files": files})

    def batch(self, path: str) -> None:
        objects = json.loads(self.body)["objects"]
        for each in (each for each in objects if each["oid"] not in self.server.large):
            each["actions"] = {"upload": {"href": f"{self.server.address}/large/{each['oid']}"}}
        self.send(200, {"transfer": "basic", "objects": objects})

    def push(self, path: str, revision: str) -> None:
        files = dict(self.server.repositories[path].files)
        for line in map(json.loads, self.body.splitlines()):
            match line:
                case {"key": "file", "value": {"path": name, "content": text}}:
                    files[name] = base64.b64decode(text)
                case {"key": "lfsFile", "value": {"path": name, "oid": oid}}:
                    files[name] = self.server.large[oid]
                case {"key": "deletedFile", "value": {"path": name}}:
                    del files[name]
        commit = self.server.add(path, files, revision)
        self.send(200, {"commitOid": commit, "commitUrl": f"{self.server.address}/{path}"})

    def log_message(self, *_: object) -> None:
        """What was asked stands in `requests`."""


REPOSITORY, REVISION = "/api/(?P<path>(models|datasets)/[^/]+/[^/]+)", "(?P<revision>[^/]+)"
ROUTES = {
    rf"/(?P<path>(datasets/)?[^/]+/[^/]+)/resolve/{REVISION}/(?P<name>.+)": Answer.resolve,
    r"/large/(?P<oid>\w+)": Answer.large,
    rf"{REPOSITORY}(/revision/{REVISION})?": Answer.info,
    rf"{REPOSITORY}/tree/{REVISION}(/(?P<folder>.+))?": Answer.tree,
    "/api/repos/create": Answer.create,
    "/api/validate-yaml": Answer.validate,
    rf"{REPOSITORY}/preupload/{REVISION}": Answer.preupload,
    r"/(?P<path>[^/]+/[^/]+)\.git/info/lfs/objects/batch": Answer.batch,
    rf"{REPOSITORY}/commit/{REVISION}": Answer.push,
}
