"""Machines of one: network namespaces, each with an address of its own, on a switch that is one
too. Nothing is added to the network of the machine itself."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.ray.cluster import cluster_environment

GCS_PORT = 6379
RAY = Path(sys.executable).with_name("ray")
_NODE_UP_S = 180.0  # on a busy machine


class CannotBeMade(Exception):
    """Network namespaces are not to be had here; the text says why."""


class Machines:
    """Machine 1 is the cluster's head. What stands here can be used from any of them: by the host
    program, too."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder
        self.prefix = prefix

    @classmethod
    def make(cls, count: int) -> Machines:
        """Raises CannotBeMade; nothing is left behind then."""
        if shutil.which("ip") is None:
            raise CannotBeMade("there is no `ip` (on Debian and Ubuntu: apt install iproute2)")
        folder = Path(tempfile.mkdtemp(prefix="tm", dir="/tmp"))
        machines = cls(folder, f"lw{secrets.token_hex(3)}")
        try:
            machines._lay(count)
        except subprocess.CalledProcessError as error:
            with suppress(subprocess.CalledProcessError):
                machines.remove()
            raise CannotBeMade(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        return machines

    def _lay(self, count: int) -> None:
        switch = self._name("sw")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(1, count + 1):
            name, port = self._name(number), f"port{number}"
            _ip("netns", "add", name)
            peer = ("type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", name, "link", "add", "eth0", *peer)
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")

    def remove(self) -> None:
        """Every process on the machines, their namespaces and their files."""
        try:
            for name in self._names():
                for process in self._on(name):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            for name in self._names():
                _ip("netns", "del", name)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, number: int) -> str:
        return f"10.77.0.{number}"

    def command(self, number: int, *command: str) -> list[str]:
        """The command, as it runs on that machine."""
        return ["ip", "netns", "exec", self._name(number), *command]

    def environment(self, number: int) -> dict[str, str]:
        """Of what runs there. The cluster's secret is made once."""
        own = self.folder / str(number)
        own.mkdir(exist_ok=True)
        token = self.folder / "token"
        if not token.exists():
            token.write_text(secrets.token_hex(32))
        environment = cluster_environment(own)
        del environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # these may be reached from another
        return {**environment, "RAY_AUTH_TOKEN": token.read_text()}

    def start_ray(self, number: int, **resources: float) -> None:
        """A node of the cluster; its head on machine 1."""
        gcs = f"{self.address(1)}:{GCS_PORT}"
        head = ["--head", "--port", str(GCS_PORT), "--include-dashboard", "false"]
        shown = ",".join(f'"{name}": {amount:g}' for name, amount in resources.items())
        subprocess.run(
            self.command(
                number,
                *(str(RAY), "start", "--node-ip-address", self.address(number)),
                *(head if number == 1 else ["--address", gcs]),
                *("--num-cpus", "0" if number == 1 else "4", "--resources", f"{{{shown}}}"),
                *("--object-store-memory", str(80 << 20), "--disable-usage-stats"),
            ),
            env={**os.environ, **self.environment(number)},
            capture_output=True,
            check=True,
            timeout=_NODE_UP_S,
        )

    def restart_ray(self, number: int, **resources: float) -> None:
        """As a service manager does on a machine whose node has ended, or is about to."""
        for process in self.processes(number):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.start_ray(number, **resources)

    def processes(self, number: int) -> list[psutil.Process]:
        return self._on(self._name(number))

    def servers(self, number: int) -> list[psutil.Process]:
        """The llama-servers there, scripted ones among them; guards are none."""
        return [each for each in self.processes(number) if _is_server(each)]

    def set_link(self, number: int, *, up: bool) -> None:
        """Pull the machine's cable, or plug it in."""
        _ip("-n", self._name("sw"), "link", "set", f"port{number}", "up" if up else "down")

    def power_off(self, number: int) -> None:
        """Everything there stops at once, and no connection is closed."""
        self.set_link(number, up=False)
        doomed = self.processes(number)
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_head(self) -> None:
        """The head's own process; what else is on machine 1 goes on."""
        (head,) = [each for each in self.processes(1) if each.name() == "gcs_server"]
        head.kill()

    def _name(self, which: int | str) -> str:
        return f"{self.prefix}-{which}"

    def _names(self) -> list[str]:
        listed = _ip("netns", "list").split("\n")
        return [line.split()[0] for line in listed if line.startswith(self.prefix)]

    def _on(self, name: str) -> list[psutil.Process]:
        found = []
        for pid in _ip("netns", "pids", name).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found


def _is_server(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        is_running = process.status() != psutil.STATUS_ZOMBIE
        return is_running and "--port" in words and "guard" not in " ".join(words[:4])
    return False


def _ip(*words: str) -> str:
    """Raises CalledProcessError."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def seconds_until(check: Callable[[], object], within_s: float) -> float:
    """How long it took for `check()` to be true; AssertionError when the time is up."""
    began_at = time.monotonic()
    while not check():
        assert time.monotonic() < began_at + within_s, f"not within {within_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - began_at
