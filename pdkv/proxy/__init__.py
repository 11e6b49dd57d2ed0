"""The proxy in front of a prefill and a decode engine: ``python -m pdkv.proxy``.

Folder::

    settings.py    what the proxy is told
    request.py     a client's request becomes the two that the engines get; what prefill/decode cannot do is refused
    upstream.py    the engines: deadlines, failures that name the engine
    errors.py      errors in OpenAI's format
    app.py         the HTTP interface
    __main__.py    the program
"""

from __future__ import annotations

from pdkv.proxy.settings import ProxySettings

__all__ = ["ProxySettings"]
