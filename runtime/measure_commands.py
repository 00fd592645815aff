"""The subcommands that judge a bundle on this machine: is it lossless, what do calls cost, how fast is it."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

import draftc.runtime as draftc
from draftc.runtime import bench as benchmark
from draftc.runtime import cli_options as cli
from draftc.runtime import cost_tables, selfcheck
from draftc.runtime.bench_tables import render
from draftc.runtime.console import opened, print_json, print_report, progress, to_json
from draftc.runtime.errors import UsageError
from draftc.runtime.manifest import PROFILE_NAME
from draftc.runtime.profiles import write_profile
from draftc.runtime.prompts import builtin_prompts, load_prompts
from draftc.runtime.tune import BUDGET_S

__all__ = ["bench", "tune", "verify"]

EXIT_FAULT = 1


def verify(
    out: cli.BundleFolder,
    *,
    prompts: cli.Prompts = None,
    budget: Annotated[
        float,
        typer.Option(
            "--budget",
            help="Seconds for the draws of the sampling test (60 draws per case are made whatever they take).",
        ),
    ] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No report, no progress: the exit code tells.")] = False,
    opening: cli.Opening,
) -> None:
    """Check on this machine that speculation loses nothing. Exits with 1 where it does.

    Greedy texts are compared with plain decoding, and every difference is called a near tie or a fault; sampled tokens
    are tested against the target's exact distribution; caches are rewound and compared with recomputation; prompts of
    awkward lengths are run.

    Examples:
      draftc verify out
      draftc verify out --budget 300 --json > report.json
    """
    with opened(out, quiet, **opening.arguments()) as session, progress(quiet) as on_progress:
        cases = builtin_prompts(session) if prompts is None else load_prompts(prompts)
        report = selfcheck.verify(session, prompts=cases, budget_s=budget, seed=seed, on_progress=on_progress)
    if json:
        print_json(report.to_dict())
    elif not quiet:
        print_report(selfcheck.render(report))
    if not report.passed:
        raise typer.Exit(EXIT_FAULT)


def bench(
    out: cli.BundleFolder,
    *,
    prompts: cli.Prompts = None,
    k: Annotated[str | None, typer.Option("-k", metavar="K,K,…", help="Values of K. Default: the bundle's.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="auto|draft_model|ngram",
            help="May be given several times. Default: all there are.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", help="Rounds; each figure of a prompt is their median.")] = 3,
    ignore_eos: cli.IgnoreEos = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every sampled answer.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json-file", metavar="FILE", help="Write the JSON here, beside the table.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    opening: cli.Opening,
) -> None:
    """Measure speculative against plain decoding. Both run in turns, in one process, on the same prompts.

    The JSON has one record per prompt and mode, so that other ratios can be computed from it.

    Examples:
      draftc bench out
      draftc bench out --prompts humaneval.jsonl -k 3,4 --method draft_model -n 256 --json-file bench.json
    """
    if json_file is not None:
        _check_writable("--json-file", json_file)
    sampling = draftc.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with opened(out, quiet, **opening.arguments()) as session, progress(quiet) as on_progress:
        report = benchmark.bench(
            session,
            prompts=builtin_prompts(session) if prompts is None else load_prompts(prompts),
            ks=[session.manifest.num_speculative_tokens] if k is None else _numbers(k),
            methods=method or None,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            sampling=sampling,
            seed=seed,
            ignore_eos=ignore_eos,
            threads=opening.threads,
            on_progress=on_progress,
        )
    if json:
        print_json(report.to_dict())
    else:
        print_report(render(report))
    if json_file is not None:  # last: if the disk is full by now, the figures are on the screen
        json_file.write_text(to_json(report.to_dict()), encoding="utf-8")


def tune(
    out: cli.BundleFolder,
    *,
    budget: Annotated[
        float, typer.Option("--budget", help="Seconds to measure for; three rounds are made whatever they take.")
    ] = BUDGET_S,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the curves into this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    engines: cli.Engines,
) -> None:
    """Measure what calls cost on this machine. The result, OUT/profile.json, decides how far to speculate.

    Calls of the target at each width of a verification, and of the draft model, are timed in turns at two fills of the
    cache. Without this command, the first use of a bundle measures the same into the user's cache. A profile holds for
    the machine, devices and threads that it was measured with; elsewhere it is ignored with a note.

    Examples:
      draftc tune out
      draftc tune out --threads 2 --budget 60 --png costs.png
    """
    if png is not None:
        cost_tables.require_plots()
        _check_writable("--png", png)
    if out.is_dir():  # of a folder that is not there, opening says what it should be
        _check_profile(out / PROFILE_NAME)
    with progress(quiet) as on_progress, draftc.open(out, **engines.arguments(), tune=False) as session:
        costs = session.measure_costs(budget_s=budget, on_progress=on_progress)
        name = session.manifest.name
    write_profile(out / PROFILE_NAME, costs)
    if png is not None:
        cost_tables.draw(costs, name, png)
    if json:
        print_json(cost_tables.record(costs))
    else:
        print_report(cost_tables.render(costs, name))


def _check_profile(file: Path) -> None:
    """Raise UsageError, as `write_profile` would, unless a new `file` can take the place of what is there."""
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}: make the folder writable") from error


def _check_writable(option: str, file: Path) -> None:
    """Raise UsageError unless `file` can be written; what it holds, or that it is not there, stays as it is."""
    existed = file.exists() or file.is_symlink()
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UsageError(f"{option} {file}: {error.strerror}: name a file that can be written") from error
    if not existed:
        file.unlink()


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"-k takes whole numbers with commas between them, such as 3,4, got {text!r}") from None
