"""Where draftc keeps what it found out about this machine. Stdlib only."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """This user's cache: kernels that TensorRT compiled, cost profiles; it may not exist yet."""
    named = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    base = Path(named) if named else Path(os.path.expanduser("~/.cache"))  # Path.home raises where there is no home
    return base / "draftc"
