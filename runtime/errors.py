"""Every error that draftc raises on purpose. Each message is one line: the cause, then the way out.

    DraftcError
    ├── UsageError               an argument is out of range or unknown (also a ValueError)
    ├── BundleError              the bundle cannot be opened as it is
    │   └── BundleVersionError   made by a newer draftc, or for another backend version
    ├── CapacityError            prompt or request does not fit max_length
    ├── SessionBusyError         a second thread used a session that is generating
    ├── EngineError              a graph failed, or returned NaN or infinite logits
    ├── BackendUnavailableError  a package, driver or device that this backend needs is missing
    ├── CheckpointError          a source cannot be read as a language model
    │   └── UnsupportedModelError  a model that draftc refuses by name, with the reason
    ├── PairError                target and draft do not fit together
    ├── CaptureError             torch.export or the ONNX conversion failed
    ├── ParityError              the compiled graph does not compute what the checkpoint computes
    └── ResourceError            not enough disk, memory, or a file that cannot be written

The command line prints ``str(error)`` and exits with 2; ``--debug`` shows the traceback.
"""

__all__ = [
    "BackendUnavailableError",
    "BundleError",
    "BundleVersionError",
    "CapacityError",
    "CaptureError",
    "CheckpointError",
    "DraftcError",
    "DraftcWarning",
    "EngineError",
    "PairError",
    "ParityError",
    "ResourceError",
    "SessionBusyError",
    "UnsupportedModelError",
    "UsageError",
]


class DraftcError(Exception):
    """Base of every error that draftc raises on purpose."""


class UsageError(DraftcError, ValueError):
    """An argument is out of range or unknown; the message names it, its value and what is allowed."""


class BundleError(DraftcError):
    """The bundle is incomplete, altered, malformed or unsafe to open."""


class BundleVersionError(BundleError):
    """The bundle was made by a newer draftc, or for a backend version that is not the installed one."""


class CapacityError(DraftcError):
    """The prompt or the request does not fit into the bundle's ``max_length``; both numbers are named."""


class SessionBusyError(DraftcError):
    """A session serves one request at a time; open a second session for a second thread."""


class EngineError(DraftcError):
    """A graph failed while running, or returned NaN or infinite logits."""


class BackendUnavailableError(DraftcError):
    """A package, a driver or a device that this backend needs is missing; the message says which."""


class CheckpointError(DraftcError):
    """A source cannot be read as a causal language model."""


class UnsupportedModelError(CheckpointError):
    """A model that draftc refuses by name, with the reason."""


class PairError(DraftcError):
    """Target and draft do not fit together; the message names the first difference."""


class CaptureError(DraftcError):
    """The model could not be captured as a graph; the message names the stage and the first cause."""


class ParityError(DraftcError):
    """The compiled graph does not compute what the checkpoint computes; nothing was written."""


class ResourceError(DraftcError):
    """Not enough disk or memory, or a file that cannot be written."""


class DraftcWarning(UserWarning):
    """Something works, but not as it was asked for, and costs more; the message says what, and why."""
