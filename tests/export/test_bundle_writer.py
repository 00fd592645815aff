"""The output path holds either what it held before or the whole new bundle, whatever goes wrong and when."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from draftc.export.bundle_writer import BundleWriter, utc_now
from draftc.runtime.bundle import open_bundle
from draftc.runtime.errors import BundleError, DraftcError, ResourceError
from draftc.runtime.manifest import Manifest, parse

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """The documented example without its table, as `compile` hands it over."""
    text = (ROOT / "docs" / "bundle-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    return replace(parse(block), files=(), created=utc_now())


def fill(folder: Path, graph: bytes = b"graph") -> None:
    (folder / "target").mkdir()
    (folder / "target" / "model.onnx").write_bytes(graph)
    (folder / "target" / "model.onnx.data").write_bytes(b"\1" * 100_000)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")


def nothing(folder: Path) -> None:
    pass


def raising(error: BaseException) -> Callable[[Path], None]:
    def fail(folder: Path) -> None:
        raise error

    return fail


def compile_to(
    out: Path | str,
    manifest: Manifest,
    graph: bytes = b"graph",
    force: bool = False,
    midway: Callable[[Path], None] = nothing,
) -> Manifest:
    """Write a bundle; `midway` is called with the unfinished folder."""
    with BundleWriter(out, force=force) as writer:
        fill(writer.folder, graph)
        midway(writer.folder)
        return writer.finish(manifest)


def graph_in(out: Path) -> bytes:
    """The graph of the bundle in `out`, which must open with all hashes right."""
    return open_bundle(out).path("target/model.onnx").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def stopped_in(folder: Path, action: str) -> int:
    """Run a compile to folder/out in another process that kills itself at `action`; return its pid."""
    program = f"""
        import os, signal
        from pathlib import Path
        from draftc.export.bundle_writer import BundleWriter
        from draftc.runtime.manifest import parse

        def end():
            os.kill(os.getpid(), signal.SIGKILL)

        rename = os.rename
        def rename_once(old, new):
            rename(old, new)
            end()

        manifest = parse(Path({str(folder / "manifest.json")!r}).read_text())
        with BundleWriter({str(folder / "out")!r}, force=True) as writer:
            for name in ("target/model.onnx", "tokenizer/tokenizer.json"):
                (writer.folder / name).parent.mkdir(exist_ok=True)
                (writer.folder / name).write_text("other")
            {action}
            writer.finish(manifest)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    assert process.wait(timeout=60) == -signal.SIGKILL
    return process.pid


def test_writes_a_bundle_that_opens(tmp_path: Path, manifest: Manifest) -> None:
    written = compile_to(tmp_path / "out", manifest)
    assert open_bundle(tmp_path / "out").manifest == written
    assert [(entry.path, entry.size) for entry in written.files] == [
        ("target/model.onnx", 5),
        ("target/model.onnx.data", 100_000),
        ("tokenizer/tokenizer.json", 2),
    ]
    assert names(tmp_path) == ["out"]
    assert replace(written, files=()) == manifest


def test_the_bundle_has_the_permissions_of_an_ordinary_folder(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "ordinary").mkdir()
    compile_to(tmp_path / "out", manifest)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


def test_nothing_is_at_the_output_while_writing(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    with BundleWriter(out) as writer:
        assert writer.folder.parent == tmp_path  # the same file system, so that a rename is enough
        assert not out.exists()
        fill(writer.folder)
        assert not out.exists()
        writer.finish(manifest)
        assert out.exists()


def test_parents_are_made_and_removed_again_on_failure(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(KeyError), BundleWriter(tmp_path / "a" / "b" / "out"):
        raise KeyError
    assert names(tmp_path) == []
    compile_to(tmp_path / "a" / "b" / "out", manifest)
    assert names(tmp_path / "a" / "b") == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(1), DraftcError("refused")])
