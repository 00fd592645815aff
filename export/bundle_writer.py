"""Write a bundle so that the output path holds either what it held before or the whole new bundle.

Everything goes into a hidden folder next to the output, is checked as the runtime will check it, flushed to the disk,
and moved into place by a rename. A failure, Ctrl-C, and a SIGTERM to the command remove the hidden folder. What ends
the process outright (a SIGKILL, a power cut) leaves it behind; the next compile to the same output on the same machine
removes it, and first puts an old bundle back that was just being replaced.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from draftc.runtime.bundle import list_files, open_bundle, sha256_files
from draftc.runtime.errors import ResourceError
from draftc.runtime.manifest import MANIFEST_NAME, PROFILE_NAME, FileEntry, Manifest, to_json

__all__ = ["BundleWriter", "utc_now"]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OLD = ".old"  # suffix of the hidden folder that holds the replaced bundle between the two renames


def utc_now() -> str:
    """The time now, as `Manifest.created` spells it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class BundleWriter:
    """Fill `writer.folder`, then call `finish`; leaving the block without it removes what was written.

        with BundleWriter("out") as writer:
            save_graph(writer.folder / "target" / "model.onnx")
            manifest = writer.finish(manifest)

    Entering raises ResourceError when `out` cannot become the bundle: it is a file, it is not empty (`force` replaces
    a bundle, and nothing but a bundle), or its parent cannot be written. A full or read-only disk inside the block is
    raised as ResourceError too; every other exception passes through.
    """

    def __init__(self, out: str | Path, *, force: bool = False) -> None:
        self.out = Path(os.path.realpath(out))
        self.force = force
        if not self.out.name:
            raise ResourceError(f"{self.out}: the root of a disk cannot be a bundle: name a folder in it")
        host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]  # a pid means something on one host only
        self._prefix = f".{self.out.name}.draftc-{host}-"
        self.folder = self.out.with_name(f"{self._prefix}{os.getpid()}-{secrets.token_hex(4)}")
        self._old = self.folder.with_name(self.folder.name + OLD)
        self._made_parents: list[Path] = []

    def __enter__(self) -> Self:
        try:
            self._make_parents()
            self._recover()
            self._check_output()
            self.folder.mkdir()  # not mkdtemp: that would leave the bundle readable to its owner only
        except OSError as error:
            self._remove()
            raise self._unwritable(error) from error
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        if isinstance(error, OSError) and (error.errno in DISK_FULL or self._is_ours(error)):
            raise self._unwritable(error) from error
        # safetensors, onnx and torch write from C++ or Rust, and tell of a full disk in exceptions of their own.
        if error is not None and os.strerror(errno.ENOSPC) in str(error):
            raise self._unwritable(OSError(errno.ENOSPC, "")) from error

    def finish(self, manifest: Manifest) -> Manifest:
        """Complete the bundle and move it to `out`; return `manifest` with its files table filled in.

        Raises BundleError, and publishes nothing, when the runtime would refuse the bundle: the graph that the
        manifest names was not written, or a link is among the files.
        """
        sizes = list_files(self.folder, os.listdir(self.folder))
        paths = sorted(sizes.keys() - {MANIFEST_NAME, PROFILE_NAME})
        digests = sha256_files(self.folder, paths)
        table = tuple(
            FileEntry(path=path, size=sizes[path], sha256=digest) for path, digest in zip(paths, digests, strict=True)
        )
        complete = replace(manifest, files=table)
        (self.folder / MANIFEST_NAME).write_text(to_json(complete), encoding="utf-8", newline="\n")
        open_bundle(self.folder, hashes=False)
        for folder, _, names in os.walk(self.folder):
            for path in (*(os.path.join(folder, name) for name in names), folder):
                _flush(path)
        self._check_output()  # compiling takes minutes: somebody may have written there meanwhile
        self._publish()
        return complete

    def _publish(self) -> None:
        try:
            if os.path.exists(self.out):
                os.rename(self.out, self._old)
            os.rename(self.folder, self.out)
        except BaseException:
            if os.path.exists(self._old) and not os.path.exists(self.out):
                os.rename(self._old, self.out)
            raise
        self._made_parents.clear()
        _flush(self.out.parent)

    def _check_output(self) -> None:
        """Raise ResourceError unless `out` is absent, an empty folder, or a bundle that `force` allows to replace."""
        out = self.out
        if not os.path.exists(out):
            return
        if not out.is_dir():
            raise ResourceError(f"{out}: exists and is not a folder: name another output")
        if os.path.ismount(out):
            raise ResourceError(f"{out}: a mount point cannot be replaced: name a folder in it")
        if not any(out.iterdir()):
            return
        if not self.force:
            raise ResourceError(f"{out}: not empty: pass --force to replace a bundle, or name another output")
        if not _is_bundle(out):
            raise ResourceError(
                f"{out}: not empty and not a bundle (no {MANIFEST_NAME} of draftc): --force replaces nothing else; "
                "name another output"
            )

    def _make_parents(self) -> None:
        parent = self.out.parent
        while not parent.exists():
            self._made_parents.append(parent)
            parent = parent.parent
        self.out.parent.mkdir(parents=True, exist_ok=True)

    def _recover(self) -> None:
        """Clear up after earlier compiles to the same output whose process is gone."""
        pattern = re.compile(re.escape(self._prefix) + r"(\d{1,9})-[0-9a-f]{8}(" + re.escape(OLD) + ")?")
        for entry in self.out.parent.iterdir():
            match = pattern.fullmatch(entry.name)
            if not match or _is_alive(int(match[1])):
                continue
            if match[2] and not os.path.exists(self.out):
                os.rename(entry, self.out)
            else:
                shutil.rmtree(entry, ignore_errors=True)

    def _remove(self) -> None:
        """Remove what is left of this run. What cannot be removed now, the next run removes: an error here would
        only hide the one that led here.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        if os.path.exists(self.out):
            shutil.rmtree(self._old, ignore_errors=True)
        for parent in self._made_parents:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()

    def _is_ours(self, error: OSError) -> bool:
        """Whether `error` is about the output. A source that cannot be read is not for this class to explain."""
        name = error.filename
        return isinstance(name, str | os.PathLike) and any(
            Path(name).is_relative_to(folder) for folder in (self.folder, self.out)
        )

    def _unwritable(self, error: OSError) -> ResourceError:
        if error.errno in DISK_FULL:
            return ResourceError(f"{self.out}: the disk is full: free some space, or name an output on another disk")
        return ResourceError(f"{self.out}: cannot be written ({error.strerror}): name another output")


def _is_bundle(folder: Path) -> bool:
    """Whether bundle.json is draftc's, as far as a damaged one can tell; other programs use that name too."""
    path = folder / MANIFEST_NAME
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"draftc_version"' in file.read(4096)


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # os.kill would end that process; its leftovers stay
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(path: str | Path) -> None:
    """Write what the system holds of a file, or of a folder's entries, to the disk."""
    if os.name == "nt":  # no folder can be opened there, and no file flushed that is open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
