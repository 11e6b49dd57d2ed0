"""Put the engines of a deployment to sleep and wake them, over HTTP, and see what comes free."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from pdkv.errors import HarnessError

#: Blocks are held until prefill has heard that decode has them; where it does not hear, for a lease of 30 s.
HELD_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 120.0
_POLL_S = 0.2
#: A request that no engine asleep may serve.
_PROBE = {"model": "none", "prompt": "x", "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class SleepRecord:
    """One sleep and wake, or one weight update.

    Attributes:
        role: prefill or decode.
        what: "sleep" or "weight update".
        committed_bytes: physical memory of the KV cache while awake.
        resident_before, resident_asleep, resident_after: bytes of the worker's process, as the kernel counts them;
            asleep is None for a weight update, during which nobody looks.
        status_asleep: HTTP status of a request for tokens to the engine asleep.
        generation_before, generation_after: of the registration that peers know.
        times_s: seconds that the calls took.
    """

    role: str
    what: str
    committed_bytes: int
    resident_before: int
    resident_asleep: int | None
    resident_after: int
    status_asleep: int | None
    generation_before: int
    generation_after: int
    times_s: Mapping[str, float]

    @property
    def drop_fraction(self) -> float | None:
        """How much of the cache's memory the process gave back."""
        if self.resident_asleep is None:
            return None
        return (self.resident_before - self.resident_asleep) / self.committed_bytes


class Sleeper:
    """One engine over HTTP.

    Args:
        role: prefill or decode.
        url: base URL of its API server.
        status: reads the engine's status files; see :func:`pdkv.launch.deployment.read_status`.
    """

    def __init__(self, role: str, url: str, status: Callable[[], Mapping[str, Any]]) -> None:
        self._role = role
        self._url = url
        self._status = status

    def sleep_and_wake(self) -> SleepRecord:
        """As soon as nobody holds its blocks.

        Raises:
            HarnessError: a call failed, or blocks were held for too long.
        """
        before, resident = self._facts(), self._resident()
        times_s = {"sleep": self._call_when_free("/sleep")}
        asleep = self._resident()
        status, _ = self._post("/v1/completions", _PROBE)
        times_s["wake_up"] = self._call("/wake_up")
        return self._record("sleep", before, resident, asleep, status, times_s)

    def update_weights(self) -> SleepRecord:
        """Load the same weights again.

        Raises:
            HarnessError: the call failed.
        """
        before, resident = self._facts(), self._resident()
        times_s = {"reload_weights": self._call("/collective_rpc", {"method": "reload_weights"})}
        return self._record("weight update", before, resident, None, None, times_s)

    def _record(
        self,
        what: str,
        before: Mapping[str, Any],
        resident: int,
        asleep: int | None,
        status: int | None,
        times_s: Mapping[str, float],
    ) -> SleepRecord:
        after = self._facts()
        return SleepRecord(
            role=self._role,
            what=what,
            committed_bytes=int(before["bytes_committed"]),
            resident_before=resident,
            resident_asleep=asleep,
            resident_after=self._resident(),
            status_asleep=status,
            generation_before=int(before["registration"]),
            generation_after=int(after["registration"]),
            times_s={name: round(seconds, 3) for name, seconds in times_s.items()},
        )

    def _facts(self) -> Mapping[str, Any]:
        workers = self._status()["workers"]
        if not workers or "registration" not in workers[0]:
            raise HarnessError(f"the {self._role} engine has written no status of its cache; is it a pdkv engine?")
        return dict(workers[0])

    def _resident(self) -> int:
        try:
            return int(psutil.Process(int(self._facts()["pid"])).memory_info().rss)
        except psutil.Error as error:
            raise HarnessError(f"the {self._role} engine's process cannot be looked at: {error}.") from error

    def _call_when_free(self, path: str) -> float:
        """Seconds of the call that was taken; answers of 409, which name who holds blocks, are waited out."""
        deadline = time.monotonic() + HELD_TIMEOUT_S
        while True:
            began = time.monotonic()
            status, answer = self._post(path)
            if status == 200:
                return time.monotonic() - began
            if status != 409 or time.monotonic() > deadline:
                raise HarnessError(f"{path} of the {self._role} engine was answered {status}: {answer}")
            time.sleep(_POLL_S)

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> float:
        began = time.monotonic()
        status, answer = self._post(path, body)
        if status != 200:
            raise HarnessError(f"{path} of the {self._role} engine was answered {status}: {answer}")
        return time.monotonic() - began

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=CALL_TIMEOUT_S) as answer:
                return int(answer.status), answer.read(2000).decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read(2000).decode(errors="replace")
        except OSError as error:
            raise HarnessError(f"{path} of the {self._role} engine cannot be reached: {error}.") from error
