"""`draftc.runtime.open`: from a bundle's folder to a Session; everything is checked before anything large is loaded."""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from draftc.runtime.adaptive import AdaptiveDrafter
from draftc.runtime.backends import check_device_options, open_engine, open_loops
from draftc.runtime.bundle import open_bundle
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.devices import Role, assign_devices, require_kv_memory
from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.engine import Engine
from draftc.runtime.errors import DraftcWarning, UsageError
from draftc.runtime.machine import physical_cores
from draftc.runtime.manifest import Model
from draftc.runtime.profiles import find_profile, keep_profile, kept_profile, machine_id, measuring
from draftc.runtime.reports import Progress
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from draftc.runtime.tune import measure_costs
from draftc.runtime.vocabulary import open_vocabulary

__all__ = ["open_session"]


def open_session(
    path: str | Path,
    *,
    device: str | None = None,
    target_device: str | None = None,
    draft_device: str | None = None,
    threads: int | None = None,
    cuda_graph: bool = True,
    provider_options: Mapping[str, str] | None = None,
    check_hashes: bool = True,
    tune: bool = True,
    on_progress: Progress | None = None,
) -> Session:
    """Open a bundle. `draftc.runtime.open` is this function.

    `device` is "cpu", "cuda" or "cuda:1" (the second GPU), by default what the bundle was compiled for;
    `target_device` and `draft_device` say otherwise for one of the two models. Between devices only token ids and rows
    of logits move. `threads` per graph on a CPU; default: ONNX Runtime's choice, one per physical core. `cuda_graph`
    False runs every call kernel by kernel. `provider_options` go to ONNX Runtime's CUDA provider under its own names
    ("gpu_mem_limit", …). `check_hashes` compares every file with its sha256 (about a second per 1.5 GB); sizes and
    paths are always checked. `tune`: where neither the bundle nor this user's cache has a profile of what calls cost on
    this machine, measure one (some 20 seconds for a model of 1.5B parameters; `on_progress` is told) and keep it in the
    cache; False does without, and drafts as the bundle's manifest says. Raises BundleError, BackendUnavailableError,
    UsageError, ResourceError.
    """
    if not isinstance(path, str | Path):
        raise UsageError(f"a bundle is opened by its folder's path, got {path!r}")
    bundle = open_bundle(path, hashes=check_hashes)
    manifest = bundle.manifest
    backend = manifest.backend.name
    models: dict[Role, Model] = {"target": manifest.target}
    if manifest.draft.model is not None:
        models["draft"] = manifest.draft.model
    options = assign_devices(
        models,
        manifest.backend.device,
        device=device,
        target_device=target_device,
        draft_device=draft_device,
        threads=threads,
        cuda_graph=cuda_graph,
        provider_options=provider_options,
    )
    for chosen in options.values():
        check_device_options(backend, chosen)
    if threads is not None and threads > (cores := physical_cores()):
        message = f"{threads} threads for each graph on {cores} cores: they will wait for each other"
        warnings.warn(message, DraftcWarning, stacklevel=2)
    tokenizer = Tokenizer.from_folder(bundle.path(manifest.tokenizer.path))
    limits = Limits(manifest.max_length, manifest.max_width, manifest.prefill_chunk, manifest.vocab_size)
    vocabulary = open_vocabulary(bundle)
    require_kv_memory((options[role], model.spec.kv_bytes()) for role, model in models.items())
    with contextlib.ExitStack() as opened:
        max_call = max(limits.prefill_chunk, limits.max_width)

        def decoder(role: Role, beside: Engine | None = None) -> Decoder:
            model = models[role]
            engine = open_engine(
                backend,
                bundle.path(model.graph),
                model.spec,
                max_call=max_call,
                max_rows=limits.max_width,
                options=options[role],
                built=manifest.backend,
                info=model.engine,
                beside=beside,
            )
            opened.callback(engine.close)
            if role == "draft" and vocabulary is not None:
                return Decoder(engine, replace(limits, vocab_size=vocabulary.token_ids.size))
            return Decoder(engine, limits)

        draft = decoder("draft") if "draft" in models else None
        model = None if draft is None else ModelDrafter(draft, vocabulary)
        drafters: dict[str, Drafter] = {} if model is None else {"draft_model": model}
        lengths = manifest.draft
        drafters["ngram"] = NgramDrafter(lengths.min_ngram, lengths.max_ngram)  # costs nothing: every bundle has it
        draft_engine = None if draft is None else draft.engine
        target = decoder("target", draft_engine)
        loops = open_loops(backend, target.engine, draft_engine, max_call=max_call)
        costs = None
        if loops is None:  # a backend's own loop takes no drafter that looks at logits on the host
            machine = machine_id(manifest, options)
            costs = find_profile(bundle.root, machine)
            if costs is None and tune:
                with measuring(machine):
                    costs = kept_profile(machine)  # another process may have been at it
                    if costs is None:
                        costs = measure_costs(target, draft, machine, on_progress=on_progress)
                        keep_profile(costs)
        if costs is not None:
            drafters[AdaptiveDrafter.method] = AdaptiveDrafter.of(manifest, costs, model)
        session = Session(manifest, tokenizer, target, drafters, loops, options, costs)
        opened.pop_all()  # from here on the session closes them
    return session
