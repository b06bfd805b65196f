"""Supervises one llama.cpp `llama-server` from inside a threaded Python program and runs chat
requests on it.

Public names are imported when they are first used (PEP 562): the command line is there in a moment,
and a program that reads a configuration only does not pay for the HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_worker.bios import default_bios, prompted_tools_text
    from llama_worker.config.command import llama_server_cmd
    from llama_worker.config.file import load_config
    from llama_worker.config.profiles import (
        Canary,
        LoopDetector,
        Recycle,
        RestartPolicy,
        TimeoutProfile,
    )
    from llama_worker.config.settings import WorkerConfig
    from llama_worker.errors import (
        ConfigError,
        LlamaWorkerError,
        RequestFailed,
        RequestRefused,
        WorkerClosed,
        WorkerStartError,
        WorkerStopError,
    )
    from llama_worker.runtime.host.futures import ResultFuture, WorkerFuture
    from llama_worker.runtime.process.free_port import free_port
    from llama_worker.types.chat import ChatMessage, ContentPart, ToolCall, ToolDef, ToolFunctionDef
    from llama_worker.types.hooks import (
        BiosContext,
        BiosProvider,
        BiosText,
        CancellableToolRunner,
        EventHandler,
        LivenessEvidence,
        LivenessProbe,
        RunningCall,
        SignalHandler,
        ToolRunner,
    )
    from llama_worker.types.request import (
        ContextUse,
        ExitSignal,
        NotFound,
        NotReady,
        OutputChunk,
        PromptProgress,
        RequestFailReason,
        RequestFinishReason,
        RequestPhase,
        RequestResult,
        RequestState,
        RequestStatus,
        SubmitErr,
        SubmitOk,
        SubmitResult,
        Timings,
        TokenCount,
        ToolTraceEntry,
        Usage,
    )
    from llama_worker.types.worker import (
        Durations,
        RestartRecord,
        StartFailReason,
        WorkerDebugInfo,
        WorkerState,
        WorkerStatus,
        WorkerTotals,
    )
    from llama_worker.worker import LlamaWorker

__version__ = "0.1.0"

__all__ = [
    "BiosContext",
    "BiosProvider",
    "BiosText",
    "Canary",
    "CancellableToolRunner",
    "ChatMessage",
    "ConfigError",
    "ContentPart",
    "ContextUse",
    "Durations",
    "EventHandler",
    "ExitSignal",
    "LivenessEvidence",
    "LivenessProbe",
    "LlamaWorker",
    "LlamaWorkerError",
    "LoopDetector",
    "NotFound",
    "NotReady",
    "OutputChunk",
    "PromptProgress",
    "Recycle",
    "RequestFailReason",
    "RequestFailed",
    "RequestFinishReason",
    "RequestPhase",
    "RequestRefused",
    "RequestResult",
    "RequestState",
    "RequestStatus",
    "RestartPolicy",
    "RestartRecord",
    "ResultFuture",
    "RunningCall",
    "SignalHandler",
    "StartFailReason",
    "SubmitErr",
    "SubmitOk",
    "SubmitResult",
    "TimeoutProfile",
    "Timings",
    "TokenCount",
    "ToolCall",
    "ToolDef",
    "ToolFunctionDef",
    "ToolRunner",
    "ToolTraceEntry",
    "Usage",
    "WorkerClosed",
    "WorkerConfig",
    "WorkerDebugInfo",
    "WorkerFuture",
    "WorkerStartError",
    "WorkerState",
    "WorkerStatus",
    "WorkerStopError",
    "WorkerTotals",
    "default_bios",
    "free_port",
    "llama_server_cmd",
    "load_config",
    "prompted_tools_text",
]

# The modules of the public names; `types.request` has those that are not here.
_MODULES = {
    "bios": ("default_bios", "prompted_tools_text"),
    "config.command": ("llama_server_cmd",),
    "config.file": ("load_config",),
    "config.profiles": ("Canary", "LoopDetector", "Recycle", "RestartPolicy", "TimeoutProfile"),
    "config.settings": ("WorkerConfig",),
    "errors": (
        *("ConfigError", "LlamaWorkerError", "RequestFailed", "RequestRefused"),
        *("WorkerClosed", "WorkerStartError", "WorkerStopError"),
    ),
    "runtime.host.futures": ("ResultFuture", "WorkerFuture"),
    "runtime.process.free_port": ("free_port",),
    "types.chat": ("ChatMessage", "ContentPart", "ToolCall", "ToolDef", "ToolFunctionDef"),
    "types.hooks": (
        *("BiosContext", "BiosProvider", "BiosText", "CancellableToolRunner", "EventHandler"),
        *("LivenessEvidence", "LivenessProbe", "RunningCall", "SignalHandler", "ToolRunner"),
    ),
    "types.worker": (
        *("Durations", "RestartRecord", "StartFailReason", "WorkerDebugInfo", "WorkerState"),
        *("WorkerStatus", "WorkerTotals"),
    ),
    "worker": ("LlamaWorker",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "types.request")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