@pytest.mark.parametrize("before", ["absent", "empty", "bundle"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, manifest: Manifest, error: BaseException, before: str) -> None:
    out = tmp_path / "out"
    if before == "bundle":
        compile_to(out, manifest, b"old")
    elif before == "empty":
        out.mkdir()
    with pytest.raises(type(error)) as caught:
        compile_to(out, manifest, force=True, midway=raising(error))
    assert caught.value is error
    assert names(tmp_path) == ([] if before == "absent" else ["out"])
    if before == "bundle":
        assert graph_in(out) == b"old"


def test_leaving_without_finish_writes_nothing(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        fill(writer.folder)
    assert names(tmp_path) == []


def test_an_empty_folder_is_filled(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "out").mkdir()
    compile_to(tmp_path / "out", manifest)
    assert graph_in(tmp_path / "out") == b"graph"


def test_force_replaces_a_bundle_and_only_then(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    compile_to(out, manifest, b"old")
    (out / "profile.json").write_text("{}")
    with pytest.raises(ResourceError, match=r"not empty: pass --force"):
        compile_to(out, manifest)
    assert graph_in(out) == b"old"
    compile_to(out, manifest, b"new", force=True)
    assert graph_in(out) == b"new"
    assert not (out / "profile.json").exists()  # it was measured on the old one
    assert names(tmp_path) == ["out"]


def test_force_replaces_a_damaged_bundle(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    compile_to(out, manifest)
    (out / "target" / "model.onnx").unlink()
    os.truncate(out / "bundle.json", 300)
    compile_to(out, manifest, b"new", force=True)
    assert graph_in(out) == b"new"


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path, force: bool) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    with pytest.raises(ResourceError, match=r"not empty and not a bundle" if force else r"--force"):
        BundleWriter(home, force=force).__enter__()
    (home / "bundle.json").write_text('{"name": "a web page"}')  # other programs use that name
    with pytest.raises(ResourceError, match=r"not empty and not a bundle" if force else r"--force"):
        BundleWriter(home, force=force).__enter__()
    assert names(home) == ["bundle.json", "thesis.tex"]
    assert names(tmp_path) == ["home"]


def test_outputs_that_can_not_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out, message in [
        (tmp_path / "file", "exists and is not a folder"),
        (tmp_path / "file" / "out", "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written"),
        (Path("/"), "root of a disk"),
        (Path("/proc"), "cannot be written|mount point"),
        (Path("/proc/draftc-out"), "cannot be written"),
    ]:
        with pytest.raises(ResourceError, match=message) as caught, BundleWriter(out, force=True):
            pass
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["file"]


def test_a_link_to_the_output_is_followed_once(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "bundle")
    compile_to(tmp_path / "out", manifest)
    assert (tmp_path / "out").is_symlink()
    assert graph_in(tmp_path / "disk" / "bundle") == b"graph"
    assert names(tmp_path) == ["disk", "out"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path: Path, manifest: Manifest, error: Exception) -> None:
    with pytest.raises(ResourceError, match="the disk is full: free some space") as caught:
        compile_to(tmp_path / "out", manifest, midway=raising(error))
    assert caught.value.__cause__ is error
    assert names(tmp_path) == []


def test_a_file_that_outgrows_a_limit_is_a_full_disk(tmp_path: Path) -> None:
    """A real write that the system refuses half-way."""
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(ResourceError, match="the disk is full"), BundleWriter(tmp_path / "out") as writer:
            fill(writer.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert names(tmp_path) == []


def test_only_errors_about_the_output_are_translated(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be written"), BundleWriter(tmp_path / "out") as writer:
        raise PermissionError(errno.EACCES, "Permission denied", str(writer.folder / "target" / "model.onnx"))
    with pytest.raises(PermissionError), BundleWriter(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "checkpoint" / "model.safetensors"))


def test_a_bundle_that_the_runtime_would_refuse_is_not_published(tmp_path: Path, manifest: Manifest) -> None:
    def no_graph(folder: Path) -> None:
        (folder / "target" / "model.onnx").unlink()

    def link(folder: Path) -> None:
        (folder / "tokenizer" / "merges.txt").symlink_to("/etc/hostname")

    cases: list[tuple[Callable[[Path], None], str]] = [
        (no_graph, r'target\.graph: "target/model\.onnx" is not listed'),
        (link, "merges.txt: a link"),
    ]
    for spoil, message in cases:
        with pytest.raises(BundleError, match=message):
            compile_to(tmp_path / "out", manifest, midway=spoil)
        assert names(tmp_path) == []


def test_an_output_that_appeared_meanwhile_is_kept(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"

    def somebody(_: Path) -> None:
        out.mkdir()
        (out / "mine").write_text("")

    with pytest.raises(ResourceError, match="--force"):
        compile_to(out, manifest, midway=somebody)
    assert names(tmp_path) == ["out"]
    assert names(out) == ["mine"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("function", ["rename", "fsync"])
@pytest.mark.parametrize("before", [False, True], ids=["absent", "bundle"])
@pytest.mark.parametrize("after", [False, True], ids=["instead", "afterwards"])
def test_a_failure_at_any_step_of_publishing(
    tmp_path: Path,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    error: BaseException,
    before: bool,
    after: bool,
) -> None:
    """Fail at the first, second, … call of `function`: the output is whole, old or new, and nothing else is left."""
    real = getattr(os, function)
    for step in range(100):
        folder = tmp_path / str(step)
        if before:
            compile_to(folder / "out", manifest, b"old")
        calls = 0

        def failing(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 == step:  # noqa: B023
                if after:
                    real(*args)
                raise error
            return real(*args)

        monkeypatch.setattr(os, function, failing)
        try:
            compile_to(folder / "out", manifest, b"new", force=True)
        except (OSError, ResourceError, KeyboardInterrupt):
            failed = True
        else:
            failed = False
        monkeypatch.undo()
        if (folder / "out").exists():
            assert graph_in(folder / "out") in ((b"old", b"new") if before else (b"new",))
            assert names(folder) == ["out"]
        else:
            assert not before
            assert not folder.exists()
        if not failed:
            assert step >= 1
            return
    pytest.fail("never got through")


def test_an_old_bundle_that_cannot_be_put_back_is_kept(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_to(tmp_path / "out", manifest, b"old")
    real, calls = os.rename, 0

    def failing(old: Path, new: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.EIO, "Input/output error")
        real(old, new)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        compile_to(tmp_path / "out", manifest, b"new", force=True)
    (left,) = names(tmp_path)
    assert left.endswith(".old")
    assert graph_in(tmp_path / left) == b"old"


def test_what_a_killed_process_left_is_cleared(tmp_path: Path, manifest: Manifest) -> None:
    written = compile_to(tmp_path / "out", manifest, b"old")
    (tmp_path / "manifest.json").write_text((tmp_path / "out" / "bundle.json").read_text())
    pid = stopped_in(tmp_path, "end()")
    (left,) = (name for name in names(tmp_path) if name.startswith("."))
    assert re.fullmatch(rf"\.out\.draftc-[0-9a-f]{{6}}-{pid}-[0-9a-f]{{8}}", left)
    alive = left.replace(f"-{pid}-", f"-{os.getppid()}-")
    other_output = left.replace(".out.", ".out2.")
    other_host = re.sub(r"draftc-[0-9a-f]{6}", "draftc-zzzzzz", left)
    for name in (alive, other_output, other_host):
        (tmp_path / name).mkdir()
    assert open_bundle(tmp_path / "out").manifest == written
    compile_to(tmp_path / "out", manifest, b"new", force=True)
    assert names(tmp_path) == sorted([alive, other_output, other_host, "manifest.json", "out"])


def test_a_process_killed_between_the_renames_loses_nothing(tmp_path: Path, manifest: Manifest) -> None:
    compile_to(tmp_path / "out", manifest, b"old")
    (tmp_path / "manifest.json").write_text((tmp_path / "out" / "bundle.json").read_text())
    stopped_in(tmp_path, "os.rename = rename_once")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ResourceError, match="--force"):
        compile_to(tmp_path / "out", manifest)
    assert graph_in(tmp_path / "out") == b"old"
    assert names(tmp_path) == ["manifest.json", "out"]


def test_utc_now_is_now() -> None:
    then = datetime.fromisoformat(utc_now())
    assert then.tzinfo == UTC
    assert abs((datetime.now(UTC) - then).total_seconds()) < 60
