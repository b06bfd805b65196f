"""The llama-server that is built here holds no instruction that a CPU of x86-64-v3 lacks, and
starts on one."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_worker import LlamaWorker, WorkerConfig, llama_server_cmd
from llama_worker.cli.servers import find_server
from tests.conftest import running, shell_program
from tests.server.pace import HOST, SERVER_ARGS, measured, patience
from tools.build_server import planned

pytestmark = pytest.mark.server
# Registers that only AVX-512 names (zmm, k0 to k7, the upper sixteen), and the instructions of AMX.
BEYOND_AVX2 = re.compile(
    r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b|\b(tdp\w+|tile\w+|(ld|st)tilecfg)\b"
)
EMULATOR = shutil.which("qemu-x86_64")


@pytest.fixture(scope="session")
def built() -> str:
    """The one in the cache."""
    found, binary = find_server(None), planned(os.environ).binary
    if not binary.exists() and Path(found.path).resolve() != binary:
        pytest.skip(f"nothing is built where a server is given ({found.how})")
    return str(binary)


@pytest.mark.skipif(
    shutil.which("objdump") is None, reason="objdump, of binutils, is not installed"
)
def test_the_binary_has_no_avx512_or_amx(built: str) -> None:
    count, beyond = 0, []
    with running("objdump", "--disassemble", "--no-show-raw-insn", built) as (process, output):
        for line in output:
            _, tab, instruction = line.partition("\t")
            count += bool(tab)
            if tab and BEYOND_AVX2.search(instruction):
                beyond.append(line.strip())
        assert process.wait(patience()) == 0
    assert count > 100_000
    assert beyond == []


def test_the_pattern_finds_what_it_is_for() -> None:
    avx512 = ["vaddps %zmm1,%zmm2,%zmm3", "vmovdqu8 (%rax),%ymm17", "vpcmpeqb %ymm1,%ymm2,%k1"]
    beyond = [*avx512, "tdpbssd %tmm2,%tmm1,%tmm0", "ldtilecfg (%rax)"]
    within = ["vfmadd231ps %ymm1,%ymm2,%ymm15", "call <_ZN4tileEv>", "mov %rax,%rbx"]
    assert list(filter(BEYOND_AVX2.search, beyond + within)) == beyond


def test_the_server_names_no_such_feature(
    built: str, thin_model: str, free_port: Callable[[], int]
) -> None:
    args = (*SERVER_ARGS, "--ctx-size", "512", "--verbosity", "4")
    port = free_port()
    command = llama_server_cmd(
        thin_model, host=HOST, port=port, slots=1, executable=built, extra_args=args
    )
    with LlamaWorker(WorkerConfig("features", HOST, port, command)) as worker:
        logs = worker.get_debug_info().get(timeout=patience())["recent_logs"]
    (line,) = [line for line in logs if "system_info" in line]
    features = dict(re.findall(r"(\w+) = (\d+)", line))
    assert not [name for name in features if name.startswith(("AVX512", "AMX"))], line
    if "x86" in os.uname().machine:
        assert features["AVX2"] == "1"


@pytest.mark.skipif(EMULATOR is None, reason="no qemu-x86_64 here: apt install qemu-user")
def test_it_answers_on_a_plain_haswell(built: str, thin_model: str, tmp_path: Path) -> None:
    emulated = shell_program(
        tmp_path / "llama-server", f'exec {EMULATOR} -cpu Haswell "{built}" "$@"'
    )
    assert measured(emulated, thin_model, read_tokens=1, made_tokens=1).start_s > 0
