"""A bundle of two tiny graphs that ONNX Runtime runs, with a tokenizer: everything that a compiled one has."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftc.runtime.bundle import list_files, sha256_files
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import MANIFEST_NAME, FileEntry, to_json
from draftc.runtime.text import Tokenizer
from tests.runtime.sessions import MAX_LENGTH, MAX_WIDTH, make_manifest
from tests.runtime.tiny_model import DIM, TinyModel

__all__ = ["LENGTH", "write_bundle", "write_manifest"]

LENGTH = MAX_LENGTH + MAX_WIDTH


def write_bundle(root: Path, tokenizer_folder: Path, target: TinyModel) -> Path:
    """The draft is the target with some noise. Caches are as long as the target says."""
    shutil.copytree(tokenizer_folder, root / "tokenizer")
    for folder, model in (("target", target), ("draft", TinyModel(target.length, target.vocab, noise=0.2))):
        (root / folder).mkdir()
        model.save(root / folder / "model.onnx")
    write_manifest(root, Tokenizer.from_folder(tokenizer_folder), length=target.length)
    return root


def write_manifest(root: Path, tokenizer: Tokenizer, length: int = LENGTH, **fields: Any) -> None:
    """Describe the files that are there."""
    spec = GraphSpec.decoder([(1, DIM, DIM)], length, tokenizer.vocab_size, "float32")
    sizes = list_files(root, ["target", "draft", "tokenizer"])
    digests = sha256_files(root, [*sizes])
    files = tuple(
        FileEntry(path=path, size=size, sha256=digest)
        for (path, size), digest in zip(sizes.items(), digests, strict=True)
    )
    manifest = make_manifest(spec, tokenizer.vocab_size, **fields)
    (root / MANIFEST_NAME).write_text(to_json(replace(manifest, files=files)), encoding="utf-8")
