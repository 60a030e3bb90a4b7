"""Images in messages: bytes where the user gives them, a digest everywhere else.

    Image(bytes)  or  {"type": "image", "path": …}      what an environment or a data set says
    {"type": "image", "sha256": …}                      what the conversation, its snapshots and the
                                                        ledger hold; the bytes lie in the object store

A message with images has a list of parts as its content. In a prompt each image is one token of the
model's (`image_token_id`), in whose place the engine puts as many as it needs. Those are what the
model sees, so they are what is recorded and counted.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from domain.errors import SourceBroken
from domain.tools import Message

_KINDS = ((b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))
_DIGEST_DIGITS = 64


@dataclass(frozen=True)
class Image:
    """An image for a message: a PNG, JPEG, GIF or WebP file's bytes."""

    data: bytes

    def __post_init__(self) -> None:
        """Refuse what no engine could read."""
        data: object = self.data
        if not isinstance(data, bytes) or self._kind() is None:
            raise ValueError(
                f"an Image holds the bytes of a PNG, JPEG, GIF or WebP file, not {data!r:.40}"
            )

    @property
    def media_type(self) -> str:
        """What the bytes say they are."""
        return self._kind() or ""

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes."""
        return sha256(self.data).hexdigest()

    @property
    def handle(self) -> dict[str, str]:
        """The part of a message that stands for it."""
        return {"type": "image", "sha256": self.sha256}

    @classmethod
    def from_url(cls, url: str) -> "Image":
        """The image in a data URL, as the OpenAI API has them: `data:image/png;base64,…`.

        Raises:
            ValueError: it is another kind of URL, or holds no image.
        """
        head, comma, body = url.partition(",")
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise ValueError(
                f"an image must come as a data URL (data:image/png;base64,...), not {url!r:.60}"
            )
        try:
            return cls(base64.b64decode(body, validate=True))
        except binascii.Error as error:
            raise ValueError(f"the image's base64 cannot be read: {error}") from error

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def _kind(self) -> str | None:
        if self.data[:4] == b"RIFF" and self.data[8:12] == b"WEBP":
            return "image/webp"
        return next((kind for start, kind in _KINDS if self.data.startswith(start)), None)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Where an image stands in a prompt: `length` tokens from `offset` on."""

    sha256: str
    offset: int
    length: int


def placed(digests: Sequence[str], places: Sequence[tuple[int, int]]) -> tuple[PlacedImage, ...]:
    """Images with the `(offset, length)` that an engine gave them."""
    return tuple(
        PlacedImage(sha256, offset, length)
        for sha256, (offset, length) in zip(digests, places, strict=True)
    )


def count(messages: Iterable[Message]) -> int:
    """How many images the messages hold, in whatever form."""
    return sum(
        isinstance(part, Image)
        or (isinstance(part, Mapping) and part.get("type") in ("image", "image_url"))
        for part in _parts(messages)
    )


def digests(messages: Iterable[Message]) -> list[str]:
    """SHA-256 of the images that messages refer to by handle, in order."""
    return [str(part["sha256"]) for part in _parts(messages) if is_handle(part)]


def is_handle(part: object) -> bool:
    """Whether a part of a message stands for an image in the object store."""
    return (
        isinstance(part, Mapping)
        and part.get("type") == "image"
        and isinstance(part.get("sha256"), str)
        and len(part["sha256"]) == _DIGEST_DIGITS
    )


def by_handle(messages: Sequence[Any], root: Path) -> tuple[list[Any], list[Image]]:
    """The messages with a handle for each image, and the images that must be in the store for it.

    Args:
        messages: what user code gave; anything that is no image stays as it is.
        root: folder of the configuration, against which paths are read.

    Raises:
        SourceBroken: a path names no image.
    """
    found: list[Image] = []

    def replaced(part: Any) -> Any:
        if isinstance(part, Mapping) and part.get("type") == "image" and "path" in part:
            part = _read(root / str(part["path"]))
        if not isinstance(part, Image):
            return part
        found.append(part)
        return part.handle

    changed = [
        {**message, "content": [replaced(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return changed, found


def mismatch(ids: Sequence[int], shown: Sequence[str], image_id: int | None) -> str | None:
    """Why an engine would take one image for another; None: each has its token, and no token lacks one.

    Args:
        ids: of a conversation, one for each image.
        shown: its images, in order.
        image_id: the token that stands for an image; None: the model has none.
    """
    tokens = len(shown) if image_id is None else ids.count(image_id)
    if tokens == len(shown):
        return None
    return (
        f"a conversation with {len(shown)} images has {tokens} of the tokens that stand for one (id "
        f"{image_id}): a message or the model wrote the token's text, or the chat template does not "
        "write it once for each image"
    )


def compact(ids: Sequence[int], places: Sequence[PlacedImage], image_id: int) -> list[int]:
    """A prompt as it was asked for: one token for each image."""
    asked: list[int] = []
    start = 0
    for place in places:
        asked += [*ids[start : place.offset], image_id]
        start = place.offset + place.length
    return [*asked, *ids[start:]]


def _parts(messages: Iterable[Message]) -> Iterable[Any]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from message["content"]


def _read(path: Path) -> Image:
    try:
        return Image(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceBroken(f"a message names the image {path}: {error}") from error
