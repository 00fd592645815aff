"""A folder in Hugging Face's layout: its config, its tokenizer and its weights, through transformers' own readers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from draftc.export.weights import one_line, read_json
from draftc.runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from draftc.export.checkpoint import Source

__all__ = ["load_model", "read_config", "read_generation_config", "read_licence", "read_tokenizer", "remote_code_note"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def read_config(source: "Source") -> PreTrainedConfig:
    """The config; raises CheckpointError if it cannot be read or brings code that was not allowed, and
    UnsupportedModelError for a model type that transformers does not know or weights that are quantized already.
    """
    raw = read_json(source.location / "config.json")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{source.name}: config.json has no model_type; it is not a transformers model folder")
    if model_type not in transformers.CONFIG_MAPPING and not source.trust_remote_code:
        if "auto_map" in raw:
            raise CheckpointError(
                f"{source.name}: model type {model_type!r} comes with Python code of its own (auto_map), which would "
                "run here; pass --trust-remote-code if you trust it"
            )
        raise UnsupportedModelError(
            f"{source.name}: model type {model_type!r} is not known to transformers {transformers.__version__}; "
            "upgrade it"
        )
    if isinstance(quantization := raw.get("quantization_config"), dict):
        method = quantization.get("quant_method", "unknown method")
        raise UnsupportedModelError(
            f"{source.name}: its weights are quantized ({method}); pass the unquantized model, draftc quantizes it"
        )
    with one_line(source.name, "its config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source.location, trust_remote_code=source.trust_remote_code, local_files_only=True
        )
    return config


def remote_code_note(source: "Source") -> str | None:
    """What to tell about Python code that the folder brings and that is not run, None if there is none."""
    if source.trust_remote_code or "auto_map" not in read_json(source.location / "config.json"):
        return None
    return "its own Python code is not run: transformers has this model type built in"


def read_tokenizer(source: "Source") -> PreTrainedTokenizerFast:
    """The fast tokenizer; raises CheckpointError if there is none, UnsupportedModelError if only a slow one."""
    if not any((source.location / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{source.name}: no tokenizer: looked for {', '.join(TOKENIZER_FILES)}; save it beside the weights"
        )
    with one_line(source.name, "its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=source.trust_remote_code, local_files_only=True
        )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedModelError(
            f"{source.name}: {type(tokenizer).__name__} has no fast version, and the runtime reads only "
            "tokenizer.json; save a tokenizer.json beside the weights"
        )
    tokenizer.backend_tokenizer.no_truncation()  # some models ship with one, which would cut prompts silently
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def read_generation_config(source: "Source", config: PreTrainedConfig) -> GenerationConfig:
    """The folder's generation_config.json, or what the config says about generation."""
    with one_line(source.name, "its generation_config.json"):
        if (source.location / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(source.location, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def read_licence(source: "Source") -> str | None:
    """The `license:` line of the model card's front matter."""
    readme: Path = source.location / "README.md"
    if not readme.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:\s*([^\s#]+)", front[1], re.MULTILINE) if front else None
    return found[1].strip("'\"") if found else None


def load_model(source: "Source", config: PreTrainedConfig) -> PreTrainedModel:
    """The fp32 model; raises CheckpointError if the files do not fill every parameter."""
    with one_line(source.name, "its weights"), _no_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=source.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise CheckpointError(
            f"{source.name}: {len(missing)} parameters are not in the weight files, first {missing[0]}; "
            "download it again"
        )
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without transformers' progress bars: draftc shows its own, or none."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
