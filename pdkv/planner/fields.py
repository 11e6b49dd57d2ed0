"""Read fields of a model's config.json under their many names, and say all that are missing at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkv.errors import ConfigError

#: Sub-configurations that hold the language model of a multimodal one, in the order in which they are looked for.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")


# No count, size or length in a configuration comes near this.
_LARGEST = 2**40


class Fields:
    """The fields of one configuration.

    :meth:`need` notes what is missing instead of failing on the first, and :meth:`check` raises for all of it. A value
    that stands in for a missing one is 1, which only keeps arithmetic going until then.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._config = text_config(config)
        self._missing: list[str] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is there and not null, else `default`."""
        for name in names:
            if self._config.get(name) is not None:
                return self._config[name]
        return default

    def need(self, *names: str) -> int:
        """The first of `names` as a positive whole number; noted as missing if none is one."""
        value = self.get(*names)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
            return value
        self._missing.append(" or ".join(names))
        return 1

    def need_list(self, name: str, length: int) -> list[Any]:
        """A list of one entry per layer; noted as missing if it is not there or of another length."""
        value = self.get(name)
        if isinstance(value, list | str) and len(value) == length:
            return list(value)
        self._missing.append(f"{name} (one entry for each of {length} layers)")
        return [None] * length

    def check(self) -> None:
        """Raise ConfigError if anything that was needed is missing."""
        if self._missing:
            kind = self.get("model_type", default="no model_type")
            raise ConfigError(
                f"The configuration of {self.name} ({kind}) cannot be planned for: it lacks "
                f"{', '.join(dict.fromkeys(self._missing))}. Add the fields to a copy of its config.json."
            )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    for key in _TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return text_config({"torch_dtype": config.get("torch_dtype"), "dtype": config.get("dtype"), **inner})
    return config


__all__ = ["Fields", "text_config"]
