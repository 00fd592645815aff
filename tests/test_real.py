"""A real checkpoint from end to end: SmolLM2-135M-Instruct is compiled once and compared with transformers' reading.

The reference is what transformers makes of the same GGUF file with its own loader, so neither draftc's reader of
weights, nor its tokenizer, nor its graph is on both sides of a comparison.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import draftc.runtime as runtime
from draftc.export.catalog import cache_dir, load_model, load_recipe
from draftc.runtime import selfcheck
from draftc.runtime.check_sampling import MIN_DRAWS
from draftc.runtime.cli import build_app
from draftc.runtime.manifest import parse

pytestmark = pytest.mark.real

RECIPE = "smollm2-135m"
CHUNK = 128
NEAR_TIE = 1e-3  # of logits: fp32 kernels that sum in another order move them by less than 1e-4

CODE = "def fibonacci(n):\n    "
EDIT = (
    "Original:\nfor item in items:\n    total = total + item.price\n    count = count + 1\nprint(total, count)\n\n"
    "Copy:\nfor item in items:\n    total ="
)
SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
CONVERSATIONS = {
    "user": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "turns": [
        SYSTEM,
        QUESTION,
        {"role": "assistant", "content": "Paris. 😀"},
        {"role": "user", "content": " And\n你好? "},
    ],
}


class Reference:
    """transformers on the file, on one thread."""

    def __init__(self, file: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        self.model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None  # as with ignore_eos

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens by its own `generate`."""
        ids = torch.tensor([prompt])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return [int(token) for token in out[0, len(prompt) :]]

    def logits(self, prompt: list[int], answer: list[int]) -> NDArray[np.float32]:
        """Logits (n, V) from which the n tokens of `answer` were chosen, from one pass over the whole text."""
        with torch.no_grad():
            rows: NDArray[np.float32] = (
                self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].numpy()
            )
        return rows

    def assert_greedy(self, prompt: list[int], answer: list[int]) -> None:
        """`answer` is its own greedy decoding; or where the two part, no token of it is worse than a near tie."""
        if answer != self.greedy(prompt, len(answer)):
            logits = self.logits(prompt, answer)
            gaps = logits.max(-1) - logits[np.arange(len(answer)), answer]
            worst = int(gaps.argmax())
            assert gaps[worst] < NEAR_TIE, f"token {worst}, {answer[worst]}, is {gaps[worst]} below the best"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def file() -> Path:
    path = cache_dir() / load_model(load_recipe(RECIPE).target).filename
    if not path.is_file():
        pytest.skip(f"{path} is not there: draftc fetch {RECIPE}")
    return path


@pytest.fixture(scope="module")
def reference(file: Path) -> Reference:
    return Reference(file)


def draftc(*args: str | Path) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(build_app(), [*map(str, args)])


