"""Sources: what a string names, what can be said before loading, and that what is loaded is the checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftc.export.checkpoint import check_tokenizer, load, peek, resolve, skeleton, write_tokenizer
from draftc.export.configs import model_shape
from draftc.runtime.errors import CheckpointError, ResourceError, UnsupportedModelError
from tests.export.tiny_models import (
    CHAT_TEMPLATE,
    TEXT,
    VOCAB,
    logits,
    save_folder,
    tiny_model,
    tiny_tokenizer,
    write_gguf,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One untied llama folder that tests only read."""
    folder = tmp_path_factory.mktemp("saved")
    save_folder(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_loads_as_fp32_with_the_logits_of_the_model_that_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not its rotary buffers, which no checkpoint stores
    save_folder(tmp_path, model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)
    checkpoint = load(resolve(str(tmp_path)))
    assert {parameter.dtype for parameter in checkpoint.model.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in checkpoint.model.parameters())
    assert not checkpoint.model.training
    np.testing.assert_array_equal(logits(checkpoint.model), logits(model))


def test_shards_load_as_one_model(tmp_path: Path) -> None:
    model = save_folder(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    np.testing.assert_array_equal(logits(load(peek(str(tmp_path))).model), logits(model))


@pytest.mark.parametrize(
    ("model_type", "config", "embedding_read"),
    [
        ("llama", {"tie_word_embeddings": False}, False),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True}, True),
        ("gpt_neox", {"tie_word_embeddings": False}, False),
    ],
)
def test_parameters_are_counted_from_headers_as_torch_counts_them(
    tmp_path: Path, model_type: str, config: dict[str, Any], embedding_read: bool
) -> None:
    save_folder(tmp_path, tiny_model(model_type, **config))
    info = peek(str(tmp_path))
    model = load(info).model
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = info.shape.vocab_rows * info.shape.hidden_size
    assert info.parameters == total
    assert info.parameters_per_token == (total if embedding_read else total - embedding)
    assert info.tied is embedding_read


def test_a_tied_head_that_is_stored_anyway_counts_once(tmp_path: Path) -> None:
    model = save_folder(tmp_path, tiny_model(tie_word_embeddings=True))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    assert peek(str(tmp_path)).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_experts_that_are_not_chosen_are_not_read(tmp_path: Path) -> None:
    model = tiny_model(
        "qwen3_moe", num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32, decoder_sparse_step=1
    )
    save_folder(tmp_path, model)
    info = peek(str(tmp_path))
    expert = 3 * 64 * 32  # gate, up and down of one expert of one layer
    embedding = VOCAB * 64
    assert info.parameters - info.parameters_per_token == embedding + 2 * 3 * expert


def test_progress_ends_at_the_number_of_parameters(saved: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = load(resolve(str(saved)), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (checkpoint.info.parameters, checkpoint.info.parameters)


def test_transformers_progress_bars_are_left_as_they_were(saved: Path) -> None:
    before = transformers.utils.logging.is_progress_bar_enabled()
    load(resolve(str(saved)))
    assert transformers.utils.logging.is_progress_bar_enabled() is before


def test_the_licence_comes_from_the_model_card(tmp_path: Path) -> None:
    save_folder(tmp_path)
    assert peek(str(tmp_path)).licence is None
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: other\n")
    assert peek(str(tmp_path)).licence == "apache-2.0"


def test_tokens_without_a_row_are_noted_and_do_not_count(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_model(vocab_size=300), tiny_tokenizer(extra=["<a>", "<b>"]))
    info = peek(str(tmp_path))
    beyond = sum(index >= 300 for index in info.tokenizer.get_vocab().values())
    assert info.token_ids == 300
    assert beyond > 0
    assert any(f"{beyond} tokens have no row" in note for note in info.notes)


# --- what a source string is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/folder", "not a model: looked for a folder with config.json, an existing .gguf file and a hub id"),
        ("gpt2", "not a model: looked for"),
        ("", "not a model: looked for|not a model folder"),
        ("./missing", "not a model: looked for"),
        ("org/missing.gguf", "not a model: looked for"),
        ("org/name with space", "not a model: looked for"),
    ],
)
def test_a_string_that_names_nothing_says_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        resolve(source)


def test_a_folder_without_config_points_to_the_gguf_in_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a model folder: looked for config.json and found none; name"):
        resolve(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"pass the file .*m\.gguf"):
        resolve(str(tmp_path))


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"a file, but not \.gguf"):
        resolve(str(path))


def test_an_existing_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    save_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    source = resolve("org/name")
    assert (source.kind, source.location, source.commit) == ("folder", tmp_path / "org" / "name", None)


