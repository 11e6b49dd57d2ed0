"""The worker's half of sleep, wake and weight updates: vLLM's calls, in the order of `pdkv.lifecycle`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from pdkv import lifecycle
from pdkv.errors import OutOfMemoryError, StateError
from pdkv.lifecycle import State
from pdkv_connectors.vllm import report

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.kvcache.sizing import SizingConstants

logger = init_logger(f"vllm.{__name__}")


class SleepingWorker:
    """Mixed in between `growth.GrowableWorker` and a stock worker class."""

    cache: GrowableKVCache | None
    constants: SizingConstants
    model_runner: Any

    _may_lend = False
    _was_lent = False
    _loading: contextlib.ExitStack | None = None

    @staticmethod
    def agree_minimum(value: int) -> int:
        """The minimum over all ranks; see `growth.GrowableWorker`."""
        raise NotImplementedError

    @property
    def _connector(self) -> Any:
        return get_kv_transfer_group() if has_kv_transfer_group() else None

    @property
    def kv_state(self) -> State:
        """Whether the cache is running, draining, asleep or lent."""
        return State.RUNNING if self.cache is None else lifecycle.state(self.cache)

    def put_cache_to_sleep(self) -> None:
        """Unregister and release; does nothing where the cache sleeps already.

        Raises:
            LeasesHeldError: this rank's connector still has something to send or to receive.
        """
        if self.cache is None or self.kv_state is State.ASLEEP:
            return
        slept = lifecycle.sleep(self.cache, self._connector)
        report.write_asleep(self, self.cache, slept)

    def wake_cache(self) -> None:
        """Commit and register, on all ranks or on none; does nothing where the cache is awake.

        Raises:
            OutOfMemoryError: on this rank; or StateError: on another one. All ranks stay asleep.
        """
        if self.cache is None or self.kv_state is not State.ASLEEP:
            return
        short: OutOfMemoryError | None = None
        woken = None
        try:
            woken = lifecycle.wake(self.cache, self._connector)
        except OutOfMemoryError as error:
            short = error
        if not self.agree_minimum(int(short is None)):
            if short is not None:
                raise short
            lifecycle.sleep(self.cache, self._connector)
            raise StateError("another rank has no memory for its KV cache, so that all stay asleep; its log says more.")
        if woken is not None:
            report.write_awake(self, self.cache, woken)

    def execute_model(self, scheduler_output: Any) -> Any:
        """The stock step, refused while there is no memory behind the cache: touching it would end the process."""
        if self.cache is not None and self.cache.is_released:
            raise StateError(f"the KV cache is {self.kv_state}, so no step can run; wake the engine first.")
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    # Weight updates. The engine core says before each whether the cache holds nothing to keep (`sleep_engine.py`).

    def pdkv_allow_lending(self, allowed: bool) -> None:
        """Whether the next weight update may have the cache's memory."""
        self._may_lend, self._was_lent = allowed, False

    def pdkv_was_lent(self) -> bool:
        """Whether the last weight update had the cache's memory, so that the handshake has to be published again."""
        return self._was_lent

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        with self._room_for_weights():
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self._begin_loading(super().start_weight_update, *args, **kwargs)  # type: ignore[misc]

    def start_draft_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self._begin_loading(super().start_draft_weight_update, *args, **kwargs)  # type: ignore[misc]

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().update_weights(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._end_loading()  # the stock worker ends its session too
            raise

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._end_loading()

    def _begin_loading(self, begin: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            if self._loading is None:
                stack.enter_context(self._room_for_weights())
            begin(*args, **kwargs)
            self._loading = self._loading or stack.pop_all()

    def _end_loading(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.close()

    @contextlib.contextmanager
    def _room_for_weights(self) -> Any:
        """Nothing to do where the cache is asleep: its memory is free already."""
        if self.cache is None or self.kv_state is State.ASLEEP:
            yield
            return
        with lifecycle.kv_cache_lent_for_weight_update(
            self.cache,
            self.model_runner.get_model(),
            reclaimable=self._may_lend,
            connector=self._connector,
            factor=self.constants.weight_update_factor,
        ) as lent:
            self._was_lent = lent.lent
            if lent.lent:
                logger.info("pdkv: %d bytes of the KV cache lent to a weight update", lent.given_back)
            yield
        if self._was_lent:
            report.write_lent(self, self.cache)
