"""Process identity: recognising a process and checking whether it ended."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.parent import LAUNCH

_STARTED_FIELD = 19
"""Index, after the name in /proc/PID/stat, of the start time in ticks since boot."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """An identity of a process that is safe against reused process ids."""

    host: str
    """Host name."""
    pid: int
    """Process id."""
    place: str = ""
    """Boot id and pid namespace in which ``pid`` is valid; empty if unknown."""
    started: str = ""
    """Start time on the clock of ``place``; empty if unknown."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProcessId:
        """The inverse of :meth:`to_dict`.

        Raises:
            TypeError, KeyError, ValueError: invalid values.
        """
        words = {name: values[name] for name in ("host", "place", "started")}
        if not all(isinstance(word, str) for word in words.values()):
            raise ValueError(f"a mark holds words, got {words}")
        return cls(pid=int(values["pid"]), **words)

    def is_alive(self) -> bool:
        """Whether the process is certainly alive; False if unknown."""
        is_here = bool(self.place and self.started) and self.place == _place()
        return is_here and _started(self.pid) == self.started


def mark_of(pid: int) -> ProcessId:
    """The mark of a process on this machine."""
    return ProcessId(platform.node(), pid, _place(), _started(pid))


def _place() -> str:
    # Containers on one machine may share its name and have separate pid namespaces.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""  # not Linux


def _started(pid: int) -> str:
    """Start time of a process; "ended" for a zombie; empty if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[_STARTED_FIELD]


@dataclass(frozen=True, slots=True)
class TorchrunLaunch:
    """The launch of this process: a torchrun invocation, which may restart it."""

    name: str
    """torchrun's name of the launch; not necessarily unique."""
    agent: ProcessId
    """The agent process on this machine that started this one."""

    def is_in(self, record: Any) -> bool:
        """Whether ``record`` (:func:`launch_record`) is of this launch, with an agent that took part."""
        if not isinstance(record, dict) or record.get("name") != self.name or not self.agent.started:
            return False
        agents = record.get("agents")
        return isinstance(agents, list) and self.agent.to_dict() in agents


def launch() -> TorchrunLaunch | None:
    """The launch of this process if torchrun started it, else None."""
    name = os.environ.get(LAUNCH)
    return None if name is None else TorchrunLaunch(name, mark_of(os.getppid()))


def launch_record(launches: Iterable[TorchrunLaunch | None]) -> dict[str, Any] | None:
    """The record of the launches of a run's processes."""
    known = [entry for entry in launches if entry is not None]
    if not known:
        return None
    agents: list[dict[str, Any]] = []
    for entry in known:
        if entry.agent.to_dict() not in agents:
            agents.append(entry.agent.to_dict())
    return {"name": known[0].name, "agents": agents}
