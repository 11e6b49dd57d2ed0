"""The transport contract in executable form: one check for each rule of :mod:`pdkv.transfer.transport`.

A transport of your own::

    pdkv.testing.check_transport(MyTransport)                              # both sides in this process
    pdkv.testing.check_transport("my.package:make_transport", processes=2)

or, rule by rule under pytest, with one pair of processes for all::

    @pytest.fixture(scope="module")
    def bench():
        with pdkv.testing.TransportBench("my.package:make_transport", processes=2) as bench:
            yield bench

    @pytest.mark.parametrize("rule", pdkv.testing.TRANSPORT_CHECKS)
    def test_contract(rule, bench):
        pdkv.testing.run_transport_check(rule, bench)
"""

from __future__ import annotations

from collections.abc import Mapping

from pdkv.testing.rules import BrokenRuleError, allowed
from pdkv.testing.transports import connecting, ending, fencing, integrity, moving
from pdkv.testing.transports._registry import TRANSPORT_CHECKS
from pdkv.testing.transports.bench import TransportBench
from pdkv.testing.transports.side import TransportFactory

__all__ = [
    "TRANSPORT_CHECKS",
    "check_transport",
    "connecting",
    "ending",
    "fencing",
    "integrity",
    "moving",
    "run_transport_check",
]


def check_transport(
    factory: TransportFactory | str,
    *,
    processes: int = 1,
    driver: str = "host",
    environment: Mapping[str, str] | None = None,
) -> None:
    """Hold a transport to the whole contract.

    Args:
        factory, processes, driver, environment: see :class:`TransportBench`.

    Raises:
        BrokenRuleError: the first rule that is broken, by name, and what was seen.
    """
    with TransportBench(factory, processes=processes, driver=driver, environment=environment) as bench:
        for rule in TRANSPORT_CHECKS:
            run_transport_check(rule, bench)


def run_transport_check(rule: str, bench: TransportBench) -> None:
    """Hold a transport to one rule, a key of :data:`TRANSPORT_CHECKS`."""
    try:
        with allowed("an allowed call"):
            try:
                bench.open()
                TRANSPORT_CHECKS[rule](bench)
            finally:
                bench.finish()
    except BrokenRuleError as error:
        raise BrokenRuleError(f"{rule}: {error}") from error
