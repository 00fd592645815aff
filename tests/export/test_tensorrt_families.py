"""Every family of the support matrix on its way to a TensorRT-RTX engine: captured in fp16, lowered, compared, built.

That happens once for each. Tails are not attached: they see nothing of a model but its logits, and engines with them
are built by `test_tails` and `test_compile_engines`. The table in docs/tensorrt-families.md is made of what was found;
`DRAFTC_WRITE_DOCS=1` writes it anew.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from draftc.export.families import REFUSED
from draftc.export.half import WidenFloats, cast_parameters, round_parameters, widened_spec
from draftc.export.lowering import lower
from draftc.export.tensorrt import build_engine, check_forms
from draftc.runtime.errors import DraftcError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.records import Profile, Range
from tests.export.family_cases import (
    FAMILIES,
    MAX_WIDTH,
    Family,
    capture_tiny,
    eager_logits,
    rewind_run,
    text,
    tiny_model,
    tolerance,
)

if TYPE_CHECKING:
    from tests.export.conftest import GraphRunner

    FindOutcome = Callable[[str], "Outcome"]

pytest.importorskip("tensorrt_rtx")

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "tensorrt-families.md"
BATCH, WIDTH = Range(min=1, opt=1, max=2), Range(min=1, opt=5, max=MAX_WIDTH)
PROFILES = (
    Profile(name="decode", batch=BATCH, tokens=WIDTH, rows=WIDTH),
    Profile(name="prefill", batch=BATCH, tokens=Range(min=1, opt=40, max=40), rows=Range(min=1, opt=1, max=1)),
)


@dataclass(frozen=True)
class Rewritten:
    """Root-mean-square norms and rotations that are one node in the lowered graph; attentions that are none."""

    norms: int
    rotations: int
    attentions: int


# In two layers, each of which rotates queries and keys. Families without a fused rotation have none (gpt2, opt), rotate
# interleaved pairs (cohere, cohere2, gptj, glm4, helium, deepseek_v3), or turn in fp16 what they multiply in float32
# (olmo2, olmo3). smollm3 and exaone4 rotate in one layer of two.
EXPECTED = {
    "llama": Rewritten(5, 4, 0),
    "mistral": Rewritten(5, 4, 0),
    "qwen2": Rewritten(5, 4, 0),
    "qwen3": Rewritten(9, 4, 0),
    "gemma": Rewritten(5, 4, 0),
    "gemma2": Rewritten(9, 4, 2),
    "gemma3_text": Rewritten(13, 4, 0),
    "phi3": Rewritten(5, 4, 0),
    "phi": Rewritten(0, 4, 0),
    "gpt2": Rewritten(0, 0, 0),
    "opt": Rewritten(0, 0, 0),
    "gpt_neox": Rewritten(0, 4, 0),
    "olmo2": Rewritten(9, 0, 0),
    "olmo3": Rewritten(9, 0, 0),
    "smollm3": Rewritten(5, 2, 0),
    "granite": Rewritten(5, 4, 0),
    "starcoder2": Rewritten(0, 4, 0),
    "cohere": Rewritten(3, 0, 0),
    "cohere2": Rewritten(3, 0, 0),
    "stablelm": Rewritten(0, 4, 0),
    "gptj": Rewritten(0, 0, 0),
    "nemotron": Rewritten(0, 4, 0),
    "exaone4": Rewritten(9, 2, 0),
    "glm4": Rewritten(9, 0, 0),
    "ministral3": Rewritten(5, 4, 0),
    "helium": Rewritten(5, 0, 0),
    "deepseek_v3": Rewritten(9, 0, 2),
    "qwen3_moe": Rewritten(9, 4, 0),
    "mixtral": Rewritten(5, 4, 0),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a family. Errors are the largest of any logit of the rewind run, against eager float32."""

    rewritten: Rewritten
    wide_error: float
    half_error: float
    reference: NDArray[np.float32]
    refusal: str | None


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def find_outcome(tmp_path_factory: pytest.TempPathFactory, graph_runner: type["GraphRunner"]) -> "FindOutcome":
    """The outcome of a family; it is captured and built when it is first asked for."""

    @functools.cache
    def of(model_type: str) -> Outcome:
        family = next(family for family in FAMILIES if family.model_type == model_type)
        return run_family(family, tmp_path_factory.mktemp(model_type), graph_runner)

    return of


