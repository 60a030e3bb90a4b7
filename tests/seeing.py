"""A model that takes images: one id per printable character, and one that stands for an image."""

import json
from pathlib import Path

from activities.chat import Chat
from domain.config import TinyModel
from domain.images import Image
from tests.scripted import ALPHABET
from trainer.folders import materialise_tiny

MARK = "\N{FRAME WITH PICTURE}"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{{ '" + MARK + "' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def seeing(folder: Path) -> Chat:
    """The chat of such a model."""
    materialise_tiny(TinyModel(alphabet=ALPHABET + MARK), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = folder / "config.json"
    described = json.loads(path.read_text())
    tokenizer = Chat.open(folder).tokenizer
    path.write_text(json.dumps(described | {"image_token_id": tokenizer.token_to_id(MARK)}))
    return Chat.open(folder)


def png(text: str) -> Image:
    """Bytes that begin like a PNG."""
    return Image(b"\x89PNG\r\n\x1a\n" + text.encode())
