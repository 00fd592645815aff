"""Two tiny tokenizers, trained here: the two kinds that decoder-only checkpoints come with."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LATIN = "the quick brown fox jumps over the lazy dog, and then the fox sleeps.\nHello world! def fib(n): return n\n"
MIXED = LATIN + "你好，世界。今天天气很好。😀😁👩‍👩‍👧 naïve café façade ελληνικά\n"


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2, Llama 3 or Qwen: byte-level BPE, here with ChatML's special tokens and no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [MIXED] * 3,
        trainers.BpeTrainer(
            vocab_size=420,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    # Added tokens that are not special are kept as they are: one of byte-level letters, one with a space and CJK.
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<工具 call>", special=False)])
    return tokenizer


def llama_tokenizer() -> Tokenizer:
    """As Llama 2 or Mistral: a metaspace for each space, bytes for what the vocabulary lacks, BOS before a prompt."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [LATIN.replace("\n", " ") + "你好"] * 3, trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "▁▁"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(dict.fromkeys(tokens))},
            merges=[tuple(pair) for pair in model["merges"]] + [("▁", "▁")],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder of the byte-level kind."""
    config: dict[str, object] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return write_folder(tmp_path_factory.mktemp("byte_level"), byte_level_tokenizer(), config)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder of the byte-fallback kind."""
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    eos = {"__type": "AddedToken", "content": "</s>", **flags}
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>"}
    return write_folder(tmp_path_factory.mktemp("llama"), llama_tokenizer(), config)
