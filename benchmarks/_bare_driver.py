"""The calls of the CUDA driver that a growth step cannot do without: what the steps of pdkv are held to."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda


class BareDriver:
    """`segments` ranges of `nbytes` addresses each, into which chunks are created, mapped and made accessible.

    Args:
        driver: pdkv's driver on the device; chunks are made with the properties that it found to be granted.
    """

    def __init__(self, driver: Any, segments: int, nbytes: int) -> None:
        self._api = driver._api
        self._nbytes = nbytes
        self._properties, self._access = self._api._properties, self._api._access
        with self._api.on_device():
            self._starts = [self._api.address_reserve(nbytes, driver.granule) for _ in range(segments)]
        self._mapped: list[tuple[int, int]] = []
        self._handles: list[Any] = []

    def grow(self, offset: int, nbytes: int) -> None:
        """One more chunk of `nbytes` at `offset` of each segment. Not zeroed, nothing checked but the calls' codes."""
        with self._api.on_device():
            for start in self._starts:
                created, handle = cuda.cuMemCreate(nbytes, self._properties, 0)
                codes = (
                    created,
                    *cuda.cuMemMap(start + offset, nbytes, 0, handle, 0),
                    *cuda.cuMemSetAccess(start + offset, nbytes, self._access, 1),
                )
                if any(int(code) for code in codes):
                    raise RuntimeError(f"the driver refused a chunk of {nbytes} bytes: {codes}")
                self._mapped.append((start + offset, nbytes))
                self._handles.append(handle)

    def close(self) -> None:
        """Give everything back."""
        with self._api.on_device():
            for address, nbytes in self._mapped:
                cuda.cuMemUnmap(address, nbytes)
            for handle in self._handles:
                cuda.cuMemRelease(handle)
            for start in self._starts:
                self._api.address_free(start, self._nbytes)
