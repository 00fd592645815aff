"""Estimates against files that are really written, and limits read from made-up /proc and cgroup trees."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftc.export.checkpoint import peek
from draftc.export.half import cast_parameters
from draftc.export.preflight import Requirements, check, estimate
from draftc.runtime.errors import ResourceError, UsageError
from draftc.runtime.memory import available_memory, format_bytes
from draftc.runtime.records import Embedding
from tests.export.tiny_models import save_folder, tiny_model

GIB = 1 << 30


def requirements(disk: int = 0, ram: int = 0) -> Requirements:
    return Requirements(disk_bytes=disk, bundle_bytes=disk, ram_bytes=ram, kv_bytes=0)


def test_fp32_estimate_covers_the_weights_as_stored(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model(hidden_size=256, intermediate_size=2048, num_hidden_layers=8))
    stored = (tmp_path / "model.safetensors").stat().st_size
    needs = estimate([peek(str(tmp_path))], "fp32", max_length=128)
    assert 0.99 * stored < needs.bundle_bytes - (32 << 20) < stored
    assert needs.disk_bytes == needs.bundle_bytes


def test_a_quantized_bundle_is_smaller_but_needs_the_float_graph_on_the_way(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model(hidden_size=256, intermediate_size=2048, num_hidden_layers=8))
    info = peek(str(tmp_path))
    needs = {name: estimate([info], name, max_length=128) for name in ("fp32", "int8", "int4")}
    assert needs["int4"].bundle_bytes < needs["int8"].bundle_bytes < needs["fp32"].bundle_bytes
    assert needs["int4"].disk_bytes - needs["int4"].bundle_bytes == 4 * info.parameters
    coarse = estimate([info], "int4", max_length=128, block_size=128)
    assert coarse.bundle_bytes < needs["int4"].bundle_bytes


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_half_typed_bundle_is_as_large_as_a_half_typed_checkpoint(tmp_path: Path, precision: str) -> None:
    """Disk also holds a float32 copy for a while, which the parity gate compares. KV buffers are half-typed, too."""
    model = tiny_model(hidden_size=256, intermediate_size=2048, num_hidden_layers=8)
    cast_parameters(model, "fp16")
    save_folder(tmp_path, model)
    stored = (tmp_path / "model.safetensors").stat().st_size
    info = peek(str(tmp_path))
    needs = estimate([info], precision, max_length=128, half=True)
    assert 0.99 * stored < needs.bundle_bytes - (32 << 20) < stored
    assert needs.disk_bytes == needs.bundle_bytes + 4 * info.parameters
    wide = estimate([info], "fp32", max_length=128)
    assert 2 * needs.kv_bytes == wide.kv_bytes
    assert needs.ram_bytes == wide.ram_bytes  # weights are loaded in float32, and compared in it


def test_weights_that_are_multiplied_in_half_precision(tmp_path: Path) -> None:
    """Codes as always; scales and the embedding table are half as large, and so is the float graph on the way."""
    save_folder(tmp_path, tiny_model(vocab_size=4000))
    info = peek(str(tmp_path))
    table = 4000 * 64
    wide = estimate([info], "int8", max_length=128, block_size=32)
    half = estimate([info], "int8", max_length=128, block_size=32, half=True)
    matrices = info.parameters - table
    assert wide.bundle_bytes - half.bundle_bytes == pytest.approx(2 * table + 2 * matrices / 32, abs=2)
    assert half.disk_bytes - half.bundle_bytes == (2 + 4) * info.parameters
    fp8 = estimate([info], "fp8", max_length=128, block_size=4096, half=True)
    assert fp8.bundle_bytes < half.bundle_bytes
    assert fp8.bundle_bytes - (32 << 20) == pytest.approx(2 * table + matrices, rel=0.001)


def test_an_engine_is_written_while_its_graph_is_still_there(tmp_path: Path) -> None:
    save_folder(tmp_path)
    info = peek(str(tmp_path))
    for precision in ("fp16", "int4", "fp8"):
        needs = estimate([info], precision, max_length=128, block_size=128, half=True, engines=True)
        assert needs.disk_bytes >= 2 * needs.bundle_bytes
        assert needs.disk_bytes >= needs.bundle_bytes + 4 * info.parameters


def test_the_tied_table_is_stored_in_float_besides_the_quantized_head(tmp_path: Path) -> None:
    save_folder(tmp_path / "tied", tiny_model(tie_word_embeddings=True, vocab_size=5000))
    save_folder(tmp_path / "untied", tiny_model(tie_word_embeddings=False, vocab_size=5000))
    tied, untied = (estimate([peek(str(tmp_path / name))], "int4", max_length=64) for name in ("tied", "untied"))
    assert tied.bundle_bytes == untied.bundle_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_is_counted_as_it_is_stored(tmp_path: Path, tied: bool) -> None:
    table = 5000 * 64
    save_folder(tmp_path, tiny_model(tie_word_embeddings=tied, vocab_size=5000))
    needs = {
        how: estimate([peek(str(tmp_path))], "int4", max_length=64, block_size=32, embedding=how).bundle_bytes
        for how in get_args(Embedding)
    }
    assert needs["float"] - needs["shared"] == (4 * table if tied else 0)
    assert needs["float"] - needs["int8"] == pytest.approx((4 - 1 - 4 / 32) * table, abs=2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_float_is_counted_as_such(tmp_path: Path, tied: bool) -> None:
    """One that is tied is the embedding, where that is in float, too."""
    table = 5000 * 64
    save_folder(tmp_path, tiny_model(tie_word_embeddings=tied, vocab_size=5000))
    info = peek(str(tmp_path))
    cases: tuple[tuple[Embedding, bool], ...] = (("float", False), ("float", True), ("int8", True))
    rounded, floats, mixed = (
        estimate([info], "int4", max_length=64, block_size=32, embedding=how, float_head=head).bundle_bytes
        for how, head in cases
    )
    codes = (0.5 + 4 / 32) * table
    assert floats - rounded == pytest.approx((0 if tied else 4 * table) - codes, abs=2)
    assert mixed - floats == pytest.approx((1 + 4 / 32) * table - (0 if tied else 4 * table), abs=2)


def test_disk_adds_up_over_a_pair_and_memory_is_that_of_the_larger(tmp_path: Path) -> None:
    save_folder(tmp_path / "t", tiny_model(num_hidden_layers=4))
    save_folder(tmp_path / "d", tiny_model(num_hidden_layers=1))
    target, draft = peek(str(tmp_path / "t")), peek(str(tmp_path / "d"))
    both, alone, small = (estimate(infos, "fp32", max_length=64) for infos in ([target, draft], [target], [draft]))
    assert both.bundle_bytes == alone.bundle_bytes + small.bundle_bytes
    assert both.ram_bytes == alone.ram_bytes > small.ram_bytes
    assert both.kv_bytes == target.shape.kv_bytes(96) + draft.shape.kv_bytes(96)
    long = estimate([target], "fp32", max_length=10**9)  # the buffers are traced, and opened: they count as memory
    assert long.ram_bytes > 2 * long.kv_bytes > 10**12


def test_a_mixture_of_experts_counts_what_the_widest_call_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    save_folder(tmp_path / "moe", tiny_model("qwen3_moe", **sizes))
    info = peek(str(tmp_path / "moe"))
    expert = 3 * 64 * 32  # gate, up and down
    assert (info.expert_parameters, info.experts_per_token) == (2 * 8 * expert, 3 * expert)
    needs = estimate([info], "int4", max_length=1000, prefill_chunk=200)
    assert (needs.gathered_bytes, needs.call_tokens) == (4 * 200 * 3 * expert, 200)
    assert "a call of 200 tokens copies 14.1 MiB of expert weights" in needs.summary()
    assert needs.ram_bytes > needs.gathered_bytes + 4 * info.parameters
    assert needs.bundle_bytes > 4 * info.expert_parameters  # they stay in float
    save_folder(tmp_path / "dense", tiny_model())
    dense = estimate([peek(str(tmp_path / "dense"))], "int4", max_length=1000)
    assert dense.gathered_bytes == 0
    assert "expert" not in dense.summary()

    monkeypatch.setattr("draftc.export.preflight.available_memory", lambda: 20 * GIB)
    large = replace(needs, gathered_bytes=30 * GIB, ram_bytes=40 * GIB)
    with pytest.raises(ResourceError, match=r"a call of 200 tokens copies 30\.0 GiB .* lower --prefill-chunk"):
        check(large, tmp_path)


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path)
    with pytest.raises(UsageError, match="precision must be one of fp32, fp16, bf16, int8, int4, fp8, is 'int3'"):
        estimate([peek(str(tmp_path))], "int3", max_length=64)


def test_too_little_disk_names_both_numbers_and_the_place(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ResourceError, match=r"needs about [\d.]+ GiB of disk, .* has [\d.]+ \w+ free") as caught:
        check(requirements(disk=free + 100 * GIB), tmp_path / "not" / "there" / "yet")
    assert str(tmp_path) in str(caught.value)
    assert format_bytes(free + 100 * GIB) in str(caught.value)


def test_too_little_memory_names_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftc.export.preflight.available_memory", lambda: 3 * GIB)
    with pytest.raises(ResourceError, match=r"needs about 5\.0 GiB of memory, 3\.0 GiB is available"):
        check(requirements(ram=5 * GIB), tmp_path)
    check(requirements(ram=3 * GIB), tmp_path)


def test_unknown_memory_is_not_a_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftc.export.preflight.available_memory", lambda: None)
    check(requirements(ram=1 << 60), tmp_path)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {20 * GIB // 1024} kB\n"


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, 20 * GIB),
        ("0::/", {"memory.max": "max\n", "memory.current": "5"}, 20 * GIB),
        ("0::/", {"memory.max": f"{8 * GIB}\n", "memory.current": f"{3 * GIB}\n"}, 5 * GIB),
        (
            "0::/",
            {
                "memory.max": str(8 * GIB),
                "memory.current": str(7 * GIB),
                "memory.stat": f"anon 1\ninactive_file {4 * GIB}\n",
            },
            5 * GIB,  # cached file pages can be taken back
        ),
        ("0::/a/b", {"a/b/memory.max": str(9 * GIB), "a/b/memory.current": "0"}, 9 * GIB),
        (
            "0::/a/b",  # the tighter of the group and its parent
            {
                "a/b/memory.max": str(9 * GIB),
                "a/b/memory.current": "0",
                "a/memory.max": str(6 * GIB),
                "a/memory.current": str(2 * GIB),
            },
            4 * GIB,
        ),
        ("0::/", {"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
        (
            "5:memory:/box",
            {
                "memory/box/memory.limit_in_bytes": str(2 * GIB),
                "memory/box/memory.usage_in_bytes": str(GIB),
                "memory/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
            },
            3 * GIB // 2,
        ),
        ("5:memory:/", {"memory/memory.limit_in_bytes": str(1 << 62), "memory/memory.usage_in_bytes": "0"}, 20 * GIB),
    ],
)
def test_memory_is_what_the_machine_and_every_group_leave(
    tmp_path: Path, group: str, files: dict[str, str], expected: int
) -> None:
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": f"{group}\n"})
    assert available_memory(proc, write(tmp_path / "cgroup", files)) == expected


def test_memory_is_unknown_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "no", tmp_path / "none") is None


def test_memory_of_this_machine_is_no_more_than_it_has() -> None:
    found = available_memory()
    if found is None:
        pytest.skip("the system does not say")
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < found <= int(total.split()[1]) * 1024


@given(st.integers(0, 1 << 50))
def test_readable_sizes_are_within_a_twentieth_of_a_unit(count: int) -> None:
    number, unit = format_bytes(count).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert abs(float(number) * scale - count) <= 0.0501 * scale
    assert unit == "GiB" or count < 1024 * scale
