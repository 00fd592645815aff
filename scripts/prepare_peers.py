#!/usr/bin/env python3
"""Make the model folders that bench_peers.py compares draftc with, from the GGUFs that draftc compiles.

Every system gets the same weights: `folders` writes them with draftc's own reader (dequantised to float32, a head that
is stored twice tied again), and each builder rounds them to int4 in its own way. llama.cpp reads the GGUFs themselves.
Each step runs in the environment of its system. A folder that is there already is left as it is: in its source.json
stands which files it was made from, and where those are other ones now, nothing is made.

    python scripts/prepare_peers.py folders  --target T.gguf --draft D.gguf --out peers     # where draftc[export] is
    python scripts/prepare_peers.py genai    --out peers                                    # onnxruntime-genai
    python scripts/prepare_peers.py openvino --out peers                                    # optimum-intel

The environments, one for onnxruntime-genai, OpenVINO GenAI and transformers, one more for the export to OpenVINO
because optimum-intel 2.2 asks for an older transformers:

    python3 -m venv peers-venv
    peers-venv/bin/pip install torch==2.13.0        # first, so that nothing else chooses a CUDA build
    peers-venv/bin/pip install transformers==5.24.0 gguf accelerate psutil \\
        onnxruntime-genai==0.18.0 onnx onnx-ir openvino==2026.4.1 openvino-genai==2026.4.1.0 nncf openvino-tokenizers
    python3 -m venv peers-ov
    echo "$PWD/peers-venv/lib/python3.11/site-packages" > peers-ov/lib/python3.11/site-packages/peers.pth
    peers-ov/bin/pip install --no-deps optimum-intel==2.2.0 optimum==2.3.0 transformers==5.5.4 \\
        huggingface_hub==1.21.0 tokenizers==0.22.2 httpx==0.28.1 httpcore==1.0.9

llama.cpp, from the sources that the Python package llama-cpp-python carries (any checkout of llama.cpp does as well):

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llama-build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build llama-build --target llama-server -j2

The folders under --out: hf-target, hf-draft; genai-b32-target, genai-b32-draft, genai-b32-pair (and b128);
openvino-g32-target, openvino-g32-draft (and g128). A pair shares its files with the two it is made of, by hard links.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from script_arguments import at_least

ROLES = ("target", "draft")
SOURCE_NAME = "source.json"

Sources = dict[str, dict[str, Any]]  # of each role in a folder: path, size and sha256 of the GGUF


class PrepareError(Exception):
    """A folder cannot be made, or is not what it should be; the message is one line with the way out."""


@dataclass(frozen=True)
class Step:
    """`work` fills `folder` with what is made from `sources`."""

    folder: Path
    sources: Sources
    work: Callable[[Path], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("folders", "genai", "openvino"))
    parser.add_argument("--target", type=Path, metavar="GGUF", help="for the step folders")
    parser.add_argument("--draft", type=Path, metavar="GGUF", help="for the step folders")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--blocks", type=at_least(1), nargs="+", default=[32, 128], help="int4 block sizes (32 128)")
    options = parser.parse_args(arguments)
    if options.step == "folders" and None in (options.target, options.draft):
        parser.error("the step folders needs --target and --draft: name the two .gguf files")
    try:
        steps = plan(options)
        there = {step.folder for step in steps if is_made(step)}  # all are looked at before any is made
        options.out.mkdir(parents=True, exist_ok=True)
        for step in steps:
            if step.folder in there:
                print(f"{step.folder}: there already")
            else:
                make(step)
    except (PrepareError, subprocess.CalledProcessError, ImportError, OSError) as error:
        print(f"prepare_peers: {explain(error)}", file=sys.stderr)
        return 2
    return 0


def explain(error: Exception) -> str:
    """One line: what is wrong, and where it can be, the way out."""
    text = " ".join(str(error).split())
    match error:
        case subprocess.CalledProcessError():
            return f"{' '.join(map(str, error.cmd[1:3]))} ended with {error.returncode}: see above what it printed"
        case ImportError():
            return f"{text}: run this step where its packages are (see --help)"
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
    return text


def plan(options: argparse.Namespace) -> list[Step]:
    """The folders of the step that was asked for, in the order in which they are made. Raises PrepareError."""
    floats = {role: options.out / f"hf-{role}" for role in ROLES}
    if options.step == "folders":
        ggufs = {role: getattr(options, role) for role in ROLES}
        return [Step(floats[role], {role: describe(ggufs[role])}, partial(write_folder, ggufs[role])) for role in ROLES]
    sources: Sources = {}
    for role, folder in floats.items():
        if not folder.is_dir():
            raise PrepareError(f"{folder} is missing: run the step folders first")
        sources |= recorded(folder, [role])
    name, work = ("genai-b", build_genai) if options.step == "genai" else ("openvino-g", export_openvino)
    steps = []
    for block in options.blocks:
        made = {role: options.out / f"{name}{block}-{role}" for role in ROLES}
        steps += [Step(made[role], {role: sources[role]}, partial(work, floats[role], block=block)) for role in ROLES]
        if options.step == "genai":
            steps.append(
                Step(options.out / f"{name}{block}-pair", sources, partial(join, made["target"], made["draft"]))
            )
    return steps


def describe(gguf: Path) -> dict[str, Any]:
    """Raises PrepareError for a file that cannot be read."""
    try:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"path": str(gguf.resolve()), "size": gguf.stat().st_size, "sha256": digest}
    except OSError as error:
        raise PrepareError(f"{gguf}: cannot be read ({error.strerror}): name a .gguf file") from error


def recorded(folder: Path, roles: Iterable[str]) -> Sources:
    """What `folder` was made from. Raises PrepareError where it does not say so of all `roles`."""
    try:
        found = json.loads((folder / SOURCE_NAME).read_text(encoding="utf-8"))
        return {role: {name: found[role][name] for name in ("path", "size", "sha256")} for role in roles}
    except (OSError, ValueError, KeyError, TypeError):
        message = f"{folder} does not say in a {SOURCE_NAME} what it was made from: remove it, and run this again"
        raise PrepareError(message) from None


def is_made(step: Step) -> bool:
    """Whether an earlier run made the folder, from the same bytes. Raises PrepareError where it is of others."""
    if not step.folder.is_dir():
        return False
    for role, was in recorded(step.folder, step.sources).items():
        now = step.sources[role]
        if (was["size"], was["sha256"]) != (now["size"], now["sha256"]):
            cause = f"{step.folder} was made from {was['path']}, and {role} is {now['path']} now"
            raise PrepareError(f"{cause}: remove it, or give another --out")
    return True


def make(step: Step) -> None:
    """Let the step fill its folder, and record from what."""
    with replacing(step.folder) as temporary:
        step.work(temporary)
        (temporary / SOURCE_NAME).write_text(json.dumps(step.sources, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in step.folder.rglob("*") if file.is_file())
    print(f"{step.folder}: {size / 2**20:,.0f} MiB", flush=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that gets its name when the block ends well, so that no half-made one has it."""
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    yield temporary
    temporary.rename(folder)


