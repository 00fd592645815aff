"""What `draftc inspect` says of a bundle of engines, from its manifest alone: without a driver, or TensorRT itself."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from draftc.runtime.inspection import bundle_record, print_bundle
from draftc.runtime.manifest import Backend, EngineInfo, Manifest, Profile, Quantization, Range, parse

EXAMPLE = Path(__file__).parents[2] / "docs" / "bundle-format.md"


def engine_manifest() -> Manifest:
    (block,) = re.findall(r"```json\n(.*?)```", EXAMPLE.read_text(encoding="utf-8"), re.DOTALL)
    plain = parse(block)
    one = Range(min=1, opt=1, max=1)
    info = EngineInfo(
        half="bf16",
        profiles=(
            Profile(
                name="decode",
                batch=Range(min=1, opt=1, max=4),
                tokens=Range(min=1, opt=5, max=32),
                rows=Range(min=1, opt=5, max=32),
                activation_bytes=3_000_000,
            ),
            Profile(
                name="prefill", batch=one, tokens=Range(min=1, opt=64, max=64), rows=one, activation_bytes=2_000_000
            ),
        ),
        weights_bytes=80_000,
        attention_layers=1,
        cache_layers=2,
        log="target/build.log",
    )
    rounded = Quantization(
        format="fp8",
        bits=8,
        block_size=0,
        symmetric=True,
        accuracy_level=4,
        quantized_matmuls=8,
        float_matmuls=(),
    )
    spec = plain.target.spec.with_tail("verify", 32, 96)
    target = replace(plain.target, graph="target/model.engine", engine=info, quantization=rounded, spec=spec)
    backend = Backend(name="tensorrt-rtx", version="1.7.1.116", opset=24, device="cuda", sms=("89", "120"))
    return replace(plain, backend=backend, precision="fp8", target=target)


def test_an_engine_shows_profiles_tensors_precision_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    print_bundle(engine_manifest())
    words = " ".join(capsys.readouterr().out.split())
    for fact in (
        "tensorrt-rtx 1.7.1.116, opset 24, on cuda, for SM 89, 120",
        "precision fp8",
        "E4M3 floats, one scale per output, symmetric; rounded to nearest; 8 MatMuls",
        "target decode 1–4 (1) 1–32 (5) 1–32 (5) 3.0 MB",
        "target prefill 1–1 (1) 1–64 (64) 1–1 (1) 2.0 MB",
        "computes in bf16; 1 attention and 2 cache layers",
        "log in target/build.log",
        "in uniforms float32 (B, R)",
        "out emitted int64 (B, R)",
    ):
        assert fact in words, fact


def test_blocks_of_other_sizes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_manifest()
    assert engine.target.quantization is not None
    rounded = replace(engine.target.quantization, block_size=128, blocks={"up_proj": 256, "k_proj": 64})
    print_bundle(replace(engine, target=replace(engine.target, quantization=rounded)))
    words = " ".join(capsys.readouterr().out.split())
    assert "blocks of 128 (up_proj: 256) (k_proj: 64), symmetric" in words


def test_memory_of_an_engine_adds_up() -> None:
    record = bundle_record(engine_manifest())
    json.dumps(record)
    caches = 2 * 2 * 288 * 16 * 4  # key and value, heads, L, D, float32
    distributions = 32 * 96 * 4
    assert record["derived"]["device_bytes"] == {
        "target": {
            "weights": 80_000,
            "caches": caches,
            "distributions": distributions,
            "activations": 3_000_000,
            "together": 80_000 + caches + distributions + 3_000_000,
        }
    }
