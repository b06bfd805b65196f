"""The public names of the package: what `import llama_worker` gives, and nothing else.

`import X as X` tells a type checker that the name is meant to be imported from here.
"""
# ruff: noqa: I001 - the names of a module stand together

from llama_worker.bios import (
    default_bios as default_bios,
    prompted_tools_text as prompted_tools_text,
)
from llama_worker.config.command import llama_server_cmd as llama_server_cmd
from llama_worker.config.file import load_config as load_config
from llama_worker.config.profiles import (
    Canary as Canary,
    LoopDetector as LoopDetector,
    Recycle as Recycle,
    RestartPolicy as RestartPolicy,
    TimeoutProfile as TimeoutProfile,
)
from llama_worker.config.settings import WorkerConfig as WorkerConfig
from llama_worker.errors import (
    ConfigError as ConfigError,
    LlamaWorkerError as LlamaWorkerError,
    RequestFailed as RequestFailed,
    RequestRefused as RequestRefused,
    WorkerClosed as WorkerClosed,
    WorkerStartError as WorkerStartError,
    WorkerStopError as WorkerStopError,
)
from llama_worker.runtime.host.futures import (
    ResultFuture as ResultFuture,
    WorkerFuture as WorkerFuture,
)
from llama_worker.runtime.process.free_port import free_port as free_port
from llama_worker.types.chat import (
    ChatMessage as ChatMessage,
    ContentPart as ContentPart,
    ToolCall as ToolCall,
    ToolDef as ToolDef,
    ToolFunctionDef as ToolFunctionDef,
)
from llama_worker.types.hooks import (
    BiosContext as BiosContext,
    BiosProvider as BiosProvider,
    BiosText as BiosText,
    CancellableToolRunner as CancellableToolRunner,
    EventHandler as EventHandler,
    LivenessEvidence as LivenessEvidence,
    LivenessProbe as LivenessProbe,
    RunningCall as RunningCall,
    SignalHandler as SignalHandler,
    ToolRunner as ToolRunner,
)
from llama_worker.types.request import (
    ContextUse as ContextUse,
    ExitSignal as ExitSignal,
    NotFound as NotFound,
    NotReady as NotReady,
    OutputChunk as OutputChunk,
    OutputLoop as OutputLoop,
    PromptProgress as PromptProgress,
    RequestFailReason as RequestFailReason,
    RequestFinishReason as RequestFinishReason,
    RequestPhase as RequestPhase,
    RequestResult as RequestResult,
    RequestState as RequestState,
    RequestStatus as RequestStatus,
    SubmitErr as SubmitErr,
    SubmitErrorCode as SubmitErrorCode,
    SubmitOk as SubmitOk,
    SubmitResult as SubmitResult,
    Timings as Timings,
    TokenCount as TokenCount,
    ToolTraceEntry as ToolTraceEntry,
    Usage as Usage,
)
from llama_worker.types.worker import (
    Durations as Durations,
    RestartRecord as RestartRecord,
    StartFailReason as StartFailReason,
    WorkerDebugInfo as WorkerDebugInfo,
    WorkerState as WorkerState,
    WorkerStatus as WorkerStatus,
    WorkerTotals as WorkerTotals,
)
from llama_worker.worker import LlamaWorker as LlamaWorker
