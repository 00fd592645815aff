"""Open a bundle folder that anyone may have written or damaged. Stdlib only.

What is true of an opened bundle: its manifest was read strictly; every listed file is there as a regular file of the
listed size (and sha256); nothing inside is reached through a link; and the folders of the bundle hold no other file,
since a stray one could be taken for weights or for a tokenizer setting. The check is made once, at opening: a process
that may write to the folder can still change a file afterwards, so keep bundles where only trusted users can write.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from draftc.runtime.errors import BundleError
from draftc.runtime.manifest import AGAIN, MANIFEST_NAME, Manifest, parse
from draftc.runtime.rules import is_relative_path

__all__ = ["MAX_MANIFEST_BYTES", "Bundle", "list_files", "open_bundle", "sha256_files"]

MAX_MANIFEST_BYTES = 16 * 2**20  # a target of 100 layers takes about 0.1 MiB


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder (absolute, links resolved) and its manifest."""

    root: Path
    manifest: Manifest

    def path(self, relative: str) -> Path:
        """The path of something inside the bundle, which need not exist.

        Raises BundleError when `relative` could leave the folder, or when a component of it is a link.
        """
        if not is_relative_path(relative):
            raise BundleError(f"{_shown(relative)}: not a path inside the bundle")
        path = self.root
        for part in relative.split("/"):
            path = path / part
            if path.is_symlink():
                raise BundleError(f"{_shown(relative)}: a link inside a bundle is refused: {AGAIN}")
        return path


def open_bundle(path: str | Path, *, hashes: bool = True) -> Bundle:
    """Check the bundle in the folder `path` and return it.

    `hashes=False` leaves out the sha256 comparison (it reads every byte once). Raises BundleVersionError when a newer
    draftc made it, otherwise BundleError naming the file and what is wrong with it.
    """
    try:
        root = Path(path)
        if not root.is_dir():
            problem = "not a folder" if root.exists() else "no such folder"
            raise BundleError(f"{_shown(str(path))}: {problem}: name the output folder of `draftc compile`")
        root = root.resolve()
        manifest = parse(_read_manifest(root))
        _check_files(root, manifest, hashes)
    except OSError as error:
        raise BundleError(f"{_shown(str(error.filename or path))}: cannot be read ({error.strerror})") from error
    return Bundle(root, manifest)


def list_files(root: Path, names: Iterable[str]) -> dict[str, int]:
    """Relative path → size of every file at or below the entries `names` of `root`; names that don't exist are skipped.

    Raises BundleError for a link or anything else that is neither a file nor a folder: no link is ever followed.
    """
    found: dict[str, int] = {}
    pending = list(names)
    while pending:
        relative = pending.pop()
        try:
            status = os.lstat(root / relative)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode):
            pending.extend(f"{relative}/{name}" for name in os.listdir(root / relative))
        elif stat.S_ISREG(status.st_mode):
            found[relative] = status.st_size
        elif stat.S_ISLNK(status.st_mode):
            raise BundleError(f"{_shown(relative)}: a link inside a bundle is refused: {AGAIN}")
        else:
            raise BundleError(f"{_shown(relative)}: neither a file nor a folder: {AGAIN}")
    return found


def sha256_files(root: Path, paths: Sequence[str]) -> list[str]:
    """sha256, in hexadecimal, of each file; a few at a time, since hashing releases the interpreter lock."""
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    try:
        return list(pool.map(lambda path: _sha256(root / path), paths))
    finally:
        pool.shutdown(cancel_futures=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(root: Path) -> str:
    size = list_files(root, [MANIFEST_NAME]).get(MANIFEST_NAME)
    if size is None:
        raise BundleError(f"{_shown(str(root))}: no {MANIFEST_NAME} in it: name the output folder of `draftc compile`")
    if size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{MANIFEST_NAME}: {size} bytes, at most {MAX_MANIFEST_BYTES} are read: {AGAIN}")
    try:
        return (root / MANIFEST_NAME).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{MANIFEST_NAME}: not UTF-8 at byte {error.start}: {AGAIN}") from error


def _check_files(root: Path, manifest: Manifest, hashes: bool) -> None:
    folders = {"target", "draft", *(entry.path.split("/")[0] for entry in manifest.files)}
    found = list_files(root, folders)
    for entry in manifest.files:
        if entry.path not in found:
            raise BundleError(f"{entry.path}: missing from the bundle: {AGAIN}")
        if found[entry.path] != entry.size:
            raise BundleError(
                f"{entry.path}: has {found[entry.path]} bytes, {MANIFEST_NAME} says {entry.size}: {AGAIN}"
            )
    strays = sorted(found.keys() - {entry.path for entry in manifest.files})
    if strays:
        raise BundleError(f"{_shown(strays[0])}: not listed in {MANIFEST_NAME}: remove it, or {AGAIN}")
    if hashes:
        digests = sha256_files(root, [entry.path for entry in manifest.files])
        for entry, digest in zip(manifest.files, digests, strict=True):
            if digest != entry.sha256:
                raise BundleError(f"{entry.path}: its sha256 is not the one in {MANIFEST_NAME}: {AGAIN}")


def _shown(name: str) -> str:
    """A file name on one line: a hostile one may hold anything but `/` and NUL."""
    return name if name.isprintable() else ascii(name)
