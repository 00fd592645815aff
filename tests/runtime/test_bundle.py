"""Opening folders that are damaged or hostile: one line each, and nothing outside the folder is ever read."""

import errno
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftc.runtime.bundle import MAX_MANIFEST_BYTES, list_files, open_bundle, sha256_files
from draftc.runtime.errors import BundleError, BundleVersionError
from draftc.runtime.manifest import FileEntry, Manifest, parse, to_json

ROOT = Path(__file__).parents[2]
CONTENT = {
    "LICENSE": b"Apache License",
    "target/model.onnx": b"graph",
    "target/weights/model.onnx.data": b"\0" * 1_000_003,
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/empty.txt": b"",
}

Damage = Callable[[Path], object]


def manifest(content: dict[str, bytes] = CONTENT) -> Manifest:
    """The documented example, with the table of `content`."""
    text = (ROOT / "docs" / "bundle-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    table = [
        FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest()) for path, data in content.items()
    ]
    return replace(parse(block), files=tuple(table))


def rewrite(root: Path, old: str, new: str) -> None:
    text = (root / "bundle.json").read_text(encoding="utf-8")
    assert old in text
    (root / "bundle.json").write_text(text.replace(old, new), encoding="utf-8")


def link(path: Path, to: Path | str) -> None:
    """Replace `path` by a link."""
    if path.is_dir():
        path.rename(path.with_name("moved-" + path.name))
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(to)


def move_out(root: Path, name: str) -> None:
    """Move a part of the bundle outside and link to it: same bytes, one link."""
    (root / name).rename(root.parent / "outside")
    (root / name).symlink_to(root.parent / "outside")


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def write(path: Path, data: bytes = b"") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def bind_socket(path: Path) -> None:
    directory = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have about 100 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(directory)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    for name, data in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "bundle.json").write_text(to_json(manifest()), encoding="utf-8")
    return folder


def refusal(path: Path | str, **options: bool) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


def test_opens_and_finds_files(root: Path) -> None:
    bundle = open_bundle(root)
    assert bundle.root == root.resolve()
    assert bundle.manifest == manifest()
    assert bundle.path("target/model.onnx").read_bytes() == b"graph"
    assert bundle.path("tokenizer").is_dir()
    assert not bundle.path("tokenizer/absent.json").exists()


def test_path_may_be_relative_or_a_link_to_the_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "current").symlink_to(root)
    assert open_bundle(tmp_path / "current").root == root.resolve()
    monkeypatch.chdir(root)
    bundle = open_bundle(".")
    monkeypatch.chdir(tmp_path)
    assert bundle.path("target/model.onnx").read_bytes() == b"graph"


def test_profile_and_other_names_at_the_top_are_ignored(root: Path) -> None:
    (root / "profile.json").write_text("{}")
    (root / "README.md").write_text("mine")
    (root / ".cache").mkdir()
    (root / ".cache" / "x").write_text("")
    (root / ".cache" / "link").symlink_to("/")
    assert open_bundle(root).manifest == manifest()


@pytest.mark.parametrize(
    "path", ["..", "../x", "/etc/passwd", "a\\b", "", "a/../../b", "C:/x", "a\0b", "target/./model.onnx"]
)
def test_path_refuses_to_leave(root: Path, path: str) -> None:
    with pytest.raises(BundleError, match="not a path inside the bundle"):
        open_bundle(root).path(path)


def test_path_refuses_a_link_made_since(root: Path) -> None:
    bundle = open_bundle(root)
    (root / "profile.json").symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match="a link inside a bundle is refused"):
        bundle.path("profile.json")
    move_out(root, "target")
    with pytest.raises(BundleError, match="a link inside a bundle is refused"):
        bundle.path("target/model.onnx")


