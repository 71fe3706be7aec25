"""How long a process has computed and how long it has waited; a busy machine is neither."""

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOST_S = 3.0
"""A longer pause between two looks was this process's own, and says nothing of the other."""


class ProcessClock:
    """Looks at one process again and again, between calls of `restart`.

    Waiting is what passes while the main thread sleeps and no CPU is used. A process that wants
    the CPU and does not get it, or that was stopped, waits for nothing of its own. Where the
    kernel tells nothing of processes, all that passes is waiting.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self.is_dead = False
        self._cpu_at_start_s: float | None = None
        self.restart()

    def restart(self) -> None:
        """Begins to count anew, from the next look on."""
        self._waited_s = 0.0
        self._cpu_at_start_s = None
        self._looked = time.monotonic()
        self._cpu_s = 0.0

    def read(self, now: float) -> tuple[float, float]:
        """Returns the seconds waited and the CPU seconds used since the first look."""
        state, cpu_s = self._look()
        if self._cpu_at_start_s is None:
            self._cpu_at_start_s = self._cpu_s = cpu_s
        computed_s = cpu_s - self._cpu_s
        passed_s = min(now - self._looked, _MOST_S)
        self._looked, self._cpu_s = now, cpu_s
        if state in "SD" and computed_s < 0.1 * passed_s:
            self._waited_s += passed_s
        self.is_dead = state in "ZX"
        return self._waited_s, cpu_s - self._cpu_at_start_s

    def _look(self) -> tuple[str, float]:
        """Returns the state's letter and the CPU seconds of the process and its ended children."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return "S", 0.0
        # proc(5): state is the 3rd field, utime stime cutime cstime the 14th to 17th.
        return fields[0], sum(map(int, fields[11:15])) / _TICKS_PER_S
