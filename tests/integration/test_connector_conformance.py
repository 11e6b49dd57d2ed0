"""The connector conformance suite over real NIXL agents: the project's transport as a connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from nixl_bench import NixlBench
from nixl_peer import NixlPeer

from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import HostDriver
from pdkv.testing import CONNECTOR_CHECKS, run_connector_check
from pdkv.testing.transport_connector import TransportConnector
from pdkv_connectors.nixl.transport import NixlTransport

pytestmark = pytest.mark.nixl

PAGE = AttentionSpec(num_kv_heads=3, block_size=16, head_size=20, dtype="float32")


@pytest.fixture(scope="module", params=["", "tcp"], ids=["default", "tcp"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NixlPeer]:
    """One peer for all rules, over UCX's own choice and over tcp, where the owner reads for its peers."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("UCX_TLS", request.param)
        with NixlPeer("peer", tmp_path_factory.mktemp("peer"), request.param) as started:
            yield started


def bench(peer: NixlPeer, *, reads: bool) -> NixlBench:
    cache = GrowableKVCache(KVCacheConfig.uniform(("a", "b"), PAGE, 32), HostDriver(64 << 10))
    cache.commit(12, defragment=True)
    transport = NixlTransport()

    def registered() -> Sequence[tuple[int, int]]:
        """NIXL's own list."""
        found = transport._registered
        entries = [] if found is None else [found[index] for index in range(found.descCount())]
        return [(int(entry[0]), int(entry[1])) for entry in entries]

    def close() -> None:
        transport.close()
        cache.close()

    connector = TransportConnector(transport, "owner")
    return NixlBench(cache, connector, lambda: transport._agent, registered, peer, reads=reads, undo=close)


@pytest.mark.parametrize("rule", CONNECTOR_CHECKS)
@pytest.mark.parametrize("reads", [True, False], ids=["peer reads", "peer writes"])
def test_nixl_keeps_to_the_rule(peer: NixlPeer, reads: bool, rule: str) -> None:
    run_connector_check(rule, lambda: bench(peer, reads=reads))
