"""Sources of a model: a Hugging Face folder, a GGUF file or a hub id, read in two steps.

resolve(text) → Source            what the text names; nothing is read but file names
peek(source)  → CheckpointInfo    config, tokenizer, sizes: cheap, for every check that comes before work
load(info)    → Checkpoint        fp32 weights in memory
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftc.export import hub
from draftc.export.configs import ModelShape, model_shape
from draftc.export.weights import Weights, find_weights, fingerprint, one_line, read_weights
from draftc.runtime.errors import BundleError, CheckpointError, ResourceError, UsageError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "Source",
    "check_tokenizer",
    "load",
    "peek",
    "resolve",
    "skeleton",
    "write_tokenizer",
]

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
WRITTEN = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Source:
    """What a source string names. `location` is a folder or a .gguf file; `name` is what the user wrote."""

    kind: Literal["folder", "gguf", "hub"]
    name: str
    location: Path
    repo: str | None = None
    trust_remote_code: bool = False

    @property
    def commit(self) -> str | None:
        """The hub commit that was resolved, None for local sources."""
        return self.location.name if self.kind == "hub" else None


@dataclass(frozen=True)
class CheckpointInfo:
    """Everything about a checkpoint but its weights.

    parameters: distinct parameters, a tied head counted once. parameters_per_token: those that one decoding step
    multiplies with: all but the embedding table (unless it is the head too) and experts that are not chosen.
    expert_parameters: those of all experts. experts_per_token: those of the experts that one token chooses in one layer
    (the largest of the layers). weight_bytes: size of the stored weights. notes: what a user should know, a line each.
    """

    source: Source
    config: "PreTrainedConfig" = field(repr=False)
    tokenizer: "PreTrainedTokenizerFast" = field(repr=False)
    generation_config: "GenerationConfig" = field(repr=False)
    shape: ModelShape
    parameters: int
    parameters_per_token: int
    weight_bytes: int
    tied: bool
    licence: str | None
    notes: tuple[str, ...] = ()
    expert_parameters: int = 0
    experts_per_token: int = 0

    @property
    def token_ids(self) -> int:
        """Ids that the tokenizer can mean: its largest token id + 1, at most the rows of the logits."""
        return min(max(self.tokenizer.get_vocab().values()) + 1, self.shape.vocab_rows)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: fp32, in eval mode, no gradients. `fingerprint` is `weights.fingerprint` of the weight files."""

    info: CheckpointInfo
    model: "PreTrainedModel" = field(repr=False)
    fingerprint: str


def resolve(source: str, *, trust_remote_code: bool = False) -> Source:
    """Decide what `source` is; of a hub id, fetch config and tokenizer files.

    Raises CheckpointError, with what was looked for, if it is nothing of that.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(path.glob("*.gguf"))
            hint = f"pass the file {ggufs[0]}" if ggufs else "name the folder that holds config.json and *.safetensors"
            raise CheckpointError(f"{source}: not a model folder: looked for config.json and found none; {hint}")
        return Source("folder", source, path.resolve(), trust_remote_code=trust_remote_code)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"{source}: a file, but not .gguf; pass its folder, a .gguf file or a hub id org/name"
            )
        return Source("gguf", source, path.resolve())
    parsed = hub.parse_hub_id(source)
    if parsed is None or path.suffix.lower() == ".gguf":
        raise CheckpointError(
            f"{source!r}: not a model: looked for a folder with config.json, an existing .gguf file and a hub id "
            "org/name; check the spelling"
        )
    repo, revision = parsed
    folder = hub.download_files(repo, revision, remote_code=trust_remote_code)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"hub model {repo!r} has no config.json; choose a repository in transformers' layout")
    return Source("hub", source, folder, repo=repo, trust_remote_code=trust_remote_code)


def peek(source: Source | str) -> CheckpointInfo:
    """Read config, tokenizer and weight headers.

    Raises CheckpointError for missing, truncated, corrupt or pickled files, and UnsupportedModelError for a model that
    draftc refuses.
    """
    if isinstance(source, str):
        source = resolve(source)
    return _peek_gguf(source) if source.kind == "gguf" else _peek_folder(source)


def load(
    source: Source | CheckpointInfo, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Checkpoint:
    """Load the weights as fp32. progress: called with (elements done, elements in all); raises like `peek`."""
    info = peek(source) if isinstance(source, Source) else source
    if info.source.kind == "gguf":
        from draftc.export.gguf import GgufFile
        from draftc.export.gguf_model import load_model, model_shapes

        file = GgufFile(info.source.location)
        with one_line(info.source.name, "its weights"):
            model = load_model(file, info.config, progress)
        info = _with_sizes(info, model_shapes(file, bool(info.config.tie_word_embeddings)))
        files: tuple[Path, ...] = (info.source.location,)
    else:
        from draftc.export import folder

        if info.source.kind == "hub":
            hub.download_weights(str(info.source.repo), info.source.location.name)
        files = find_weights(info.source.location)
        read_weights(files)
        model = folder.load_model(info.source, info.config)
        progress(info.parameters, info.parameters)
    model.train(False).requires_grad_(False)
    return Checkpoint(info, model, fingerprint(files))


def write_tokenizer(info: CheckpointInfo, folder: Path) -> None:
    """Write the four files that the runtime reads: tokenizer.json, tokenizer_config.json, chat_template.jinja (if the
    model has one) and generation_config.json (bos, pad, a list of end ids, default sampling).

    Raises ResourceError when a file cannot be written.
    """
    generation = info.generation_config
    ends = generation.eos_token_id if generation.eos_token_id is not None else info.tokenizer.eos_token_id
    values: dict[str, Any] = {
        "bos_token_id": _first(generation.bos_token_id, info.tokenizer.bos_token_id),
        "pad_token_id": _first(generation.pad_token_id, info.tokenizer.pad_token_id),
        "eos_token_id": [] if ends is None else [ends] if isinstance(ends, int) else list(ends),
    }
    values |= {name: getattr(generation, name, None) for name in SAMPLING}
    text = json.dumps({name: value for name, value in values.items() if value is not None}, indent=2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            info.tokenizer.save_pretrained(temporary)  # may write more files than the runtime reads
            for name in WRITTEN:
                if (written := Path(temporary, name)).is_file():
                    shutil.move(written, folder / name)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write the tokenizer to {folder}: {error}; choose another place") from error


def check_tokenizer(info: CheckpointInfo) -> None:
    """Write the tokenizer to a temporary folder and open it as the runtime will.

    Raises CheckpointError, with the source and the cause, where the runtime refuses it or its chat template.
    """
    from draftc.runtime.text import Tokenizer

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "tokenizer")
        write_tokenizer(info, folder)
        try:
            tokenizer = Tokenizer.from_folder(folder)
            if tokenizer.has_chat_template:
                tokenizer.render_chat([{"role": "user", "content": "Hello"}])
        except UsageError:
            return  # a template that compiles may refuse these messages
        except BundleError as error:
            cause = str(error).replace(f"{folder}/", "")
            raise CheckpointError(
                f"{info.source.name}: the runtime cannot use its tokenizer: {cause}; correct that file beside the "
                "weights"
            ) from error


def skeleton(info: CheckpointInfo) -> "PreTrainedModel":
    """The model without memory for its weights (torch's meta device): for what only its code knows."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            info.config, trust_remote_code=info.source.trust_remote_code
        )
    return model


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _peek_gguf(source: Source) -> CheckpointInfo:
    from draftc.export.gguf import GgufFile
    from draftc.export.gguf_model import HEAD, build_config, build_generation_config, build_tokenizer, model_shapes

    file = GgufFile(source.location)
    with one_line(source.name, "its metadata"):
        config = build_config(file)
        tokenizer = build_tokenizer(file)
        generation_config = build_generation_config(file)
    _check_supported(config)
    tied = bool(config.tie_word_embeddings)
    notes = (
        ["head and embedding are stored as two roundings of one matrix: tied again"]
        if tied and HEAD in file.tensors
        else []
    )
    return _info(
        source,
        config,
        tokenizer,
        generation_config,
        Weights(model_shapes(file, tied), sum(tensor.nbytes for tensor in file.tensors.values())),
        licence=file.metadata.get("general.license"),
        notes=notes,
    )


