"""The runtime's subcommands: arguments in, one call of the API, output and exit code out.

Opening a bundle, generating and measuring live in the API; how things are written lives in `console`, `chat` and
`inspection`. What a command raises becomes one line and an exit code in `cli`.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from draftc.runtime import cli_options as cli
from draftc.runtime.bundle import open_bundle
from draftc.runtime.chat import Chat
from draftc.runtime.console import (
    AnswerWriter,
    follow,
    generation_record,
    legend,
    note,
    opened,
    print_json,
    stats_line,
)
from draftc.runtime.errors import UsageError
from draftc.runtime.inspection import bundle_record, print_bundle
from draftc.runtime.measure_commands import bench, tune, verify
from draftc.runtime.session import Prompt

__all__ = ["chat", "inspect", "register", "run"]

EXIT_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the runtime's subcommands to `app`."""
    for command in (run, chat, verify, bench, tune, inspect):
        text = cli.help_text(command.__doc__ or "")
        app.command(command.__name__, help=text, short_help=text.partition(".")[0] + ".")(cli.spread(command))


def run(
    out: cli.BundleFolder,
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", metavar="FILE|-", help="Read it from a file, or from standard input (-)."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Put it through the chat template. Default: only with --system."),
    ] = None,
    system: cli.System = None,
    max_new_tokens: cli.MaxNewTokens = None,
    stop: cli.Stop = None,
    ignore_eos: cli.IgnoreEos = False,
    echo: Annotated[bool, typer.Option("--echo", help="Begin the text with the prompt.")] = False,
    show_drafts: cli.ShowDrafts = False,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Figures on stderr at the end.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: the tokens' log probabilities.")] = False,
    decoding: cli.Decoding,
    opening: cli.Opening,
) -> None:
    """Generate text from a prompt. The text goes to stdout as it is made, figures go to stderr.

    The prompt is taken from standard input where neither -p nor --prompt-file is given; one newline at the end of a
    file or of standard input is not part of it. Ctrl-C keeps what there is and exits with 130.

    Examples:
      draftc run out -p "def fib(n):" -n 64
      draftc run out --chat -p "What is a KV cache?" --show-drafts
      draftc run out --prompt-file question.txt --temperature 0.7 --seed 1 --json
    """
    if logprobs and not json:
        raise UsageError("--logprobs are part of the JSON output: add --json")
    if show_drafts and json:
        raise UsageError("--show-drafts marks the text and --json prints none: give one of the two")
    options = decoding.options(
        max_new_tokens=max_new_tokens, stop=stop, ignore_eos=ignore_eos, echo=echo, logprobs=logprobs
    )
    request = _request(_prompt_text(prompt, prompt_file), chat, system)
    writer = None if json else AnswerWriter(show_drafts)
    with opened(out, **opening.arguments()) as session:
        with session.stream(request, **options) as stream:
            if writer and show_drafts:
                legend(writer.coloured)
            result = follow(stream, writer)
        default = session.tokenizer.defaults.temperature
    if json:
        print_json(generation_record(result))
    if stats:
        temperature = default if decoding.temperature is None else decoding.temperature
        note(stats_line(result, seed=temperature > 0))
    if result.finish_reason == "cancelled":
        raise typer.Exit(EXIT_INTERRUPTED)


def chat(
    out: cli.BundleFolder,
    *,
    system: cli.System = None,
    max_new_tokens: cli.MaxNewTokens = None,
    stop: cli.Stop = None,
    show_drafts: cli.ShowDrafts = False,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Figures on stderr after every answer.")] = False,
    decoding: cli.Decoding,
    opening: cli.Opening,
) -> None:
    """Talk with the model. Each turn prefills only what is new, since the KV cache of the conversation is kept.

    Commands: /help /reset /system TEXT /undo /stats /exit. A line that ends in a backslash goes on in the next one.
    Ctrl-C stops an answer, which stays in the conversation as far as it got; Ctrl-D ends the chat. When the
    conversation outgrows the bundle, its oldest turns are forgotten, with a note. Without a terminal, every line of
    standard input is a message.

    Examples:
      draftc chat out
      draftc chat out --system "You answer in one sentence." --temperature 0.7
    """
    options = decoding.options(max_new_tokens=max_new_tokens, stop=stop)
    with opened(out, **opening.arguments()) as session:
        conversation = Chat(session, options, system, show_drafts, stats)
        if show_drafts:
            legend(AnswerWriter().coloured)
        conversation.run()


def inspect(
    out: cli.BundleFolder,
    files: Annotated[bool, typer.Option("--files", help="List every file with its size and sha256.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole manifest as JSON.")] = False,
    check_hashes: cli.CheckHashes = True,
) -> None:
    """Show what is in a bundle. Models, precision, lengths, tensors, parity, licences; no graph is loaded.

    Examples:
      draftc inspect out
      draftc inspect out --files --no-check-hashes
      draftc inspect out --json
    """
    manifest = open_bundle(out, hashes=check_hashes).manifest
    if json:
        print_json(bundle_record(manifest))
    else:
        print_bundle(manifest, files)


def _prompt_text(prompt: str | None, file: str | None) -> str:
    """The prompt, from wherever it is. Raises UsageError when it is given twice, nowhere, or not as text."""
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompt-file both give a prompt: keep one of them")
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give -p TEXT or --prompt-file FILE, or pipe it in")
    try:
        text = sys.stdin.read() if file in (None, "-") else Path(str(file)).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        source = "standard input" if file in (None, "-") else file
        raise UsageError(f"{source}: the prompt is not {error.encoding} text, at byte {error.start}") from error
    return text.removesuffix("\n")


def _request(prompt: str, chat: bool | None, system: str | None) -> Prompt:
    if chat is False and system is not None:
        raise UsageError("--system is for conversations and --no-chat asks for plain text: give one of the two")
    if not chat and system is None:
        return prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]
