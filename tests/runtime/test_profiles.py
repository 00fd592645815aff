"""Which profile.json is used, which is ignored and how that is said; and that writing one does no harm."""

import errno
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftc.runtime.costs import CostProfile, to_json
from draftc.runtime.errors import DraftcWarning, UsageError
from draftc.runtime.manifest import PROFILE_NAME
from draftc.runtime.profiles import find_profile, keep_profile, kept_profile, measuring, write_profile
from tests.runtime.cost_fakes import FLAT, LINEAR, make_machine
from tests.runtime.test_costs import DIFFERENCES

MACHINE = FLAT.machine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("LOCALAPPDATA", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    return folder


def quietly(root: Path) -> CostProfile | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return find_profile(root, MACHINE)


def test_where_there_is_none(root: Path) -> None:
    assert quietly(root) is None


def test_the_bundles_own_goes_before_the_caches(root: Path) -> None:
    keep_profile(LINEAR)
    assert quietly(root) == LINEAR
    write_profile(root / PROFILE_NAME, FLAT)
    assert quietly(root) == FLAT


@pytest.mark.parametrize("field", DIFFERENCES)
def test_one_that_was_measured_elsewhere_is_ignored_and_the_caches_is_used(root: Path, field: str) -> None:
    elsewhere = replace(FLAT, machine=make_machine(**{field: DIFFERENCES[field]}))
    write_profile(root / PROFILE_NAME, elsewhere)
    with pytest.warns(DraftcWarning, match=rf"profile\.json is ignored, .* \({field} .*`draftc tune` measures anew"):
        assert find_profile(root, MACHINE) is None
    keep_profile(LINEAR)
    with pytest.warns(DraftcWarning, match="ignored"):
        assert find_profile(root, MACHINE) == LINEAR
    keep_profile(elsewhere)
    with pytest.warns(DraftcWarning, match="ignored"):
        assert find_profile(root, MACHINE) == LINEAR, "each machine has a file of its own"


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda path: write(path, b""), "not valid JSON"),
    "cut": (lambda path: write(path, to_json(FLAT).encode()[:-20]), "not valid JSON"),
    "no profile": (lambda path: write(path, b"{}"), "missing"),
    "not UTF-8": (lambda path: write(path, to_json(FLAT).encode() + b"\xff"), "not UTF-8 at byte"),
    "negative": (lambda path: write(path, to_json(FLAT).replace("10.001", "-1").encode()), "ms: must be numbers from"),
    "newer": (
        lambda path: write(path, json.dumps({"profile_version": 2}).encode()),
        "made by a newer draftc",
    ),
    "too large": (lambda path: write(path, b" " * (1 << 20) + to_json(FLAT).encode()), "bytes, at most 1048576"),
    "folder": (Path.mkdir, "not a regular file"),
    "fifo": (os.mkfifo, "not a regular file"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "not a regular file"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_one_that_cannot_be_read_is_ignored_on_one_line(root: Path, kind: str) -> None:
    make, reason = BROKEN[kind]
    make(root / PROFILE_NAME)
    with pytest.warns(DraftcWarning) as caught:
        assert find_profile(root, MACHINE) is None
    (said,) = [str(warning.message) for warning in caught]
    assert reason in said
    assert said.endswith("`draftc tune` measures anew")
    assert "\n" not in said


def test_a_link_out_of_the_bundle_is_not_followed(root: Path, tmp_path: Path) -> None:
    write_profile(tmp_path / "real.json", FLAT)
    (root / PROFILE_NAME).symlink_to(tmp_path / "real.json")
    with pytest.warns(DraftcWarning, match="not a regular file"):
        assert find_profile(root, MACHINE) is None


@pytest.mark.parametrize("kind", BROKEN)
def test_a_cached_one_that_cannot_be_read_is_measured_again_without_a_word(root: Path, cache: Path, kind: str) -> None:
    keep_profile(FLAT)
    (kept,) = cache.rglob("*.json")
    kept.unlink()
    BROKEN[kind][0](kept)
    assert quietly(root) is None
    if kind != "folder":
        keep_profile(FLAT)
        assert quietly(root) == FLAT, "it is written again"


def test_a_cached_one_under_another_machines_name(root: Path, cache: Path) -> None:
    keep_profile(FLAT)
    (kept,) = cache.rglob("*.json")
    kept.write_text(to_json(replace(FLAT, machine=make_machine(cores=64))), encoding="utf-8")
    assert quietly(root) is None


@pytest.mark.parametrize("blocked", [".", "draftc", "draftc/profiles"])
def test_a_cache_that_cannot_be_written_does_no_harm(root: Path, cache: Path, blocked: str) -> None:
    """A file stands where a folder is needed; permissions would not stop a superuser."""
    path = cache / blocked
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way", encoding="utf-8")
    with pytest.warns(
        DraftcWarning, match="cannot be kept in .*, so each opening will measure again: make that folder"
    ):
        keep_profile(FLAT)
    assert quietly(root) is None
    assert path.read_text(encoding="utf-8") == "in the way"


def test_a_cache_that_may_not_be_entered_does_no_harm(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has another's HOME."""
    stat = os.stat

    def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(cache)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr("os.stat", refuse)
    assert quietly(root) is None
    assert kept_profile(MACHINE) is None


@pytest.mark.parametrize("blocked", ["draftc", "draftc/profiles"])
def test_where_nothing_can_be_locked_it_is_measured_all_the_same(cache: Path, blocked: str) -> None:
    path = cache / blocked
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way", encoding="utf-8")
    done = False
    with measuring(MACHINE):
        done = True
    assert done


def test_without_a_home_nothing_is_kept(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    keep_profile(FLAT)
    assert quietly(root) is None
    assert not (tmp_path / "relative").exists()


# --- writing ---------------------------------------------------------------------------------------------------------


def test_what_is_written_replaces_what_was_there(root: Path) -> None:
    path = root / PROFILE_NAME
    write_profile(path, LINEAR)
    write_profile(path, FLAT)
    assert path.read_text(encoding="utf-8") == to_json(FLAT)
    assert [entry.name for entry in root.iterdir()] == [PROFILE_NAME]
    assert path.stat().st_mode & 0o777 == 0o644, "others who use the bundle may read it"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
@pytest.mark.parametrize("at", ["os.replace", "os.chmod", "draftc.runtime.profiles.to_json"])
def test_a_write_that_fails_leaves_the_old_one_and_nothing_else(
    root: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, at: str
) -> None:
    path = root / PROFILE_NAME
    write_profile(path, LINEAR)

    def fails(*_: object, **__: object) -> None:
        raise fault

    expected = UsageError if isinstance(fault, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(at, fails)
        with pytest.raises(expected) as error:
            write_profile(path, FLAT)
    if expected is UsageError:
        assert str(error.value) == f"{path}: No space left on device: make the folder writable"
    assert [entry.name for entry in root.iterdir()] == [PROFILE_NAME]
    assert path.read_text(encoding="utf-8") == to_json(LINEAR)


@pytest.mark.parametrize("place", ["nowhere/profile.json", "file/profile.json", "folder"])
def test_a_place_that_cannot_be_written(root: Path, place: str) -> None:
    (root / "file").write_text("a file", encoding="utf-8")
    (root / "folder").mkdir()
    with pytest.raises(UsageError, match="make the folder writable") as error:
        write_profile(root / place, FLAT)
    assert "\n" not in str(error.value)
    assert sorted(entry.name for entry in root.iterdir()) == ["file", "folder"]
