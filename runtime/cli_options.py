"""The options that several subcommands share: one declaration each, so that they are called and explained alike.

Options that go together are a dataclass: a command takes it as one parameter, and `spread` shows typer its fields.
Ranges are checked by the API, whose messages name the value and what is allowed; nothing is checked twice here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from draftc.runtime.errors import UsageError
from draftc.runtime.request import Options

__all__ = [
    "BundleFolder",
    "CheckHashes",
    "Decoding",
    "Engines",
    "IgnoreEos",
    "MaxNewTokens",
    "Opening",
    "Prompts",
    "ShowDrafts",
    "Stop",
    "System",
    "help_text",
    "spread",
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
CheckHashes = Annotated[
    bool,
    typer.Option(
        "--check-hashes/--no-check-hashes",
        help="Compare every file with its sha256 (about a second per 1.5 GB).",
        rich_help_panel=ENGINE,
    ),
]


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen and proposed."""

    temperature: Annotated[
        float | None, typer.Option("--temperature", help=f"0 is greedy. {OWN}", rich_help_panel=SAMPLING)
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help=f"Keep the k likeliest tokens; 0 is off. {OWN}", rich_help_panel=SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", help=f"Keep the likeliest tokens of this mass; 1 is off. {OWN}", rich_help_panel=SAMPLING
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", help=f"Drop tokens below this share of the likeliest; 0 is off. {OWN}", rich_help_panel=SAMPLING
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help=f"1 is off. {OWN}", rich_help_panel=SAMPLING)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option("--presence-penalty", help="Default: 0, which is off.", rich_help_panel=SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option("--frequency-penalty", help="Default: 0, which is off.", rich_help_panel=SAMPLING)
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Same settings and seed, same text from a fresh start. Default: random.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="K, tokens proposed per verification; with auto at most so many. Default: auto's choice.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="auto|draft_model|ngram",
            help="Where proposals come from. Default: auto, by measured costs; the bundle's with --no-tune.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode with the target alone, for comparison.", rich_help_panel=SPECULATION)
    ] = False

    def options(self, **more: Any) -> Options:
        """What was given on the command line, with `more` of it: the API knows the others' defaults.

        Raises UsageError for --plain beside --method or -k.
        """
        k, method = self.num_speculative_tokens, self.method
        if self.plain and (k is not None or method is not None):
            other = f"-k {k} sets how far one goes" if k is not None else f"--method {method} asks for one"
            raise UsageError(f"--plain decodes without a drafter and {other}: give one of the two")
        options = {name: value for name, value in (vars(self) | more).items() if value not in (None, [])}
        if options.pop("plain"):
            options["method"] = "plain"
        return cast(Options, options)


@dataclass(frozen=True)
class Engines:
    """Where and how a bundle's graphs run."""

    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="cpu|cuda|cuda:N",
            help="Where the models run. Default: what the bundle was compiled for.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    target_device: Annotated[
        str | None,
        typer.Option("--target-device", metavar="DEVICE", help="… the target alone.", rich_help_panel=ENGINE),
    ] = None
    draft_device: Annotated[
        str | None,
        typer.Option("--draft-device", metavar="DEVICE", help="… the draft model alone.", rich_help_panel=ENGINE),
    ] = None
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads per graph. Default: one per core.", rich_help_panel=ENGINE)
    ] = None
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph/--no-cuda-graph",
            help="On a GPU: replay calls of a shape that came before as one CUDA graph.",
            rich_help_panel=ENGINE,
        ),
    ] = True
    provider_options: Annotated[
        list[str] | None,
        typer.Option(
            "--provider-option",
            metavar="KEY=VALUE",
            help="For ONNX Runtime's CUDA provider, as gpu_mem_limit=8589934592. May be given several times.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    check_hashes: CheckHashes = True

    def arguments(self) -> dict[str, Any]:
        """These options for `draftc.runtime.open`. Raises UsageError for a provider option that is not KEY=VALUE."""
        pairs: dict[str, str] = {}
        for option in self.provider_options or []:
            key, equals, value = option.partition("=")
            if not key or not equals:
                raise UsageError(f"--provider-option takes KEY=VALUE, as gpu_mem_limit=8589934592, got {option!r}")
            pairs[key] = value
        return vars(self) | {"provider_options": pairs}


@dataclass(frozen=True)
class Opening(Engines):
    """… and whether their costs are measured first."""

    tune: Annotated[
        bool,
        typer.Option(
            "--tune/--no-tune",
            help="Measure what calls cost, where that is not known of this machine yet (see `draftc tune`). Without a "
            "profile, the bundle's own method and K are used.",
            rich_help_panel=ENGINE,
        ),
    ] = True


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer takes it: in place of each parameter that is a dataclass of options, its fields."""
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        if not is_dataclass(one.annotation):
            parameters.append(one.replace(kind=one.KEYWORD_ONLY))
            continue
        groups[one.name] = one.annotation
        parameters += [
            inspect.Parameter(field.name, one.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in fields(one.annotation)
        ]

    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def help_text(docstring: str) -> str:
    """`docstring` with every paragraph on one line, as a terminal of any width wants it; indented lines are kept."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if "\n " in text else text.replace("\n", " ") for text in paragraphs)
