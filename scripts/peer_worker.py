"""One system of bench_peers.py in a process of its own: JSON lines in, JSON lines out.

The first line configures it ({"system", "mode", "model", "draft", "threads", "eos"}); then {"do": "encode", "messages"}
(draftc alone) or {"do": "run", "mode", "ids", "max_new_tokens"} until the input ends. An answer is {"error": one line}
or what was asked for. A run answers

    token_ids        the new tokens, the end token included where the system gives it
    prefill_s        from the call until the prompt's cache is filled and the first token can be had
    decode_s         the rest, in which `decode_tokens` tokens were made
    target_calls     calls of the target after the prefill; proposed, accepted: draft tokens; null: the system won't say
    peak_rss         of the process that computes, in bytes, since it started
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["SYSTEMS", "parse_mode"]

NEVER = 151_935  # an id behind the vocabulary's last token, for systems that need some end token
Run = Callable[[list[int], int], dict[str, Any]]


def parse_mode(mode: str) -> tuple[str, int]:
    """("ngram", 8) of "ngram-8"; ("plain", 0) of "plain". Raises ValueError."""
    kind, _, number = mode.partition("-")
    return kind, int(number) if number else 0


def answer(ids: Sequence[int], start: float, filled: float, decode_tokens: int, **more: Any) -> dict[str, Any]:
    """A run's answer; the clock stops here."""
    end = time.perf_counter()
    return {
        "token_ids": [int(token) for token in ids],
        "prefill_s": filled - start,
        "decode_s": end - filled,
        "decode_tokens": decode_tokens,
        "target_calls": None,
        "proposed": None,
        "accepted": None,
        "peak_rss": peak_rss(os.getpid()),
    } | more


