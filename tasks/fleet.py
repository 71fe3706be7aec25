"""Calls a stage at whichever of its services is alive and free: shards go where there is room.

Which work there is, is fixed by the plan; the fleet only decides who does it. A service that dies,
stalls or ends loses the call that it was in, and that call goes to another one.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import StorageError
from storage.records import Record
from tasks.client import Service
from tasks.errors import Permanent, Transient
from tasks.service_contract import Health

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

_POLL_S = 0.25
_FIND_EVERY_S = 2.0
_HEALTH_LIMIT_S = 10.0
_REST_S = 10.0
"""How long a service that failed a call, or does not answer, is left alone."""
_BUSY_REST_S = 1.0
_MAX_TRIES = 4
"""Services that one request may fail at before its task hears of it."""
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Address:
    """Where one service is: what its lease says."""

    name: str
    """Names this start of it: another start is another name."""
    url: str


@dataclass(frozen=True)
class FleetSpec:
    """Which services make up a fleet, and how patient it is."""

    stage: str
    """Its name, for messages."""
    find: Callable[[], Sequence[Address]]
    """Returns the services that may be alive and have the engine that is wanted."""
    check: Callable[[Health], None]
    """Raises `Permanent` if a service's environment must not take part."""
    start_more: Callable[[], None]
    """Called now and then while fewer than `wanted` are there; may start services."""
    wanted: int = 1
    everywhere: tuple[type[Record], ...] = ()
    """Requests of these classes go to all services, and fail if all fail."""
    wait_s: float = 600.0
    """How long a request waits for a service to be there and free."""
    stall_s: float = 600.0
    """How long a call may go on without a sign of progress."""


@dataclass
class _Member:
    address: Address
    service: Service
    busy: bool = False
    rests_until: float = 0.0


class Fleet:
    """The services of one stage as one client. Safe to use from several threads.

    Args:
        spec: who they are.
        token: their bearer token.
        say: told what is waited for.
    """

    warm = True

    def __init__(
        self, spec: FleetSpec, *, token: str, say: Callable[[str], None] = logger.info
    ) -> None:
        self._spec = spec
        self._token = token
        self._say = say
        self._lock = threading.Lock()
        self._freed = threading.Event()
        """Set when a member is done with a call: whoever waits looks at once."""
        self._members: dict[str, _Member] = {}
        self._found_at = 0.0
        self._closed = False

    def prepare(self) -> None:
        """Has services started that are missing, so that they are ready when a call comes."""
        self._look()

    def run(self, request: Record, result_type: type[R]) -> R:
        """Returns the stage's result; see `tasks.client.StageClient`.

        Raises:
            Transient: nobody took or finished the request within the limits.
            Permanent: the stage refused it, or a service runs other libraries or code.
        """
        if isinstance(request, self._spec.everywhere):
            return self._run_everywhere(request, result_type)
        failures: list[Transient] = []
        while True:
            with self._taken(failures) as member:
                try:
                    return member.service.run(request, result_type)
                except Transient as error:
                    logger.warning("%s: %s", member.address.name, error)
                    self._say(f"{member.address.name} lost a call, which goes to another: {error}")
                    member.rests_until = time.monotonic() + _REST_S
                    failures.append(error)
                    if len(failures) == _MAX_TRIES:
                        raise

    def close(self) -> None:
        """Closes the connections; the services go on."""
        with self._lock:
            self._closed = True
            members = list(self._members.values())
            self._members.clear()
        for member in members:
            member.service.close()

    def _run_everywhere(self, request: Record, result_type: type[R]) -> R:
        self._look()
        with self._lock:
            members = list(self._members.values())
        if not members:
            raise Transient(f"No {self._spec.stage} service is there yet.")
        with ThreadPoolExecutor(len(members)) as threads:
            asked = [threads.submit(each.service.run, request, result_type) for each in members]
        done = [future.result() for future in asked if future.exception() is None]
        return done[0] if done else asked[0].result()

    @contextmanager
    def _taken(self, failures: Sequence[Transient]) -> Iterator[_Member]:
        """Yields a free member; nobody else gets it meanwhile."""
        member = self._wait_for_member(failures)
        try:
            yield member
        finally:
            with self._lock:
                member.busy = False
                gone = self._members.get(member.address.name) is not member
            self._freed.set()
            if gone:
                member.service.close()

    def _wait_for_member(self, failures: Sequence[Transient]) -> _Member:
        began = said = time.monotonic()
        while True:
            self._look()
            member = self._free_member()
            if member is not None and self._is_fit(member):
                return member
            waited = time.monotonic() - began
            if waited > self._spec.wait_s or self._closed:
                raise self._nobody(failures, waited)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                self._say(
                    f"waiting for a {self._spec.stage} service: {self._whom()} ({waited:.0f} s)"
                )
            self._freed.wait(_POLL_S)
            self._freed.clear()

    def _whom(self) -> str:
        with self._lock:
            names = ", ".join(sorted(self._members))
        return f"{names} busy or failed a call just now" if names else "none is alive"

    def _nobody(self, failures: Sequence[Transient], waited: float) -> Transient:
        stage = self._spec.stage
        last = f" The last failure: {failures[-1]}" if failures else ""
        return Transient(
            f"No {stage} service took the request within {waited:.0f} s: {self._whom()}. Expected "
            f"one: start the deployment `{stage}-service` for this run, look at its work pool and "
            f"workers, or set placement.{stage}=local.{last}"
        )

    def _free_member(self) -> _Member | None:
        """Returns a member that is idle, marked busy; rested ones first."""
        now = time.monotonic()
        with self._lock:
            idle = [member for member in self._members.values() if not member.busy]
            rested = [member for member in idle if member.rests_until <= now]
            if not rested:
                return None
            rested[0].busy = True
            return rested[0]

    def _is_fit(self, member: _Member) -> bool:
        """Whether a member that was just taken can have a call; else it rests."""
        rest_s = _REST_S
        try:
            health = member.service.health(within_s=_HEALTH_LIMIT_S)
            if health.status == "ready" and health.busy_s is None:
                self._spec.check(health)
                return True
            rest_s = _BUSY_REST_S
        except Transient as error:
            logger.info("%s is not there: %s", member.address.name, error)
        except Permanent:
            self._free(member, rest_s=0.0)
            raise
        self._free(member, rest_s=rest_s)
        return False

    def _free(self, member: _Member, *, rest_s: float) -> None:
        with self._lock:
            member.busy = False
            member.rests_until = time.monotonic() + rest_s

    def _look(self) -> None:
        """Takes in services that came and lets go of those that went."""
        with self._lock:
            if time.monotonic() - self._found_at < _FIND_EVERY_S and self._members:
                return
            self._found_at = time.monotonic()
        try:
            found = {address.name: address for address in self._spec.find()}
        except StorageError as error:
            logger.warning("The %s services cannot be listed: %s", self._spec.stage, error)
            return
        with self._lock:
            for name, address in found.items():
                if name not in self._members:
                    service = Service(address.url, self._token, stall_s=self._spec.stall_s)
                    self._members[name] = _Member(address, service)
            gone = [name for name in self._members if name not in found]
            left = [self._members.pop(name) for name in gone]
            few = len(self._members) < self._spec.wanted
        for member in left:
            if not member.busy:
                member.service.close()
        if few:
            self._spec.start_more()
