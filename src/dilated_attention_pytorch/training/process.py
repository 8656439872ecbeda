"""A process that is to be known again: which one it is, whether it is gone, and ending with the one that started it."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOOK_SECONDS = 1.0
"""How often a rank looks whether torchrun's agent is still there."""
_LAUNCH = "TORCHELASTIC_RUN_ID"
_STARTED_FIELD = 19
"""Of what follows the name in /proc/PID/stat: when the process was started, in ticks since the system was."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A process as others know it again. Process numbers are given anew, so its number alone is not enough."""

    host: str
    """The machine's name."""
    pid: int
    """Its number."""
    place: str = ""
    """The start of the system and the space of process numbers in which ``pid`` counts; empty if it is not known."""
    started: str = ""
    """When it was started, in the clock of ``place``; empty if it is not known."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Mark:
        """The mark whose :meth:`to_dict` this is.

        Raises:
            TypeError, KeyError, ValueError: it is of none.
        """
        words = {name: values[name] for name in ("host", "place", "started")}
        if not all(isinstance(word, str) for word in words.values()):
            raise ValueError(f"a mark holds words, got {words}")
        return cls(pid=int(values["pid"]), **words)

    def is_gone(self) -> bool:
        """Whether the process has ended, for certain. False where that cannot be told."""
        if not self._is_here():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # another user's, whose start may be told all the same
        started = _started(self.pid)
        return bool(started) and started != self.started

    def is_alive(self) -> bool:
        """Whether the process has not ended, for certain. False where that cannot be told."""
        return self._is_here() and _started(self.pid) == self.started

    def _is_here(self) -> bool:
        """Whether process numbers of the mark are those that this process sees."""
        return bool(self.place and self.started) and self.place == _place()


def mark_of(pid: int) -> Mark:
    """The mark of a process of this machine."""
    return Mark(platform.node(), pid, _place(), _started(pid))


def _place() -> str:
    # Containers of one machine may share its name, and number their processes each for itself.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""  # not Linux


def _started(pid: int) -> str:
    """When a process was started, "ended" of one that has and is still listed; empty if that cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[_STARTED_FIELD]


@dataclass(frozen=True, slots=True)
class Launch:
    """What this process was started by: one torchrun, which may start it again when it fails."""

    name: str
    """What torchrun calls the launch; several may be called the same."""
    agent: Mark
    """The process of this machine that started this one."""

    def is_in(self, record: Any) -> bool:
        """Whether this launch, with an agent that took part then, wrote ``record`` (:func:`launch_record`)."""
        if not isinstance(record, dict) or record.get("name") != self.name or not self.agent.started:
            return False
        agents = record.get("agents")
        return isinstance(agents, list) and self.agent.to_dict() in agents


def launch() -> Launch | None:
    """What this process was started by, if it was torchrun."""
    name = os.environ.get(_LAUNCH)
    return None if name is None else Launch(name, mark_of(os.getppid()))


def launch_record(launches: Iterable[Launch | None]) -> dict[str, Any] | None:
    """What to write down of what the processes of a run were started by."""
    known = [found for found in launches if found is not None]
    if not known:
        return None
    agents: list[dict[str, Any]] = []
    for found in known:
        if found.agent.to_dict() not in agents:
            agents.append(found.agent.to_dict())
    return {"name": known[0].name, "agents": agents}


@contextmanager
def ending_with_launcher(what: str) -> Iterator[None]:
    """End this process as soon as torchrun's agent, which started it, is gone, whatever the main thread waits for.

    The ranks of an agent that was killed would train on, beside those that somebody starts in their place.

    Args:
        what: what this process does, for the line that it leaves.
    """
    if launch() is None:
        yield
        return
    agent, is_over = os.getppid(), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            if os.getppid() != agent:
                # Standard error may have gone with the agent.
                with suppress(OSError, ValueError):
                    print(
                        f"rank {os.environ.get('RANK')}: {what}: torchrun's agent (process {agent}) is gone, so this "
                        "process ends",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
                os._exit(1)

    watch = threading.Thread(target=look, name="dilated-attention-launcher", daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
