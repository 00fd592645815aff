"""Hub ids against a small hub of our own on this machine; each scenario runs in a process with its own environment."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from draftc.export.hub import parse_hub_id
from tests.export.tiny_models import save_folder, tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCENARIO = """
import json, sys
from draftc.export.checkpoint import load, peek, resolve
from draftc.runtime.errors import DraftcError
out = {}
for name in sys.argv[1:]:
    try:
        info = peek(resolve(name))
        out[name] = {"parameters": info.parameters, "bytes": info.weight_bytes, "commit": info.source.commit}
        out[name]["before"] = sorted(path.name for path in info.source.location.iterdir())
        out[name]["fingerprint"] = load(info).fingerprint
    except DraftcError as error:
        out[name] = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Serves org/tiny from a folder; org/gated, and nothing else."""

    folder: ClassVar[Path]
    requests: ClassVar[list[str]]

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "org/gated" in path:
            return self.answer(403, headers={"X-Error-Code": "GatedRepo"})
        if "org/tiny" not in path:
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        if "other-revision" in path:
            return self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        files = sorted(self.folder.iterdir())
        if path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
            return self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/models/org/tiny"):
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]}
            return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        name = path.rsplit("/", 1)[-1]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'}
        if not (self.folder / name).is_file():
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound", **headers})
        if self.command == "GET":
            self.requests.append(name + (" (range)" if "Range" in self.headers else ""))
        content = (self.folder / name).read_bytes()
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return self.answer(206, content[start : end + 1], headers)
        return self.answer(200, content, headers)

    do_HEAD = do_GET  # noqa: N815 (http.server's name)

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a hub that serves one tiny model, beside files that must not be asked for."""
    folder = tmp_path_factory.mktemp("hub")
    save_folder(folder, tiny_model())
    for name in ("pytorch_model.bin", "modeling_own.py", "training.pt"):
        (folder / name).write_bytes(b"never fetch this")
    FakeHub.folder, FakeHub.requests = folder, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(home: Path, endpoint: str, *names: str, offline: str = "0") -> dict[str, dict[str, Any]]:
    """Run SCENARIO over `names` in a fresh process that uses `home` as its cache."""
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": offline, "NO_PROXY": "127.0.0.1"}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCENARIO, *names]
    result = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answers: dict[str, dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def online(hub: str, cache: Path) -> dict[str, dict[str, Any]]:
    return run(cache, hub, "org/tiny", "org/gated", "org/nothing", "org/tiny@other-revision")


def test_sizes_are_known_before_any_weights_are_downloaded(online: dict[str, dict[str, Any]]) -> None:
    model = tiny_model()
    answer = online["org/tiny"]
    assert answer["parameters"] == sum(value.numel() for value in model.parameters())
    assert answer["bytes"] == 4 * sum(value.numel() for value in model.parameters())
    assert "config.json" in answer["before"]
    assert "model.safetensors" not in answer["before"]
    assert answer["commit"] == COMMIT


def test_only_files_that_cannot_run_code_are_asked_for(online: dict[str, dict[str, Any]]) -> None:
    assert "fingerprint" in online["org/tiny"]
    asked = set(FakeHub.requests)
    assert {"config.json", "tokenizer.json", "model.safetensors", "model.safetensors (range)"} <= asked
    assert not {name for name in asked if name.split()[0].endswith((".bin", ".py", ".pt"))}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/gated", r"hub model 'org/gated' is gated; accept its terms"),
        (
            "org/nothing",
            r"hub model 'org/nothing' does not exist or is private, and there is no such folder here; check",
        ),
        ("org/tiny@other-revision", r"hub model 'org/tiny' has no such revision"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line(online: dict[str, dict[str, Any]], name: str, message: str) -> None:
    assert online[name]["error"] == "CheckpointError"
    assert re.match(message, online[name]["message"])
    assert "\n" not in online[name]["message"]


def test_offline_uses_the_cache_and_says_so_when_it_is_not_there(
    hub: str, cache: Path, online: dict[str, dict[str, Any]]
) -> None:
    before = len(FakeHub.requests)
    answers = run(cache, hub, "org/tiny", "org/other", offline="1")
    assert answers["org/tiny"]["fingerprint"] == online["org/tiny"]["fingerprint"]
    assert answers["org/other"]["error"] == "CheckpointError"
    expected = (
        r"hub model 'org/other' is not complete in the cache .* and HF_HUB_OFFLINE is set; unset it, or pass a local"
    )
    assert re.match(expected, answers["org/other"]["message"])
    assert len(FakeHub.requests) == before


def test_an_unreachable_hub_uses_the_cache_and_names_the_ways_out(
    cache: Path, online: dict[str, dict[str, Any]]
) -> None:
    answers = run(cache, "http://127.0.0.1:9", "org/tiny", "org/other")  # nothing listens on the discard port
    assert answers["org/tiny"]["fingerprint"] == online["org/tiny"]["fingerprint"]
    message = answers["org/other"]["message"]
    assert message.startswith("hub model 'org/other' cannot be fetched from http://127.0.0.1:9 ")
    assert all(way in message for way in ("check the connection", "HF_ENDPOINT", "local folder"))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None)),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", ("Qwen/Qwen2.5-Coder-1.5B-Instruct", None)),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("name", None),
        ("a/b/c", None),
        ("../name", None),
        ("org/", None),
        ("/abs/path", None),
        ("org/na me", None),
        ("https://host/org/name", None),
    ],
)
def test_hub_ids_are_one_organisation_and_one_name(text: str, expected: tuple[str, str | None] | None) -> None:
    assert parse_hub_id(text) == expected
