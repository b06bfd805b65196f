"""Supervises one llama.cpp `llama-server` from inside a threaded Python program and runs chat requests on it."""

from llama_worker.async_output import stream
from llama_worker.bios import default_bios, prompted_tools_text
from llama_worker.config import WorkerConfig
from llama_worker.config_file import load_config
from llama_worker.errors import ConfigError, LlamaWorkerError, WorkerClosed, WorkerStartError, WorkerStopError
from llama_worker.profiles import LoopDetector, RestartPolicy, TimeoutProfile
from llama_worker.runtime.free_port import free_port
from llama_worker.server.command import llama_server_cmd
from llama_worker.types import (
    BiosContext,
    BiosProvider,
    BiosText,
    ChatMessage,
    Durations,
    ExitSignal,
    LivenessEvidence,
    LivenessProbe,
    NotFound,
    NotReady,
    OutputChunk,
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
    StartFailReason,
    SubmitErr,
    SubmitOk,
    SubmitResult,
    ToolCall,
    ToolDef,
    ToolFunctionDef,
    ToolRunner,
    ToolTraceEntry,
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
    "ChatMessage",
    "ConfigError",
    "Durations",
    "ExitSignal",
    "LivenessEvidence",
    "LivenessProbe",
    "LlamaWorker",
    "LlamaWorkerError",
    "LoopDetector",
    "NotFound",
    "NotReady",
    "OutputChunk",
    "RequestFailReason",
    "RequestFinishReason",
    "RequestPhase",
    "RequestResult",
    "RequestState",
    "RequestStatus",
    "RestartPolicy",
    "StartFailReason",
    "SubmitErr",
    "SubmitOk",
    "SubmitResult",
    "TimeoutProfile",
    "ToolCall",
    "ToolDef",
    "ToolFunctionDef",
    "ToolRunner",
    "ToolTraceEntry",
    "WorkerClosed",
    "WorkerConfig",
    "WorkerDebugInfo",
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
    "stream",
]