# --- what is refused -------------------------------------------------------------------------------------------------


def drop_model_type(folder: Path) -> None:
    edit_config(folder, model_type=None)


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def not_an_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def wrong_type(folder: Path) -> None:
    edit_config(folder, hidden_size="wide")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def reshape_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, path, metadata={"format": "pt"})


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def break_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_model_type, "config.json has no model_type"),
        (break_json, "config.json: not readable as JSON"),
        (not_an_object, "must hold a JSON object, holds list"),
        (wrong_type, "its config.json cannot be read"),
        (cut_weights, r"truncated or corrupt safetensors: its header says [\d,]+ bytes, the file has [\d,]+"),
        (drop_tensor, r"1 parameters are not in the weight files, first model\.layers\.1\.mlp\.up_proj\.weight"),
        (reshape_tensor, "its weights cannot be read"),
        (pickle_weights, "only pickled weights"),
        (drop_tokenizer, "no tokenizer: looked for tokenizer.json"),
        (break_tokenizer, "its tokenizer cannot be read"),
        (break_generation_config, "its generation_config.json cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    save_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(resolve(str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "never_heard_of"}, r"'never_heard_of' is not known to transformers \d"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"its weights are quantized \(gptq\)"),
    ],
)
def test_an_unsupported_model_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_folder(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        peek(str(tmp_path))


def test_an_unsupported_model_is_refused_before_its_weights_are_looked_at(tmp_path: Path) -> None:
    save_folder(tmp_path)
    edit_config(tmp_path, model_type="t5")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError):
        peek(str(tmp_path))


def remote_folder(folder: Path) -> Path:
    """A model type of its own, whose Python code leaves a mark when it runs."""
    save_folder(folder)
    mark = folder / "code-ran"
    (folder / "configuration_own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\n"
        f"Path({str(mark)!r}).touch()\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, model_type="own_llama", auto_map=auto_map)
    return mark


def test_code_of_a_model_does_not_run_without_the_flag(tmp_path: Path) -> None:
    mark = remote_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"'own_llama' comes with Python code.*--trust-remote-code"):
        peek(str(tmp_path))
    assert not mark.exists()


def test_code_of_a_model_runs_with_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    folder = tmp_path / "model"
    mark = remote_folder(folder)
    checkpoint = load(resolve(str(folder), trust_remote_code=True))
    assert mark.exists()
    assert type(checkpoint.model).__name__ == "OwnForCausalLM"


def test_a_built_in_model_type_never_needs_the_repositorys_code(tmp_path: Path) -> None:
    mark = remote_folder(tmp_path)
    edit_config(tmp_path, model_type="llama")
    info = peek(str(tmp_path))
    assert any("its own Python code is not run" in note for note in info.notes)
    load(info)
    assert not mark.exists()


def test_a_tokenizer_that_has_no_fast_version_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path)
    drop_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "a": 1, "b": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    with pytest.raises(UnsupportedModelError, match=r"CTRLTokenizer has no fast version.*tokenizer.json"):
        peek(str(tmp_path))


# --- the tokenizer that a bundle carries -----------------------------------------------------------------------------