DAMAGES: list[tuple[str, Damage, str]] = [
    ("no manifest", lambda root: (root / "bundle.json").unlink(), "no bundle.json in it"),
    ("empty", lambda root: (root / "bundle.json").write_text(""), "bundle.json: not valid JSON"),
    ("truncated", lambda root: os.truncate(root / "bundle.json", 1000), "bundle.json: not valid JSON"),
    ("not UTF-8", lambda root: (root / "bundle.json").write_bytes(b"{\xff}"), "bundle.json: not UTF-8 at byte 1"),
    (
        "byte order",
        lambda root: (root / "bundle.json").write_bytes(b"\xff\xfe{\0}\0"),
        "bundle.json: not UTF-8 at byte 0",
    ),
    ("deep", lambda root: (root / "bundle.json").write_text('{"a":' * 200_000), "bundle.json: nested too deeply"),
    ("not a number", lambda root: rewrite(root, "1.2e-06", "NaN"), "NaN is not a JSON number"),
    (
        "key twice",
        lambda root: rewrite(root, '"name": "tiny-llama"', '"name": "a", "name": "b"'),
        'key "name" comes twice',
    ),
    (
        "manifest is a folder",
        lambda root: replaced(root / "bundle.json", Path.mkdir),
        "no bundle.json",
    ),
    (
        "manifest is a link",
        lambda root: move_out(root, "bundle.json"),
        "bundle.json: a link inside a bundle is refused",
    ),
    (
        "manifest is a pipe",
        lambda root: replaced(root / "bundle.json", os.mkfifo),
        "neither a file",
    ),
    ("missing", lambda root: (root / "target/model.onnx").unlink(), "target/model.onnx: missing from the bundle"),
    ("missing at the top", lambda root: (root / "LICENSE").unlink(), "LICENSE: missing from the bundle"),
    ("missing folder", lambda root: (root / "target").rename(root / "elsewhere"), "target/model.onnx: missing"),
    ("a folder for a file", lambda root: replaced(root / "LICENSE", Path.mkdir), "LICENSE: missing"),
    (
        "shorter",
        lambda root: os.truncate(root / "target/model.onnx", 4),
        "target/model.onnx: has 4 bytes, bundle.json says 5",
    ),
    ("longer", lambda root: (root / "tokenizer/empty.txt").write_bytes(b"x"), "tokenizer/empty.txt: has 1 bytes"),
    (
        "altered",
        lambda root: (root / "target/model.onnx").write_bytes(b"Graph"),
        "target/model.onnx: its sha256 is not",
    ),
    ("link to itself", lambda root: link(root / "target/model.onnx", "model.onnx"), "target/model.onnx: a link"),
    ("file moved out", lambda root: move_out(root, "target/model.onnx"), "target/model.onnx: a link inside"),
    ("file moved out at the top", lambda root: move_out(root, "LICENSE"), "LICENSE: a link inside"),
    ("folder moved out", lambda root: move_out(root, "target"), "target: a link inside a bundle is refused"),
    ("inner folder moved out", lambda root: move_out(root, "target/weights"), "target/weights: a link inside"),
    ("link within", lambda root: link(root / "target/weights", "moved-weights"), "target/weights: a link inside"),
    ("dangling link", lambda root: (root / "target/x").symlink_to("nowhere"), "target/x: a link inside"),
    ("pipe", lambda root: os.mkfifo(root / "target/pipe"), "target/pipe: neither a file nor a folder"),
    (
        "socket",
        lambda root: replaced(root / "target/model.onnx", bind_socket),
        "target/model.onnx: neither a file nor a folder",
    ),
    (
        "stray weights",
        lambda root: (root / "target/x.data").write_bytes(b""),
        "target/x.data: not listed in bundle.json",
    ),
    ("stray below", lambda root: (root / "target/weights/y").write_bytes(b""), "target/weights/y: not listed"),
    (
        "stray setting",
        lambda root: (root / "tokenizer/chat_template.jinja").write_text(""),
        "chat_template.jinja: not listed",
    ),
    (
        "stray draft",
        lambda root: write(root / "draft/m.onnx"),
        "draft/m.onnx: not listed",
    ),
    (
        "odd name",
        lambda root: (root / "target/\x1b[2J\n\udcff").write_bytes(b""),
        r"'target/\x1b[2J\n\udcff': not listed",
    ),
    ("leaves", lambda root: rewrite(root, '"LICENSE"', '"../LICENSE"'), "files[0].path: must be a relative path"),
    ("absolute", lambda root: rewrite(root, '"LICENSE"', '"/etc/passwd"'), "files[0].path: must be a relative path"),
    (
        "graph leaves",
        lambda root: rewrite(root, '"graph": "target/', '"graph": "target/../../'),
        "target.graph: must be a relat",
    ),
    (
        "tokenizer leaves",
        lambda root: rewrite(root, '"path": "tokenizer"', '"path": ".."'),
        "tokenizer.path: must be a relat",
    ),
    ("long name", lambda root: rewrite(root, '"LICENSE"', f'"{"x" * 5000}"'), "cannot be read (File name too long)"),
    ("long path", lambda root: rewrite(root, '"target/w', f'"target/{"x/" * 5000}w'), "missing from the bundle"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damage_is_named(root: Path, damage: Damage, message: str) -> None:
    damage(root)
    assert message in refusal(root)


def test_huge_manifest_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(root / "bundle.json", MAX_MANIFEST_BYTES + 1)

    def unexpected(*_: object, **__: object) -> str:
        raise AssertionError("was read")

    monkeypatch.setattr(Path, "read_text", unexpected)
    assert refusal(root).startswith(
        f"bundle.json: {MAX_MANIFEST_BYTES + 1} bytes, at most {MAX_MANIFEST_BYTES} are read"
    )


def test_largest_manifest_is_read(root: Path) -> None:
    text = to_json(manifest())
    (root / "bundle.json").write_text(text + " " * (MAX_MANIFEST_BYTES - len(text)))
    assert open_bundle(root).manifest == manifest()


def test_newer_schema(root: Path) -> None:
    rewrite(root, '"schema_version": 1', '"schema_version": 2')
    with pytest.raises(BundleVersionError, match=re.escape("(schema 2, this reads 1): pip install -U draftc")):
        open_bundle(root)


@pytest.mark.parametrize("name", ["absent", "bundle/LICENSE", "bundle/LICENSE/x", "bundle/target", "a\nb", "x" * 5000])
def test_not_a_bundle(root: Path, name: str) -> None:
    refusal(root.parent / name)


def test_not_a_bundle_says_what_it_is(root: Path) -> None:
    assert "no such folder" in refusal(root / "absent")
    assert "not a folder" in refusal(root / "LICENSE")
    assert "no bundle.json in it" in refusal(root / "target")


def test_unreadable_file_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, nothing is unreadable: the open that would fail is made to."""
    real = Path.open

    def denied(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "model.onnx":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", denied)
    assert refusal(root).endswith("target/model.onnx: cannot be read (Permission denied)")


def test_hashes_can_be_left_out_but_sizes_are_checked(root: Path) -> None:
    (root / "target/model.onnx").write_bytes(b"Graph")
    assert open_bundle(root, hashes=False).manifest == manifest()
    (root / "target/model.onnx").write_bytes(b"graphs")
    assert "has 6 bytes" in refusal(root, hashes=False)


def test_list_files_and_digests_agree_with_the_standard_library(root: Path) -> None:
    found = list_files(root, os.listdir(root))
    assert found == {
        **{name: len(data) for name, data in CONTENT.items()},
        "bundle.json": (root / "bundle.json").stat().st_size,
    }
    names = [*CONTENT] * 3
    assert sha256_files(root, names) == [hashlib.sha256(CONTENT[name]).hexdigest() for name in names]


def test_the_table_may_be_in_any_order(root: Path) -> None:
    document = json.loads((root / "bundle.json").read_text(encoding="utf-8"))
    document["files"].reverse()
    (root / "bundle.json").write_text(json.dumps(document))
    assert {entry.path for entry in open_bundle(root).manifest.files} == set(CONTENT)
