"""Which `profile.json` fits a session: the bundle's own, or the one that this user's cache keeps for the machine."""

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from draftc.runtime.costs import CostProfile, MachineId, fingerprint_graphs, parse_costs, to_json
from draftc.runtime.devices import DeviceOptions, Role
from draftc.runtime.errors import DraftcError, DraftcWarning, UsageError
from draftc.runtime.folders import cache_folder
from draftc.runtime.machine import backend_version, physical_cores, processor
from draftc.runtime.manifest import PROFILE_NAME, Manifest

if sys.platform != "win32":
    import fcntl

__all__ = ["find_profile", "keep_profile", "kept_profile", "machine_id", "measuring", "write_profile"]

MAX_BYTES = 1 << 20


def machine_id(manifest: Manifest, options: Mapping[Role, DeviceOptions]) -> MachineId:
    """What a profile of this bundle on this machine, with these devices and threads, is known by."""
    threads = {chosen.threads or 0 for chosen in options.values()}
    return MachineId(
        graphs=fingerprint_graphs(manifest),
        backend=backend_version(manifest.backend.name),
        devices={role: chosen.device for role, chosen in options.items()},
        processor=processor(),
        cores=physical_cores(),
        threads=max(threads, default=0),
    )


def find_profile(root: Path, machine: MachineId) -> CostProfile | None:
    """The profile in the bundle `root`, else the cached one, if it fits `machine`.

    One in the bundle that cannot be read, or was measured elsewhere, is ignored with a DraftcWarning.
    """
    own = root / PROFILE_NAME
    if own.exists() or own.is_symlink():
        try:
            costs = _read(own)
        except DraftcError as error:
            _note(f"{own} is ignored ({error}): `draftc tune` measures anew")
        else:
            difference = costs.machine.differs(machine)
            if not difference:
                return costs
            _note(f"{own} is ignored, it was measured with something else ({difference}): `draftc tune` measures anew")
    return kept_profile(machine)


def kept_profile(machine: MachineId) -> CostProfile | None:
    """The one in this user's cache, if it can be read and fits; it would be written again."""
    kept = _cached(machine)
    if kept is None or not os.path.isfile(kept):  # Path.is_file raises where the folder may not be entered
        return None
    try:
        costs = _read(kept)
    except DraftcError:
        return None
    return costs if not costs.machine.differs(machine) else None


@contextlib.contextmanager
def measuring(machine: MachineId) -> Iterator[None]:
    """Keep other processes of this user from measuring the same meanwhile: both would measure each other.

    Where the cache cannot be written, or the system has no such locks, nothing is kept from anybody.
    """
    with contextlib.ExitStack() as stack:
        path = _cached(machine)
        if path is not None and sys.platform != "win32":
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(path.with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def keep_profile(costs: CostProfile) -> None:
    """Keep a profile in this user's cache; where it cannot be written, a DraftcWarning says so."""
    path = _cached(costs.machine)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_profile(path, costs)
    except (OSError, UsageError):
        _note(
            f"what calls cost was measured and cannot be kept in {path.parent}, so each opening will measure again: "
            "make that folder writable, set XDG_CACHE_HOME, or put a profile into the bundle with `draftc tune`"
        )


def write_profile(path: Path, costs: CostProfile) -> None:
    """Write `costs` to `path`, whole or not at all. Raises UsageError where it cannot be written."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(to_json(costs))
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: make the folder writable") from error


def _read(path: Path) -> CostProfile:
    """Raises UsageError or BundleVersionError."""
    try:
        if path.is_symlink() or not path.is_file():
            raise UsageError("it is not a regular file")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"it has {path.stat().st_size} bytes, at most {MAX_BYTES} are read")
        return parse_costs(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"it is not UTF-8 at byte {error.start}") from error


def _cached(machine: MachineId) -> Path | None:
    folder = cache_folder()
    return folder / "profiles" / f"{machine.digest}.json" if folder.is_absolute() else None


def _note(message: str) -> None:
    warnings.warn(message, DraftcWarning, stacklevel=2)
