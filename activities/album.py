"""Images of a process's rollouts: stored once under their digest, read back for engines.

An object is put before its row says so, and both are idempotent: whoever finds the row uploads
nothing, and of two that do not find it the store lets one create the object.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domain.environments import AttemptRecorder
from domain.images import Image, by_handle
from storage import images
from storage.database import Ledger
from storage.objects import ObjectStore

MOST_BYTES = 256 * 2**20
"""Of encoded images that a process keeps for its next requests."""


class Album:
    """One per process and event loop."""

    def __init__(self, ledger: Ledger, store: ObjectStore) -> None:
        """Nothing is read yet."""
        self._ledger = ledger
        self._store = store
        self._urls: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0

    async def keep(self, image: Image) -> None:
        """Upload an image, unless some process has.

        Raises:
            ObjectError: the store refused.
        """
        sha256 = image.sha256
        if sha256 in self._urls:
            return
        if await self._ledger.run(images.find, sha256) is None:
            key = images.key(sha256)
            await asyncio.to_thread(self._store.put_new, key, image.data, sha256=sha256)
            await self._ledger.run(images.note, image)
        self._remember(sha256, image)

    async def parts(self, digests: Sequence[str]) -> list[dict[str, str]]:
        """The `content_parts` of a request: each image whole, and its digest as its name.

        Raises:
            LedgerError: nobody stored such an image.
            ObjectError: the store does not give it.
        """
        return [
            {"type": "image_url", "url": await self._url(sha256), "uuid": sha256}
            for sha256 in digests
        ]

    async def _url(self, sha256: str) -> str:
        known = self._urls.get(sha256)
        if known is None:
            key = await self._ledger.run(images.require, sha256)
            data = await asyncio.to_thread(self._store.get, key, sha256=sha256)
            known = self._remember(sha256, Image(data))
        self._urls.move_to_end(sha256)
        return known

    def _remember(self, sha256: str, image: Image) -> str:
        """Keep the image as a data URL; the longest unused ones go."""
        url = image.url
        if sha256 not in self._urls:
            self._urls[sha256] = url
            self._bytes += len(url)
        while self._bytes > MOST_BYTES and len(self._urls) > 1:
            _, gone = self._urls.popitem(last=False)
            self._bytes -= len(gone)
        return url


async def kept(recorder: AttemptRecorder, messages: Sequence[Any], root: Path) -> list[Any]:
    """The messages with a handle for each image, whose bytes are in the object store by then.

    Raises:
        SourceBroken: a path names no image.
        ObjectError: the store refused.
    """
    changed, found = by_handle(messages, root)
    for image in found:
        await recorder.keep(image)
    return changed
