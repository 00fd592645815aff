"""Building an engine in a process of its own.

The builder takes about three times the engine's size. Apart from the compiler, none of that is added to what the
compiler still holds, all of it is given back, and a crash of the builder ends as an error with one line.

    parent → child   the arguments of `tensorrt.build_engine`, pickled, on standard input
    child → parent   ("progress", (done, total)) …, then ("built", Built) or ("error", DraftcError), pickled, on
                     standard output; whatever libraries print goes to standard error
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from draftc.export.tensorrt import Built, Flavour, Progress, build_engine
from draftc.runtime.errors import DraftcError, ResourceError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.records import Profile

__all__ = ["build_engine_apart"]


def build_engine_apart(
    flavour: Flavour,
    graph: Path,
    spec: GraphSpec,
    profiles: tuple[Profile, ...],
    sms: tuple[str, ...],
    engine: Path,
    log: Path,
    progress: Progress,
) -> Built:
    """`tensorrt.build_engine` in a process that lives as long as the build.

    Raises what that raises, and ResourceError when the process dies. An interrupt, and whatever `progress` raises, end
    it.
    """
    command = [sys.executable, "-P", "-m", "draftc.export.engine_process"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump((flavour, graph, spec, profiles, sms, engine, log), child.stdin)
            child.stdin.flush()  # and not closed: its end tells the child that this process is gone
            while True:
                kind, value = pickle.load(child.stdout)
                if kind == "progress":
                    progress(*value)
                elif kind == "error":
                    raise value
                else:
                    built: Built = value
                    return built
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise ResourceError(f"{flavour}'s builder {_end(child.wait(), errors)}") from None
        finally:
            child.kill()  # no harm where it has ended by itself
            with suppress(BrokenPipeError):  # of what it was not there to read
                child.stdin.close()


def _end(code: int, errors: IO[bytes]) -> str:
    """How the process ended, with the last line that it printed."""
    if code == -signal.SIGKILL:
        return "was killed, most likely for lack of memory: it needs about three times the engine's size"
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{how} ({said[:200]}): compile with --backend onnxruntime, and please report the model"


def _end_with_parent() -> None:
    """End as soon as nobody waits for the engine: standard input ends when the parent is closed, killed or gone."""
    sys.stdin.buffer.read()
    os._exit(1)


def _serve() -> None:
    """The child: one build."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def tell(kind: str, value: Any) -> None:
            pickle.dump((kind, value), out)
            out.flush()

        flavour, graph, spec, profiles, sms, engine, log = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()

        def progress(done: int, total: int) -> None:
            tell("progress", (done, total))

        try:
            built = build_engine(flavour, graph, spec, profiles, sms, engine, log, progress)
        except DraftcError as error:
            tell("error", error)
        else:
            tell("built", built)


if __name__ == "__main__":
    _serve()
