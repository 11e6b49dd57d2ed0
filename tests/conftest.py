"""What holds for every test."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A busy machine must not fail a test: behaviour is tested here, not speed.
settings.register_profile("pdkv", deadline=None)
settings.load_profile("pdkv")

NEEDS = ("cpu", "nixl", "vllm", "gpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that does not say what it needs: no command would select it, and nobody would notice."""
    unmarked = [item.nodeid for item in items if not any(item.get_closest_marker(name) for name in NEEDS)]
    if unmarked:
        raise pytest.UsageError(f"mark these tests with one of {', '.join(NEEDS)}: {', '.join(unmarked[:5])}")
