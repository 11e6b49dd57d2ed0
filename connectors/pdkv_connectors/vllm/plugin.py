"""What vLLM loads through the entry-point group ``vllm.general_plugins``, in every process of every engine.

So this must be cheap, and change nothing for an engine that was not started with one of pdkv's worker classes.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM once per process, before the engine is built."""
    from pdkv_connectors.vllm.patches import announce_sleep_backend, install

    install()
    announce_sleep_backend()
