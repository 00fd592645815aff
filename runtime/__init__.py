"""draftc.runtime: open a bundle and generate from it. Needs numpy, tokenizers, jinja2 and a backend; never torch.

    import draftc.runtime as draftc
    with draftc.open("out") as session:
        print(session.generate("def fib(n):", max_new_tokens=64).text)

Importing this package loads no backend; opening a bundle loads the one that it needs.
"""

from importlib.metadata import version

from draftc.runtime.errors import (
    BackendUnavailableError,
    BundleError,
    BundleVersionError,
    CapacityError,
    DraftcError,
    DraftcWarning,
    EngineError,
    SessionBusyError,
    UsageError,
)
from draftc.runtime.opening import open_session as open
from draftc.runtime.request import Generation, StreamEvent
from draftc.runtime.session import GenerationStream, Session
from draftc.runtime.stats import Stats
from draftc.runtime.warp import Sampling

__version__ = version("draftc")

__all__ = [
    "BackendUnavailableError",
    "BundleError",
    "BundleVersionError",
    "CapacityError",
    "DraftcError",
    "DraftcWarning",
    "EngineError",
    "Generation",
    "GenerationStream",
    "Sampling",
    "Session",
    "SessionBusyError",
    "Stats",
    "StreamEvent",
    "UsageError",
    "open",
]