def peak_rss(process: int) -> int:
    """VmHWM, bytes. Not ru_maxrss: that begins with what the parent had when it forked."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{process}/status has no VmHWM")


def open_draftc(config: dict[str, Any]) -> dict[str, Any]:
    """Every mode in one session: "default" is generate() without a method, "ngram-8" the method ngram with K = 8."""
    import draftc.runtime as draftc

    session = draftc.open(config["model"], threads=config["threads"], check_hashes=False)

    def run(ids: list[int], count: int, mode: str) -> dict[str, Any]:
        kind, k = parse_mode(mode)
        options: dict[str, Any] = {"max_new_tokens": count, "temperature": 0, "ignore_eos": not config["eos"]}
        if kind != "default":
            options["method"] = {"draft": "draft_model"}.get(kind, kind)
        if k:
            options["num_speculative_tokens"] = k
        session.reset()
        start = time.perf_counter()
        done = session.generate(ids, **options)
        stats = done.stats
        wall = time.perf_counter() - start  # what a caller waits; what generate itself does not count is decoding
        return answer(
            done.token_ids,
            start,
            start + stats.prefill_s,
            stats.step_tokens,
            decode_s=wall - stats.prefill_s,
            target_calls=stats.steps,
            proposed=stats.proposed,
            accepted=stats.accepted,
        )

    ends = session.tokenizer.defaults.eos_token_ids
    return {"run": run, "encode": session.encode, "eos": list(ends), "packages": ("draftc", "onnxruntime")}


def open_genai(config: dict[str, Any], spinning: bool) -> dict[str, Any]:
    """onnxruntime-genai. `append_tokens` fills the cache; nothing is proposed before it returns."""
    import numpy as np
    import onnxruntime_genai as og

    kind, k = parse_mode(config["mode"])
    drafting = kind == "draft"
    settings = {"intra_op_num_threads": config["threads"], "session.intra_op.allow_spinning": str(int(spinning))}
    parts = ("decoder", "draft") if drafting else ("decoder",)
    overlay = {"model": {part: {"session_options": settings} for part in parts}}
    overlay["model"] |= {"eos_token_id": config["eos"] or [NEVER]}
    setup = og.Config(config["pair"] if drafting else config["model"])
    setup.overlay(json.dumps(overlay))
    model = og.Model(setup)

    def run(ids: list[int], count: int, mode: str) -> dict[str, Any]:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + count)
        if kind == "ngram":
            params.set_speculative_options(ngram_size=4, max_draft_tokens=k or 8)
        elif drafting:
            params.set_speculative_options(max_draft_tokens=k or 4)
        start = time.perf_counter()
        generator = og.Generator(model, params)
        generator.append_tokens(np.array([ids], dtype=np.int32))
        filled = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        tokens = generator.get_sequence(0)[len(ids) :]
        more: dict[str, Any] = {"target_calls": len(tokens) - 1}
        if kind != "plain":
            stats = generator.get_speculative_stats()
            # A step without a proposal is "standard"; the one for the first token needs no call.
            calls = stats["target_forward_passes"] + max(0, stats["standard_fallback_steps"] - 1)
            more = {
                "target_calls": calls,
                "proposed": stats["draft_tokens_proposed"],
                "accepted": stats["draft_tokens_accepted"],
            }
        return answer(tokens, start, filled, len(tokens) - 1, **more)

    return {"run": run, "packages": ("onnxruntime-genai", "onnxruntime")}


def open_openvino(config: dict[str, Any]) -> dict[str, Any]:
    """OpenVINO GenAI. The first token reaches the streamer when the prompt is done."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    kind, k = parse_mode(config["mode"])
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # every run prefills, as everywhere
    scheduler.max_num_batched_tokens = 4096
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": config["threads"], "scheduler_config": scheduler}
    if kind == "ngram":
        options["prompt_lookup"] = True
    elif kind == "draft":
        options["draft_model"] = genai.draft_model(config["draft"], "CPU", INFERENCE_NUM_THREADS=config["threads"])
    pipeline = genai.LLMPipeline(config["model"], "CPU", **options)

    class Clock(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first: tuple[float, int] | None = None
            self.calls = 0

        def write(self, tokens: Any) -> Any:
            count = len(tokens) if isinstance(tokens, Sequence) else 1
            self.first = self.first or (time.perf_counter(), count)
            self.calls += 1
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def run(ids: list[int], count: int, mode: str) -> dict[str, Any]:
        how = genai.GenerationConfig(max_new_tokens=count, do_sample=False)
        how.ignore_eos = not config["eos"]
        if config["eos"]:
            how.stop_token_ids = set(config["eos"])
        if kind == "ngram":
            how.num_assistant_tokens, how.max_ngram_size = k or 8, 3
        elif kind == "draft":
            how.num_assistant_tokens = k or 6
        clock = Clock()
        start = time.perf_counter()
        inputs = np.array([ids], dtype=np.int64)
        done = pipeline.generate(genai.TokenizedInputs(ov.Tensor(inputs), ov.Tensor(np.ones_like(inputs))), how, clock)
        end = time.perf_counter()
        tokens = done.tokens[0]
        first, count = clock.first or (end, len(tokens))
        # The streamer gets the tokens of one verification at a time; how many were proposed it is not told.
        more: dict[str, Any] = {"target_calls": clock.calls - 1}
        if kind != "plain":
            more["accepted"] = len(tokens) - clock.calls
        return answer(tokens, start, first, len(tokens) - count, decode_s=end - first, **more)

    return {"run": run, "packages": ("openvino-genai", "openvino")}


def open_llama(config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's llama-server, asked over HTTP on this machine."""
    from peer_llama import serve

    kind, k = parse_mode(config["mode"])
    server = serve(config, kind, k)

    def run(ids: list[int], count: int, mode: str) -> dict[str, Any]:
        start = time.perf_counter()
        done = server.complete(ids, count, ignore_eos=not config["eos"])
        end = time.perf_counter()
        times = done["timings"]
        decode_s, made = times["predicted_ms"] / 1e3, times["predicted_n"] - 1
        accepted = times.get("draft_n_accepted", 0)
        return answer(
            done["tokens"],
            start,
            end - decode_s,
            made,
            decode_s=decode_s,
            target_calls=made - accepted,
            proposed=times.get("draft_n", 0),
            accepted=accepted,
            peak_rss=peak_rss(server.process.pid),
        )

    return {"run": run, "versions": {"llama.cpp": server.version}}


def open_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """transformers' generate in bfloat16."""
    import torch
    import transformers

    torch.set_num_threads(config["threads"])
    kind, k = parse_mode(config["mode"])

    def load(path: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    model = load(config["model"])
    options: dict[str, Any] = {"do_sample": False}
    if kind == "ngram":
        options["prompt_lookup_num_tokens"] = k or 8
    elif kind == "draft":
        options["assistant_model"] = load(config["draft"])
    calls = [0]
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    class Clock(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[tuple[float, int]] = []

        def put(self, value: Any) -> None:
            self.times.append((time.perf_counter(), value.numel()))

        def end(self) -> None:
            pass

    def run(ids: list[int], count: int, mode: str) -> dict[str, Any]:
        clock, calls[0] = Clock(), 0
        start = time.perf_counter()
        prompt = torch.tensor([ids])
        ends = config["eos"] or None
        extra = {"eos_token_id": ends, "max_new_tokens": count, "streamer": clock, "pad_token_id": NEVER}
        with torch.inference_mode():
            done = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **extra)
        end = time.perf_counter()
        tokens = done[0, len(ids) :].tolist()
        first, emitted = clock.times[1]  # the first call brings the prompt
        made = len(tokens) - emitted
        accepted = None if kind == "plain" else len(tokens) - calls[0]
        more = {"target_calls": calls[0] - 1, "accepted": accepted, "decode_s": end - first}
        return answer(tokens, start, first, made, **more)

    return {"run": run, "packages": ("transformers", "torch")}


SYSTEMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "draftc": open_draftc,
    "genai": lambda config: open_genai(config, spinning=True),
    "genai-nospin": lambda config: open_genai(config, spinning=False),
    "openvino": open_openvino,
    "llama.cpp": open_llama,
    "transformers": open_transformers,
}


def main() -> None:
    # What a library prints must not end up between the answers: they get the original standard output for themselves.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    config = json.loads(sys.stdin.readline())
    try:
        system = SYSTEMS[config["system"]](config)
        versions = {name: importlib.metadata.version(name) for name in system.get("packages", ())}
        reply({"ok": True, "versions": system.get("versions", versions), "eos": system.get("eos")})
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "encode":
                reply({"ids": system["encode"](asked["messages"])})
            else:
                reply(system["run"](asked["ids"], asked["max_new_tokens"], asked["mode"]))
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        raise


if __name__ == "__main__":
    main()