@pytest.fixture(scope="module")
def bundle(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The recipe, shorter: fp32 with n-gram drafting. Removed afterwards: pytest would keep its 540 MB."""
    out = tmp_path_factory.mktemp("real") / "smollm2"
    lengths = ["--max-length", "512", "--prefill-chunk", str(CHUNK)]
    result = draftc("compile", "--recipe", RECIPE, *lengths, "-o", out, "--quiet")
    assert result.exit_code == 0, result.stderr
    yield out
    shutil.rmtree(out)


@pytest.fixture(scope="module")
def session(bundle: Path) -> Iterator[runtime.Session]:
    with runtime.open(bundle, threads=1) as session:
        yield session


@pytest.mark.parametrize("prompt", [CODE, EDIT], ids=["code", "edit"])
def test_greedy_text_is_that_of_transformers(session: runtime.Session, reference: Reference, prompt: str) -> None:
    ids = reference.tokenizer(prompt)["input_ids"]
    plain = session.generate(prompt, max_new_tokens=64, temperature=0, ignore_eos=True, method="plain")
    reference.assert_greedy(ids, plain.token_ids)
    drafted = session.generate(prompt, max_new_tokens=64, temperature=0, ignore_eos=True, method="ngram")
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == reference.tokenizer.decode(plain.token_ids, skip_special_tokens=True)
    if prompt == EDIT:  # a text to copy from
        assert drafted.stats.accepted > 10
        assert drafted.stats.target_calls < plain.stats.target_calls


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("ask", [True, False], ids=["ask", "closed"])
def test_conversations_are_rendered_as_by_transformers(
    session: runtime.Session, reference: Reference, messages: list[dict[str, str]], ask: bool
) -> None:
    theirs = reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    assert session.tokenizer.render_chat(messages, add_generation_prompt=ask) == theirs
    ids = reference.tokenizer(theirs, add_special_tokens=False)["input_ids"]
    assert session.tokenizer.apply_chat_template(messages, add_generation_prompt=ask) == ids


def test_a_second_turn_reuses_the_first(session: runtime.Session, bundle: Path) -> None:
    session.reset()
    first = session.generate([SYSTEM, QUESTION], max_new_tokens=16, temperature=0)
    assert first.stats.cached_tokens == 0
    assert "Paris" in first.text
    follow_up = {"role": "user", "content": "And what is the capital of Italy?"}
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": first.text}, follow_up]
    second = session.generate(messages, max_new_tokens=24, temperature=0)
    assert first.stats.prompt_tokens <= second.stats.cached_tokens < second.stats.prompt_tokens
    with runtime.open(bundle, threads=1) as fresh:
        alone = fresh.generate(messages, max_new_tokens=24, temperature=0)
    assert alone.stats.cached_tokens == 0
    assert (second.token_ids, second.text) == (alone.token_ids, alone.text)


def test_a_prompt_of_several_chunks(session: runtime.Session, reference: Reference) -> None:
    prompt = "".join(f"{n} squared is {n * n}.\n" for n in range(1, 40)) + "40 squared is"
    ids = session.encode(prompt)
    assert len(ids) > 2 * CHUNK
    assert len(ids) % CHUNK != 0
    result = session.generate(prompt, max_new_tokens=8, temperature=0, ignore_eos=True, logprobs=True)
    reference.assert_greedy(ids, result.token_ids)
    logits = torch.from_numpy(reference.logits(ids, result.token_ids))
    expected = logits.log_softmax(-1)[torch.arange(8), torch.tensor(result.token_ids)]
    assert result.logprobs is not None
    np.testing.assert_allclose(result.logprobs, expected.numpy(), atol=1e-3)


def test_verify_passes(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # How many draws fit into a budget of seconds depends on what else runs on the machine: a fixed number does not.
    monkeypatch.setattr(selfcheck, "verify", partial(selfcheck.verify, draws=MIN_DRAWS))
    prompts = tmp_path / "prompts.jsonl"
    cases = [{"id": "edit", "prompt": EDIT}, {"id": "chat", "messages": CONVERSATIONS["system"]}]
    prompts.write_text("\n".join(map(json.dumps, cases)), encoding="utf-8")
    result = draftc("verify", bundle, "--prompts", prompts, "--threads", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] is True
    assert [part["name"] for part in report["parts"]] == ["greedy", "sampling", "cache", "bounds"]
    greedy, sampling, *_ = (part["details"] for part in report["parts"])
    assert sum(mode["accepted"] for mode in greedy["modes"]) > 0
    assert all(mode["identical"] == mode["prompts"] == 2 for mode in greedy["modes"])
    assert all(case["draws"] == MIN_DRAWS and case["proposed"] > 0 for case in sampling["cases"])


def test_bench_reports_every_prompt_in_every_mode(bundle: Path) -> None:
    result = draftc("bench", bundle, "-n", "16", "--repeats", "1", "--threads", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["schema"] == "draftc-bench/1"
    modes = ["plain", "auto", "ngram-k4"]
    assert [total["mode"] for total in report["totals"]] == modes
    plain, *drafted = ([record for record in report["records"] if record["mode"] == mode] for mode in modes)
    assert len(plain) > 1
    for records in drafted:
        assert [record["id"] for record in plain] == [record["id"] for record in records]
        assert [record["token_ids"] for record in plain] == [record["token_ids"] for record in records]
    for record in report["records"]:
        assert 1 <= record["new_tokens"] == len(record["token_ids"]) <= 16
        assert record["new_tokens"] == 1 + record["step_tokens"]
        phases = sum(record[name] for name in ("draft_s", "verify_s", "accept_s", "other_s"))
        assert phases == pytest.approx(record["decode_s"], rel=1e-6)
    assert all(record["steps"] == record["step_tokens"] and record["proposed"] == 0 for record in plain)


def test_inspect_shows_what_was_compiled(bundle: Path, reference: Reference) -> None:
    result = draftc("inspect", bundle, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    derived = record.pop("derived")
    written = (bundle / "bundle.json").read_text(encoding="utf-8")
    assert record == json.loads(json.dumps(asdict(parse(written))))
    jsonschema.validate(
        json.loads(written), json.loads(resources.files(runtime).joinpath("bundle.schema.json").read_text())
    )
    assert record["target"]["architecture"] == "llama"
    assert record["target"]["parameters"] == sum(p.numel() for p in set(reference.model.parameters()))
    assert derived["file_bytes"] == sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file()) - len(
        written.encode()
    )
