"""An NVIDIA GPU, and workers whose servers compute on it."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from llama_worker import LlamaWorker, RestartPolicy
from tests.conftest import shell_program
from tests.server.pace import patience


def used_bytes() -> int:
    """The memory of the machine's first GPU that all processes use."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> None:
    """Skips where there is no GPU, or a llama-server that cannot use it."""
    try:
        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            pytest.skip("no NVIDIA GPU")
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA GPU: {error}")
    llama_server: str = request.getfixturevalue("llama_server")
    listed = subprocess.run(
        [llama_server, "--list-devices"], capture_output=True, text=True, check=True
    )
    if "CUDA0" not in listed.stdout:
        pytest.skip(f"{llama_server} was built without CUDA")


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """Takes all of the GPU away from `server`, a llama-server, from inside of it."""

    server: str
    order: Path

    def hold(self, seconds: float) -> None:
        """Until then, or until the server is killed, nothing that it launches is computed."""
        draft = self.order.with_suffix(".draft")
        draft.write_text(str(seconds))
        draft.replace(self.order)


@pytest.fixture
def gpu_holder(gpu: None, llama_server: str, tmp_path: Path) -> GpuHolder:
    """Of one server; what starts it, such as its guard, does not load the library."""
    library, order = tmp_path / "hold_gpu.so", tmp_path / "order"
    source = Path(__file__).with_name("hold_gpu.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    held = f"export LD_PRELOAD='{library}' HOLD_GPU_ORDER='{order}'"
    server = shell_program(tmp_path / "llama-server", f"{held}\nexec '{llama_server}' \"$@\"")
    return GpuHolder(server, order)


MakeWorker = Callable[..., LlamaWorker]


@pytest.fixture
def on_gpu(gpu: None, llama_server: str, smollm2: str) -> Iterator[MakeWorker]:
    """A factory of workers that are READY, all layers on the first GPU; closed at the end of the
    test."""

    def make(
        *, restart_backoff_s: float = 0.01, executable: str = llama_server, **config: Any
    ) -> LlamaWorker:
        worker = LlamaWorker.from_model(
            smollm2,
            executable=executable,
            extra_args=["--n-gpu-layers", "99", "--ctx-size", "8192", "--threads", "1"],
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"},
            restart=RestartPolicy(
                restart_backoff_s=restart_backoff_s, backoff_factor=1.0, max_restarts_per_window=50
            ),
            max_tokens=None,
            **config,
        )
        workers.callback(worker.close)
        worker.start().get(timeout=patience())
        return worker

    with ExitStack() as workers:
        yield make