def write_folder(source: Path, folder: Path) -> None:
    """The checkpoint as draftc reads it: config, float32 safetensors, tokenizer, end ids. Raises PrepareError."""
    from draftc.export import checkpoint
    from draftc.runtime.errors import DraftcError

    try:
        loaded = checkpoint.load(checkpoint.resolve(str(source)))
    except DraftcError as error:
        raise PrepareError(str(error)) from error
    loaded.model.generation_config = loaded.info.generation_config
    loaded.model.save_pretrained(folder)
    loaded.info.tokenizer.save_pretrained(folder)
    checkpoint.write_tokenizer(loaded.info, folder)


def build_genai(source: Path, folder: Path, block: int) -> None:
    """int4 with onnxruntime-genai's own builder. Accuracy level 4: activations are rounded to int8 in the kernel."""
    extra = [f"int4_block_size={block}", "int4_accuracy_level=4"]
    cache = folder.with_name(folder.name + ".cache")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(source), "-o", str(folder), "-p", "int4", "-e", "cpu", "-c", str(cache)]
    try:
        subprocess.run([*command, "--extra_options", *extra], check=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def join(target: Path, draft: Path, folder: Path) -> None:
    """One onnxruntime-genai folder with a draft: its configuration takes no path outside the folder."""
    config = json.loads((target / "genai_config.json").read_text())
    config["model"]["type"] = "speculative"
    decoders = {"decoder": config["model"]["decoder"]}
    decoders["draft"] = json.loads((draft / "genai_config.json").read_text())["model"]["decoder"]
    for (name, decoder), source in zip(decoders.items(), (target, draft), strict=True):
        (folder / name).mkdir()
        for file in source.glob(f"{decoder['filename']}*"):
            os.link(file, folder / name / file.name)
        config["model"][name] = decoder | {"filename": f"{name}/{decoder['filename']}"}
    config["speculative"] = {"max_draft_tokens": 4}
    # A rejected proposal is cut off the cache, which a shared buffer does not allow there.
    config["search"]["past_present_share_buffer"] = False
    for file in target.iterdir():
        if file.is_file() and ".onnx" not in file.name and file.name not in ("genai_config.json", SOURCE_NAME):
            shutil.copy(file, folder)
    (folder / "genai_config.json").write_text(json.dumps(config, indent=2))


def export_openvino(source: Path, folder: Path, block: int) -> None:
    """int4 with optimum-intel and NNCF: groups of `block`, asymmetric, all layers; embedding and head are int8."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    rounding = OVWeightQuantizationConfig(bits=4, sym=False, group_size=block, ratio=1.0)
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, quantization_config=rounding)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder)
    for name, part in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        openvino.save_model(part, folder / f"openvino_{name}.xml")


if __name__ == "__main__":
    sys.exit(main())
