#!/usr/bin/env python3
"""Make the model folders that bench_peers.py compares draftc with, from the GGUFs that draftc compiles.

Every system gets the same weights: `folders` writes them with draftc's own reader (dequantised to float32, a head that
is stored twice tied again), and each builder rounds them to int4 in its own way. llama.cpp reads the GGUFs themselves.
Each step runs in the environment of its system; a folder that is there already is left as it is.

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
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROLES = ("target", "draft")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("folders", "genai", "openvino"))
    parser.add_argument("--target", type=Path, metavar="GGUF", help="for the step folders")
    parser.add_argument("--draft", type=Path, metavar="GGUF", help="for the step folders")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 128], help="int4 block sizes (32 128)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.step == "folders":
        if options.target is None or options.draft is None:
            parser.error("the step folders needs --target and --draft: name the two .gguf files")
        for role, source in zip(ROLES, (options.target, options.draft), strict=True):
            make(options.out / f"hf-{role}", lambda folder, source=source: write_folder(source, folder))
        return 0
    for role in ROLES:
        if not (options.out / f"hf-{role}").is_dir():
            parser.error(f"{options.out}/hf-{role} is missing: run the step folders first")
    for block in options.blocks:
        for role in ROLES:
            source = options.out / f"hf-{role}"
            if options.step == "genai":
                name, work = f"genai-b{block}-{role}", build_genai
            else:
                name, work = f"openvino-g{block}-{role}", export_openvino
            make(options.out / name, lambda folder, source=source, block=block, work=work: work(source, folder, block))
        if options.step == "genai":
            pair = [options.out / f"genai-b{block}-{role}" for role in ROLES]
            make(options.out / f"genai-b{block}-pair", lambda folder, pair=pair: join(*pair, folder))
    return 0


def make(folder: Path, work: Any) -> None:
    """Let `work` fill `folder`; what an earlier run finished stays."""
    if folder.is_dir():
        print(f"{folder}: there already")
        return
    with replacing(folder) as temporary:
        work(temporary)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:,.0f} MiB", flush=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that gets its name when the block ends well, so that no half-made one has it."""
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    yield temporary
    temporary.rename(folder)


def write_folder(source: Path, folder: Path) -> None:
    """The checkpoint as draftc reads it: config, float32 safetensors, tokenizer, end ids."""
    from draftc.export import checkpoint

    loaded = checkpoint.load(checkpoint.resolve(str(source)))
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
    subprocess.run([*command, "--extra_options", *extra], check=True)
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
        if file.is_file() and ".onnx" not in file.name and file.name != "genai_config.json":
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