def _peek_folder(source: Source) -> CheckpointInfo:
    from draftc.export import folder

    config = folder.read_config(source)
    _check_supported(config)
    if source.kind == "hub":
        weights = hub.remote_weights(str(source.repo), source.location)
    else:
        weights = read_weights(find_weights(source.location))
    note = folder.remote_code_note(source)
    return _info(
        source,
        config,
        folder.read_tokenizer(source),
        folder.read_generation_config(source, config),
        weights,
        licence=folder.read_licence(source),
        notes=[note] if note else [],
    )


def _check_supported(config: "PreTrainedConfig") -> None:
    from draftc.export.families import check_supported

    check_supported(config)


def _info(
    source: Source,
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerFast",
    generation_config: "GenerationConfig",
    weights: Weights,
    *,
    licence: str | None,
    notes: list[str],
) -> CheckpointInfo:
    shape = model_shape(config)
    if len(ids := tokenizer.get_vocab()) == 0:
        raise CheckpointError(f"{source.name}: its tokenizer is empty; save the right one beside the weights")
    if max(ids.values()) >= shape.vocab_rows:
        beyond = [token for token, index in ids.items() if index >= shape.vocab_rows]
        notes = [
            *notes,
            f"{len(beyond)} tokens have no row in the model ({beyond[0]!r}, …): prompts that use them fail",
        ]
    info = CheckpointInfo(
        source,
        config,
        tokenizer,
        generation_config,
        shape,
        parameters=0,
        parameters_per_token=0,
        weight_bytes=weights.nbytes,
        tied=False,
        licence=licence,
        notes=tuple(notes),
    )
    return _with_sizes(info, weights.shapes)


def _with_sizes(info: CheckpointInfo, shapes: dict[str, tuple[int, ...]]) -> CheckpointInfo:
    """Count parameters from the shapes of stored tensors."""
    text: Any = info.config.get_text_config()
    tied = bool(getattr(text, "tie_word_embeddings", getattr(info.config, "tie_word_embeddings", False)))
    embedding = next((prod(shape) for name, shape in shapes.items() if name.endswith(EMBEDDINGS)), 0)
    head = next((prod(shape) for name, shape in shapes.items() if name.endswith(HEADS)), 0)
    parameters = sum(prod(shape) for shape in shapes.values()) - (head if tied and embedding else 0)
    layers: dict[str, int] = {}  # parameters of each layer's experts
    for name, dimensions in shapes.items():
        layer, found, _ = name.partition(".experts.")
        if found:
            layers[layer] = layers.get(layer, 0) + prod(dimensions)
    count = _first(getattr(text, "num_experts", None), getattr(text, "num_local_experts", None), 1)
    chosen = min(getattr(text, "num_experts_per_tok", None) or count, count)
    experts = sum(layers.values())
    idle = experts * (count - chosen) // count
    per_token = parameters - (0 if tied else embedding) - idle
    return replace(
        info,
        parameters=parameters,
        parameters_per_token=per_token,
        tied=tied,
        expert_parameters=experts,
        experts_per_token=max(layers.values(), default=0) * chosen // count,
    )
