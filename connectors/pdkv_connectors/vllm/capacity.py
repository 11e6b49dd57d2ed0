"""How much address space a worker reserves, and whether its cache can grow at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger

from pdkv.errors import ConnectorError
from pdkv.kvcache.ranks import minimum_over
from pdkv.kvcache.sizing import SizingConstants, require_room_for_one_request
from pdkv_connectors.vllm.late import BuiltLate
from pdkv_connectors.vllm.placement import why_not_growable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from pdkv.memory import MemoryDriver
    from pdkv_connectors.vllm.settings import EngineSettings

logger = init_logger(f"vllm.{__name__}")


class CapacityWorker:
    """What `growth.GrowableWorker` stands on: the answer to vLLM's question for available memory."""

    vllm_config: VllmConfig
    model_config: Any
    model_runner: Any
    settings: EngineSettings
    constants: SizingConstants
    fixed_because: str | None
    _first_pass_bytes: int

    def open_driver(self) -> MemoryDriver:
        """The memory driver of this worker's device."""
        raise NotImplementedError

    def use_fixed_utilization(self) -> None:
        """The cache cannot grow: where no memory utilization was given, take the one that suits a fixed cache."""

    def determine_available_memory(self) -> int:
        """Bytes to reserve, not bytes to use: the engine core turns them into the capacity in blocks.

        Raises:
            CapacityError: the capacity asked for is too small for one request of `max_model_len` tokens.
        """
        # Not `constants.log()`: vLLM shows no other logger than its own below warnings.
        logger.info("pdkv: sizing constants: %s", self.constants.describe())
        self._require_late_connector()
        specs = self.model_runner.get_kv_cache_spec()
        self.fixed_because = self._why_fixed(specs)
        if self.fixed_because is not None:
            logger.warning("pdkv: the KV cache stays fixed, as without pdkv: %s", self.fixed_because)
            self.use_fixed_utilization()
            return int(super().determine_available_memory())  # type: ignore[misc]
        return self._capacity_bytes(list(specs.values()))

    def _why_fixed(self, specs: dict[str, KVCacheSpec]) -> str | None:
        """The ranks agree on it: with pipeline parallelism one stage may hold the one layer that cannot grow."""
        driver = self.open_driver()
        reason = why_not_growable(self.vllm_config, specs, driver.granule)
        driver.close()
        if self.agree_minimum(int(reason is None)):
            return None
        return reason or "another rank has layers whose cache cannot grow; its log says which."

    @staticmethod
    def agree_minimum(value: int) -> int:
        """The minimum of `value` over all ranks of the engine, over vLLM's CPU group. Every rank calls it."""
        world = get_world_group()
        return value if world.world_size == 1 else minimum_over(world.cpu_group)(value)

    def _capacity_bytes(self, specs: list[KVCacheSpec]) -> int:
        self._first_pass_bytes = super().determine_available_memory()  # type: ignore[misc]
        bytes_per_block = sum(spec.page_size_bytes for spec in specs)
        if self.settings.capacity_blocks is None:
            driver = self.open_driver()
            capacity = max(self._first_pass_bytes, driver.memory_info().total)
            driver.close()
            return int(capacity)
        require_room_for_one_request(
            self.settings.capacity_blocks, specs[0].block_size, self.model_config.max_model_len,
            bytes_per_block=bytes_per_block,
        )  # fmt: skip
        return self.settings.capacity_blocks * bytes_per_block

    def _require_late_connector(self) -> None:
        transfer = self.vllm_config.kv_transfer_config
        if transfer is None:
            return
        connector = KVConnectorFactory.get_connector_class(transfer)
        if not issubclass(connector, BuiltLate):
            raise ConnectorError(
                f"{connector.__name__} registers the KV cache before it has grown, addresses without memory included; "
                "use PdkvConnector from pdkv_connectors.vllm.connector, or vLLM's own worker class."
            )
