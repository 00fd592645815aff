"""llama.cpp's llama-server as a child of peer_worker.py."""

import atexit
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Server", "serve"]

MODES = {
    # kind: (option of the kind, option that takes its number)
    "ngram": ("ngram-simple", "--spec-ngram-simple-size-m"),
    "draft": ("draft-simple", "--spec-draft-n-max"),
}


@dataclass(frozen=True)
class Server:
    process: "subprocess.Popen[bytes]"
    port: int
    version: str

    def complete(self, ids: list[int], count: int, *, ignore_eos: bool) -> dict[str, Any]:
        """The server's answer to one greedy completion of token ids, nothing cached before."""
        request = {"prompt": ids, "n_predict": count, "temperature": 0, "samplers": ["top_k"], "top_k": 1}
        request |= {"cache_prompt": False, "return_tokens": True, "ignore_eos": ignore_eos}
        return self.ask("POST", "/completion", request)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise OSError(f"llama-server answers {response.status}: {answer}")
        return answer


def serve(config: dict[str, Any], kind: str, number: int) -> Server:
    """Start the server and wait until it has loaded its models. Raises OSError when it ends before."""
    binary = config["binary"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(config["threads"])
    command = [binary, "-m", config["model"], "-c", "4096", "-np", "1", "-t", threads, "-tb", threads]
    command += ["--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0"]
    if kind != "plain":
        name, option = MODES[kind]
        command += ["--spec-type", name]
        if kind == "draft":
            command += ["-md", config["draft"], "--spec-draft-threads", threads]
        if number:
            command += [option, str(number)]
        if kind == "ngram" and number:
            command += ["--spec-ngram-simple-size-n", "3"]
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.+)", told.stdout + told.stderr)
    process = subprocess.Popen(command, stdout=2, stderr=2)
    atexit.register(os.kill, process.pid, signal.SIGKILL)
    server = Server(process, port, found.group(1) if found else "unknown")
    while process.poll() is None:
        try:
            server.ask("GET", "/health")
        except OSError:  # not listening yet, or still loading
            time.sleep(0.1)
        else:
            return server
    raise OSError(f"llama-server ended with {process.returncode} while loading: see its lines above")