def run_family(family: Family, folder: Path, graph_runner: type["GraphRunner"]) -> Outcome:
    """The way that `export.build` goes, without its files and checkpoints."""
    model = tiny_model(family.model_type, **family.config)
    round_parameters(model, "fp16")
    tokens = text()
    reference = eager_logits(model, tokens)
    cast_parameters(model, "fp16")
    captured = capture_tiny(model, folder)

    graph = ir.load(captured.path)
    attentions = count_ops(graph)["Attention"]
    lower(graph, "tensorrt-rtx", "cuda")
    ops = count_ops(graph)
    rewritten = Rewritten(ops["RMSNormalization"], ops["RotaryEmbedding"], attentions - ops["Attention"])
    ir.save(graph, folder / "lowered.onnx")
    refusal = build(graph, folder / "lowered.onnx", captured.spec)
    WidenFloats()(graph)
    ir.save(graph, folder / "wide.onnx", external_data="wide.data")

    wide_error = largest_error(graph_runner(folder / "wide.onnx", widened_spec(captured.spec)), tokens, reference)
    half_error = largest_error(graph_runner(folder / "lowered.onnx", captured.spec), tokens, reference)
    return Outcome(rewritten, wide_error, half_error, reference, refusal)


def count_ops(graph: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph.all_nodes())


def largest_error(runner: "GraphRunner", tokens: NDArray[np.int64], reference: NDArray[np.float32]) -> float:
    return max(
        float(np.abs(logits - reference[:, positions]).max()) for positions, logits in rewind_run(runner, tokens)
    )


def build(graph: ir.Model, path: Path, spec: GraphSpec) -> str | None:
    """Build the lowered graph at `path`; return why it could not be."""
    try:
        check_forms(graph)
        build_engine(
            "tensorrt-rtx", path, spec, PROFILES, ("89",), path.with_suffix(".engine"), path.with_suffix(".log")
        )
    except DraftcError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_family_is_lowered_to_the_same_numbers_and_builds(family: Family, find_outcome: "FindOutcome") -> None:
    outcome = find_outcome(family.model_type)
    assert outcome.refusal is None
    assert outcome.wide_error <= tolerance(outcome.reference)
    assert outcome.half_error <= 0.01 * float(np.abs(outcome.reference).max())  # in fp16, on ONNX Runtime
    assert outcome.rewritten == EXPECTED[family.model_type]


def test_the_table_in_the_documents(find_outcome: "FindOutcome") -> None:
    table = render({family.model_type: find_outcome(family.model_type) for family in FAMILIES})
    if os.environ.get("DRAFTC_WRITE_DOCS") == "1":
        DOCUMENT.write_text(table, encoding="utf-8")
    written = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    assert written == table, "the table is out of date: run this test with DRAFTC_WRITE_DOCS=1"


def render(outcomes: dict[str, Outcome]) -> str:
    rows = []
    for name, outcome in sorted(outcomes.items()):
        counts = outcome.rewritten
        builds, why = ("no", outcome.refusal) if outcome.refusal else ("yes", "")
        rows.append(f"| {name} | {builds} | {counts.norms} | {counts.rotations} | {counts.attentions} | {why} |")
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(name)
    refused = [f"| {', '.join(sorted(names))} | {reason} |" for reason, names in by_reason.items()]
    return HEAD + "\n".join(rows) + NOT_CAPTURED + "\n".join(refused) + "\n"


HEAD = """\
# Model families as TensorRT-RTX engines

A test makes this table (`DRAFTC_WRITE_DOCS=1 python -m pytest tests/export/test_tensorrt_families.py`): do not edit it.

For every family it takes a model of two layers with small random weights in fp16, and a configuration in which nothing
is neutral (windows shorter than the text, scalings that are not 1). The graph that goes into the engine, cast to
float32, must give the logits of eager PyTorch to within 1e-5 of the largest, over a prefill, a verification whose
proposals are rejected, and what follows. Then it is built for SM 89. No engine was run: that takes a GPU.

Norms and rotations are counted where each became one operator. A rotation of interleaved pairs, or one that mixes
types, stays as the model wrote it. "Attention written out" counts layers whose attention TensorRT's own kernel does not
take (soft caps, keys and values of unlike widths): they are a few simple operators.

| family | builds | RMS norms fused | rotary fused | attention written out | why not |
|---|---|---|---|---|---|
"""
NOT_CAPTURED = """

## Not captured

These are refused by name, for every backend:

| family | why |
|---|---|
"""
