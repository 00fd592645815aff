"""Bundles of two tiny models for the fake TensorRT, and the same models as a bundle for ONNX Runtime."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from draftc.export.tails import DraftTail, VerifyTail
from draftc.runtime.bundle import list_files, sha256_files
from draftc.runtime.graphio import PAST_Q, PRESENT_Q, GraphSpec, Tail
from draftc.runtime.manifest import MANIFEST_NAME, FileEntry, Manifest, to_json
from draftc.runtime.records import Backend, DraftModel, EngineInfo, Profile, Range
from draftc.runtime.text import Tokenizer
from tests.runtime.fake_cuda_core import install
from tests.runtime.fake_cuda_python import FakeGpu, Machine
from tests.runtime.fake_tensorrt import FakeTensorRt
from tests.runtime.fake_tensorrt_api import HEADER, MAGIC, VERSION
from tests.runtime.sessions import MAX_LENGTH, MAX_WIDTH, PREFILL_CHUNK, make_manifest
from tests.runtime.tiny_model import DIM, TinyModel

__all__ = ["BUILT", "INFO", "LENGTH", "Gpu", "fake_gpu", "plain_spec", "save_graph", "write_bundles", "write_engine"]

LENGTH = MAX_LENGTH + MAX_WIDTH
BUILT = Backend(name="tensorrt-rtx", version=VERSION, opset=24, device="cuda", sms=("89", "120"))


def _range(most: int) -> Range:
    return Range(min=1, opt=most, max=most)


INFO = EngineInfo(
    half="fp16",
    profiles=(
        Profile(name="decode", batch=_range(1), tokens=_range(MAX_WIDTH), rows=_range(MAX_WIDTH)),
        Profile(name="prefill", batch=_range(1), tokens=_range(PREFILL_CHUNK), rows=_range(1)),
    ),
    attention_layers=1,
    cache_layers=2,
    log="target/build.log",
)


@dataclass
class Gpu:
    """The fake machine that engines run on."""

    cuda: FakeGpu
    trt: FakeTensorRt


def fake_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path, machine: Machine | None = None, *, rtx: bool = True) -> Gpu:
    """Install the fakes for the duration of a test. `cache` is the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("LOCALAPPDATA", str(cache))
    cuda = FakeGpu(machine or Machine())
    trt = FakeTensorRt(cuda, rtx=rtx)
    monkeypatch.setattr("draftc.runtime.tensorrt.load_cuda", install(cuda))
    monkeypatch.setattr("draftc.runtime.engine_file.load_tensorrt", lambda flavour: trt.module)
    return Gpu(cuda, trt)


def plain_spec(vocab: int) -> GraphSpec:
    """A tiny model's spec, without a tail."""
    return GraphSpec.decoder([(1, DIM, DIM)], LENGTH, vocab, "float32")


def write_engine(path: Path, graph: Path, spec: GraphSpec, info: EngineInfo = INFO, **lies: Any) -> Path:
    """An engine file for ONNX file `graph`, with the profiles of `info`. `lies` replace what it says of itself."""
    profiles = []
    for profile in info.profiles:
        sizes = {
            end: {
                "B": getattr(profile.batch, end),
                "S": getattr(profile.tokens, end),
                "R": getattr(profile.rows, end),
                "P": getattr(_range(MAX_WIDTH), end),
            }
            for end in ("min", "opt", "max")
        }
        profiles.append(
            {
                tensor.name: [[sizes[end].get(str(dim), dim) for dim in tensor.shape] for end in sizes]
                for tensor in spec.inputs
            }
        )
    tensors = [
        [tensor.name, mode, tensor.dtype, tensor.shape]
        for mode, group in (("INPUT", spec.inputs), ("OUTPUT", spec.outputs))
        for tensor in group
    ]
    aliases = {present.name: past.name for past, present in spec.cache_pairs}
    if spec.tail == "draft":
        aliases[PRESENT_Q] = PAST_Q
    said = {
        "graph": str(graph),
        "profiles": profiles,
        "tensors": tensors,
        "aliases": aliases,
        "capturable": True,
        "host": [],
        **lies,
    }
    text = json.dumps(said).encode()
    header = MAGIC + len(text).to_bytes(8, "little")
    path.write_bytes(header.ljust(HEADER, b"\0") + text)
    return path


def save_graph(path: Path, model: TinyModel, tail: Tail, vocab_size: int) -> GraphSpec:
    """Write `model` with its tail as an ONNX file."""
    loaded = ir.load(model.save(path))
    (VerifyTail if tail == "verify" else DraftTail)(MAX_WIDTH, vocab_size)(loaded)
    ir.save(loaded, path)
    return plain_spec(model.vocab).with_tail(tail, MAX_WIDTH, vocab_size)


def write_bundles(
    root: Path, tokenizer: Path, target: TinyModel, draft: TinyModel | None, *, rtx: bool = True
) -> tuple[Path, Path]:
    """(bundle of engines, bundle of graphs) of the same models. Rows above the tokenizer's vocabulary are padding."""
    vocab_size = Tokenizer.from_folder(tokenizer).vocab_size
    engines, graphs = root / "engines", root / "graphs"
    specs = {}
    for folder in (engines, graphs):
        shutil.copytree(tokenizer, folder / "tokenizer")
    tails: dict[str, Tail] = {"target": "verify", "draft": "draft"}
    for name, model in (("target", target), ("draft", draft)):
        if model is None:
            continue
        for folder in (engines, graphs):
            (folder / name).mkdir()
        model.save(graphs / name / "model.onnx")
        specs[name] = save_graph(root / f"{name}.onnx", model, tails[name], vocab_size)
        write_engine(engines / name / "model.engine", root / f"{name}.onnx", specs[name])
        (engines / name / "build.log").touch()
    manifest = make_manifest(plain_spec(target.vocab), vocab_size, method="ngram" if draft is None else "draft_model")
    if isinstance(manifest.draft, DraftModel):
        assert draft is not None
        described = replace(manifest.draft.model, spec=plain_spec(draft.vocab))
        manifest = replace(manifest, draft=replace(manifest.draft, model=described))
    _finish(graphs, manifest)
    changed: dict[str, Any] = {
        "backend": BUILT if rtx else replace(BUILT, name="tensorrt"),
        "target": replace(manifest.target, graph="target/model.engine", engine=INFO, spec=specs["target"]),
    }
    if isinstance(manifest.draft, DraftModel):
        info = replace(INFO, log="draft/build.log")
        described = replace(manifest.draft.model, graph="draft/model.engine", engine=info, spec=specs["draft"])
        changed["draft"] = replace(manifest.draft, model=described)
    _finish(engines, replace(manifest, **changed))
    return engines, graphs


def _finish(root: Path, manifest: Manifest) -> None:
    sizes = list_files(root, ["target", "draft", "tokenizer"])
    digests = sha256_files(root, [*sizes])
    files = tuple(
        FileEntry(path=path, size=size, sha256=digest)
        for (path, size), digest in zip(sizes.items(), digests, strict=True)
    )
    (root / MANIFEST_NAME).write_text(to_json(replace(manifest, files=files)), encoding="utf-8")
