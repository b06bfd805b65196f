"""Free ports: which they are, and that nobody else is given the same."""

import socket
from collections.abc import Callable
from unittest.mock import Mock

import pytest

import llama_worker
from llama_worker.runtime.process import free_port as ports
from tests.conftest import FORK_A_CHILD, run_python

HOST = "127.0.0.1"


def test_each_call_gives_another_port_below_kernel_range() -> None:
    given = [llama_worker.free_port() for _ in range(50)]
    assert len(set(given)) == 50
    assert all(20000 <= port < 32000 for port in given)


@pytest.mark.parametrize("host", [HOST, "0.0.0.0"])
def test_port_that_somebody_listens_on_is_not_free(
    host: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = free_port()
    monkeypatch.setattr(ports, "_PORTS", range(taken, taken + 1))
    assert llama_worker.free_port(host) == taken
    with (
        socket.create_server((HOST, taken)),
        pytest.raises(OSError, match=f"no port from {taken} to {taken} is free"),
    ):
        llama_worker.free_port(host)


def test_brackets_are_no_part_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses_of = Mock(return_value=[])
    monkeypatch.setattr(ports, "addresses_of", addresses_of)
    port = llama_worker.free_port("[::1]")
    addresses_of.assert_called_once_with("::1", port)


def test_a_forked_process_is_given_another_port() -> None:
    program = (
        "import os; from llama_worker import free_port; os.fork() and os.wait(); print(free_port())"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    childs, parents = done.stdout.split()
    assert childs != parents


_FORKS_MEANWHILE = f"""{FORK_A_CHILD}
import socket, sys, time
from llama_worker.runtime.process.free_port import addresses_of, can_listen
port, bind, children, threads = int(sys.argv[1]), socket.socket.bind, [], []
def bind_and_fork(probe, address):
    bind(probe, address)
    threads.append(forking(children))
socket.socket.bind = bind_and_fork
can_listen(addresses_of("127.0.0.1", port))
threads[0].join()
try:
    for tries_left in reversed(range(300)):  # the child lives for longer
        try:
            bind(socket.socket(), ("127.0.0.1", port))
            break
        except OSError:
            if not tries_left:
                raise
            time.sleep(0.1)  # another process may just look whether the port is free
finally:
    os.kill(children[0], signal.SIGKILL)
"""


def test_child_forked_meanwhile_does_not_keep_the_port(free_port: Callable[[], int]) -> None:
    done = run_python(_FORKS_MEANWHILE, str(free_port()))
    assert done.returncode == 0, done.stderr