@pytest.fixture(params=["folder", "gguf"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """(files that write_tokenizer wrote, folder in transformers' layout)."""
    source = tmp_path / "source"
    model = save_folder(source)
    where = source if request.param == "folder" else write_gguf(tmp_path / "m.gguf", model)
    write_tokenizer(peek(str(where)), tmp_path / "out" / "tokenizer")
    return tmp_path / "out" / "tokenizer", source


def test_exactly_four_files_are_written(written: tuple[Path, Path]) -> None:
    assert sorted(path.name for path in written[0].iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in written[0].parent.iterdir()] == ["tokenizer"]


def test_written_tokenizer_encodes_and_decodes_as_the_source_does(written: tuple[Path, Path]) -> None:
    ours = Tokenizer.from_file(str(written[0] / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(written[1])
    for text in (TEXT, "<|im_start|>user\n 12 <tool>x<|im_end|>", "", "😀 e\u0301"):
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        for skip in (False, True):
            ids = ours.encode(text).ids
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_written_chat_template_renders_as_transformers_renders_it(written: tuple[Path, Path]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (written[0] / "chat_template.jinja").read_text()
    )
    expected = AutoTokenizer.from_pretrained(written[1]).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert template.render(messages=messages, add_generation_prompt=True) == expected


def test_end_ids_are_a_list(written: tuple[Path, Path]) -> None:
    values = json.loads((written[0] / "generation_config.json").read_text())
    assert values["eos_token_id"][0] == 2
    assert (values["bos_token_id"], values["pad_token_id"]) == (0, 0)


def test_generation_defaults_of_the_checkpoint_are_kept(tmp_path: Path) -> None:
    save_folder(tmp_path / "m")
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[2, 0], do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1
    )
    generation.save_pretrained(tmp_path / "m")
    write_tokenizer(peek(str(tmp_path / "m")), tmp_path / "t")
    values = json.loads((tmp_path / "t" / "generation_config.json").read_text())
    assert values["eos_token_id"] == [2, 0]
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    assert {name: values[name] for name in sampling} == sampling


def test_truncation_and_padding_of_a_checkpoint_do_not_reach_the_bundle(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.backend_tokenizer.save(str(tmp_path / "cutting.json"))
    save_folder(tmp_path / "m")
    (tmp_path / "cutting.json").rename(tmp_path / "m" / "tokenizer.json")
    write_tokenizer(peek(str(tmp_path / "m")), tmp_path / "t")
    written = Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    assert written.encode(TEXT).ids == tiny_tokenizer()(TEXT)["input_ids"]
    assert (written.truncation, written.padding) == (None, None)


def test_a_model_without_chat_template_gets_none(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", tokenizer=tiny_tokenizer(chat_template=None))
    write_tokenizer(peek(str(tmp_path / "m")), tmp_path / "t")
    assert not (tmp_path / "t" / "chat_template.jinja").exists()


def test_a_place_that_cannot_be_written_is_a_resource_error(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="cannot write the tokenizer to"):
        write_tokenizer(peek(str(saved)), tmp_path / "file" / "tokenizer")


def test_chat_template_is_the_one_of_the_checkpoint(written: tuple[Path, Path]) -> None:
    assert (written[0] / "chat_template.jinja").read_text() == CHAT_TEMPLATE


# --- config names ----------------------------------------------------------------------------------------------------


LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 77, "vocab_size": 99}, (3, 48, 4, 4, 12, 77)),
        ("gptj", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 77, "vocab_size": 99}, (3, 48, 4, 4, 12, 77)),
        (
            "gpt_neo",
            {
                "num_heads": 4,
                "num_layers": 2,
                "hidden_size": 64,
                "vocab_size": 99,
                "attention_types": [[["global"], 2]],
            },
            (2, 64, 4, 4, 16, 2048),
        ),
        ("llama", LLAMA | {"num_key_value_heads": 2, "head_dim": 24}, (2, 64, 4, 2, 24, 2048)),
        ("qwen2", LLAMA | {"num_key_value_heads": 1, "max_position_embeddings": 50}, (2, 64, 4, 1, 16, 50)),
        ("cohere2", LLAMA | {"num_key_value_heads": 2}, (2, 64, 4, 2, 16, 8192)),  # not known to Optimum
        ("gemma3", {"text_config": LLAMA | {"num_key_value_heads": 2, "head_dim": 32}}, (2, 64, 4, 2, 32, 131072)),
    ],
)
def test_sizes_are_found_under_every_familys_names(
    model_type: str, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    shape = model_shape(transformers.AutoConfig.for_model(model_type, **config))
    sizes = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    assert (*sizes, shape.max_positions) == expected
    assert shape.vocab_rows == 99


def test_kv_bytes_are_those_of_a_real_cache(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    cache = model(torch.zeros(1, 10, dtype=torch.int64), use_cache=True).past_key_values
    real = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert peek(str(saved)).shape.kv_bytes(10) == real


def test_a_chat_template_that_the_runtime_refuses_is_found_before_the_weights(tmp_path: Path) -> None:
    save_folder(tmp_path / "broken", tiny_model(), tiny_tokenizer(chat_template="{% if %}"))
    with pytest.raises(CheckpointError, match=r"broken: the runtime cannot use its tokenizer: chat_template.jinja: "):
        check_tokenizer(peek(str(tmp_path / "broken")))


@pytest.mark.parametrize("template", ["{{ raise_exception('only tools') }}", None])
def test_a_template_that_wants_other_messages_or_none_at_all_is_no_fault(tmp_path: Path, template: str | None) -> None:
    save_folder(tmp_path / "m", tiny_model(), tiny_tokenizer(chat_template=template))
    check_tokenizer(peek(str(tmp_path / "m")))


def test_a_skeleton_has_the_model_s_parts_and_no_memory(tmp_path: Path) -> None:
    model = save_folder(tmp_path / "m", tiny_model())
    empty = skeleton(peek(str(tmp_path / "m")))
    assert {name: value.shape for name, value in empty.named_parameters()} == {
        name: value.shape for name, value in model.named_parameters()
    }
    assert all(value.is_meta for value in empty.parameters())
