"""Checkpoints from a model hub, through huggingface_hub: small files first, weights only when they are needed.

Only safetensors, JSON, tokenizer and template files are ever asked for; Python files only with `trust_remote_code`.
`HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_HOME` are huggingface_hub's own settings and are honoured by it.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, snapshot_download

from draftc.export.weights import INDEX_FILE, SINGLE_FILE, Weights, find_weights, read_weights
from draftc.runtime.errors import CheckpointError, ResourceError

__all__ = ["copy_to", "download_files", "download_weights", "parse_hub_id", "remote_weights"]

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md"]
WEIGHT_FILES = ["model*.safetensors"]
SUBFOLDERS = ["*/*"]
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(@(?P<revision>[\w./-]+))?")


def parse_hub_id(text: str) -> tuple[str, str | None] | None:
    """("org/name", revision or None) of "org/name" or "org/name@revision"; None when `text` is neither."""
    match = HUB_ID.fullmatch(text)
    return (match["repo"], match["revision"]) if match else None


def download_files(repo: str, revision: str | None, *, remote_code: bool) -> Path:
    """Fetch config, tokenizer and template files; returns the snapshot folder, whose name is the commit."""
    patterns = [*SMALL_FILES, "*.py"] if remote_code else SMALL_FILES
    with _clear_errors(repo):
        folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=SUBFOLDERS)
    return Path(folder)


def download_weights(repo: str, commit: str) -> Path:
    """Fetch the safetensors files of one commit; returns the snapshot folder."""
    with _clear_errors(repo):
        folder = snapshot_download(repo, revision=commit, allow_patterns=WEIGHT_FILES, ignore_patterns=SUBFOLDERS)
    return Path(folder)


def copy_to(folder: Path, repo: str, commit: str) -> Path:
    """Fetch one commit's files, weights included, into `folder` instead of the hub's cache; returns `folder`."""
    patterns = [*SMALL_FILES, *WEIGHT_FILES]
    with _clear_errors(repo):
        snapshot_download(repo, revision=commit, allow_patterns=patterns, ignore_patterns=SUBFOLDERS, local_dir=folder)
    return folder


def remote_weights(repo: str, folder: Path) -> Weights:
    """Tensor shapes of a repository without its weights: from the cache if they are there, else from remote headers."""
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        try:
            return read_weights(find_weights(folder))
        except CheckpointError:
            if constants.is_offline_mode():
                raise
    with _clear_errors(repo):
        metadata = HfApi().get_safetensors_metadata(repo, revision=folder.name)
    shapes: dict[str, tuple[int, ...]] = {}
    nbytes = 0
    for file in metadata.files_metadata.values():
        for name, tensor in file.tensors.items():
            shapes[name] = tuple(tensor.shape)
            nbytes += tensor.data_offsets[1] - tensor.data_offsets[0]
    return Weights(shapes, nbytes)


@contextmanager
def _clear_errors(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line with the cause and the way out."""
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"hub model {repo!r} is gated; accept its terms on its page, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"hub model {repo!r} does not exist or is private, and there is no such folder here; check the name, or "
            "run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"hub model {repo!r} has no such revision; leave out the part after '@'") from error
    except errors.NotASafetensorsRepoError as error:
        raise CheckpointError(
            f"hub model {repo!r} has no {SINGLE_FILE}; choose a repository with safetensors weights, or download its "
            "GGUF file and pass that"
        ) from error
    except Exception as error:  # network errors come in the types of whichever HTTP client is installed
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ResourceError(
                f"no disk space left in {constants.HF_HUB_CACHE} for {repo!r}; free some, or set HF_HOME"
            ) from error
        if constants.is_offline_mode():
            raise CheckpointError(
                f"hub model {repo!r} is not complete in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set; "
                "unset it, or pass a local folder or GGUF file"
            ) from error
        raise CheckpointError(
            f"hub model {repo!r} cannot be fetched from {constants.ENDPOINT} ({type(error).__name__}) and is not "
            "complete in the cache; check the connection, set HF_ENDPOINT to a mirror, or pass a local folder or GGUF "
            "file"
        ) from error
