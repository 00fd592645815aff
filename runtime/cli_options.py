"""The options that several subcommands share: one declaration each, so that they are called and explained alike.

Ranges are checked by the API, whose messages name the value and what is allowed; nothing is checked twice here.
"""

import inspect
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

import typer

from draftc.runtime.errors import UsageError
from draftc.runtime.request import Options

__all__ = [
    "BundleFolder",
    "CheckHashes",
    "CudaGraph",
    "Device",
    "DraftDevice",
    "FrequencyPenalty",
    "IgnoreEos",
    "MaxNewTokens",
    "Method",
    "MinP",
    "Opening",
    "Plain",
    "PresencePenalty",
    "Prompts",
    "ProviderOptions",
    "RepetitionPenalty",
    "Seed",
    "ShowDrafts",
    "SpeculativeTokens",
    "Stop",
    "System",
    "TargetDevice",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "Tune",
    "given",
    "help_text",
    "method_of",
    "opening",
]

SAMPLING = "Sampling"
SPECULATION = "Speculation"
ENGINE = "Engine"
OWN = "Default: the checkpoint's own."

BundleFolder = Annotated[Path, typer.Argument(metavar="OUT", help="The bundle: the output folder of `draftc compile`.")]

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE.jsonl",
        help='One {"id", "prompt"} or {"id", "messages"} a line. Default: eight built-in prompts.',
    ),
]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", help="Stop after this many tokens. Default: what fits.")
]
System = Annotated[str | None, typer.Option("--system", help="System prompt of the conversation.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text; may be given several times. Default: none.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end tokens.")]
ShowDrafts = Annotated[
    bool,
    typer.Option(
        "--show-drafts",
        help="Mark where each token came from: accepted proposals green, the target's corrections yellow, bonus tokens "
        "cyan; without colours as {+accepted+} {!corrected!} {*bonus*}.",
    ),
]

Temperature = Annotated[
    float | None, typer.Option("--temperature", help=f"0 is greedy. {OWN}", rich_help_panel=SAMPLING)
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help=f"Keep the k likeliest tokens; 0 is off. {OWN}", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help=f"Keep the likeliest tokens of this mass; 1 is off. {OWN}", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", help=f"Drop tokens below this share of the likeliest; 0 is off. {OWN}", rich_help_panel=SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", help=f"1 is off. {OWN}", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", help="Default: 0, which is off.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option("--frequency-penalty", help="Default: 0, which is off.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Same settings and seed, same text. Default: random.", rich_help_panel=SAMPLING),
]

SpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="K, tokens proposed per verification; with auto at most so many. Default: auto's choice.",
        rich_help_panel=SPECULATION,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="auto|draft_model|ngram",
        help="Where proposals come from. Default: auto, by measured costs; the bundle's with --no-tune.",
        rich_help_panel=SPECULATION,
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Decode with the target alone, for comparison.", rich_help_panel=SPECULATION)
]

Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda|cuda:N",
        help="Where the models run. Default: what the bundle was compiled for.",
        rich_help_panel=ENGINE,
    ),
]
TargetDevice = Annotated[
    str | None,
    typer.Option("--target-device", metavar="DEVICE", help="… the target alone.", rich_help_panel=ENGINE),
]
DraftDevice = Annotated[
    str | None,
    typer.Option("--draft-device", metavar="DEVICE", help="… the draft model alone.", rich_help_panel=ENGINE),
]
CudaGraph = Annotated[
    bool,
    typer.Option(
        "--cuda-graph/--no-cuda-graph",
        help="On a GPU: replay calls of a shape that came before as one CUDA graph.",
        rich_help_panel=ENGINE,
    ),
]
ProviderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--provider-option",
        metavar="KEY=VALUE",
        help="For ONNX Runtime's CUDA provider, as gpu_mem_limit=8589934592. May be given several times.",
        rich_help_panel=ENGINE,
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Threads per graph. Default: one per core.", rich_help_panel=ENGINE)
]
CheckHashes = Annotated[
    bool,
    typer.Option(
        "--check-hashes/--no-check-hashes",
        help="Compare every file with its sha256 (about a second per 1.5 GB).",
        rich_help_panel=ENGINE,
    ),
]

Tune = Annotated[
    bool,
    typer.Option(
        "--tune/--no-tune",
        help="Measure what calls cost, where that is not known of this machine yet (see `draftc tune`). Without a "
        "profile, the bundle's own method and K are used.",
        rich_help_panel=ENGINE,
    ),
]


class Opening(TypedDict):
    """Arguments of `draftc.runtime.open` behind the folder."""

    device: str | None
    target_device: str | None
    draft_device: str | None
    threads: int | None
    cuda_graph: bool
    provider_options: dict[str, str]
    check_hashes: bool
    tune: bool


def opening(
    device: str | None,
    target_device: str | None,
    draft_device: str | None,
    threads: int | None,
    cuda_graph: bool,
    provider_options: list[str] | None,
    check_hashes: bool,
    tune: bool,
) -> Opening:
    """What the options of this panel mean to `draftc.runtime.open`. Raises UsageError for one that is not KEY=VALUE."""
    pairs: dict[str, str] = {}
    for option in provider_options or []:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise UsageError(f"--provider-option takes KEY=VALUE, as gpu_mem_limit=8589934592, got {option!r}")
        pairs[key] = value
    return {
        "device": device,
        "target_device": target_device,
        "draft_device": draft_device,
        "threads": threads,
        "cuda_graph": cuda_graph,
        "provider_options": pairs,
        "check_hashes": check_hashes,
        "tune": tune,
    }


def given(**options: Any) -> Options:
    """The options that were given on the command line: the API knows the others' defaults."""
    return cast(Options, {name: value for name, value in options.items() if value not in (None, [])})


def method_of(method: str | None, plain: bool, k: int | None = None) -> str | None:
    """The `method` to ask the API for. Raises UsageError for --plain beside --method or -k."""
    if plain and k is not None:
        raise UsageError(f"--plain decodes without a drafter and -k {k} sets how far one goes: give one of the two")
    if plain and method is not None:
        raise UsageError(f"--plain decodes without a drafter and --method {method} asks for one: give one of the two")
    return "plain" if plain else method


def help_text(docstring: str) -> str:
    """`docstring` with every paragraph on one line, as a terminal of any width wants it; indented lines are kept."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if "\n " in text else text.replace("\n", " ") for text in paragraphs)
