"""A tiny model that sees (Idefics3, random weights), with all that a server reads beside it.

How many tokens an image becomes depends on its size: it is cut into tiles of 28 pixels, each a mark
and 4 tokens, between marks of its own. Idefics3 because vLLM runs it without torchvision.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Picture
from tokenizers import Tokenizer
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
)

from domain.config import TinyModel
from domain.images import Image
from domain.rollouts import Numbers
from tests.integration.engine.lab import Weights
from tests.scripted import ALPHABET
from trainer.folders import materialise_tiny

MARK = "<image>"
SIDE = 28
CONTEXT = 1024
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
_SPECIAL = [MARK, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{{ '" + MARK + "' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_PIXELS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"longest_edge": 3 * SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "do_image_splitting": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pad": True,
    "resample": 1,
}


def materialise(folder: Path) -> Any:
    """Write the model's folder, weights apart; its configuration."""
    materialise_tiny(TinyModel(alphabet=ALPHABET, max_positions=CONTEXT), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id("<eos>")
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary, mark = tokenizer.get_vocab_size(), tokenizer.token_to_id(MARK)
    common: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": eos}
    assert mark is not None
    config: Any = Idefics3Config(
        image_token_id=mark,
        pad_token_id=eos,
        scale_factor=1,
        tie_word_embeddings=False,
        architectures=["Idefics3ForConditionalGeneration"],
        vision_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": SIDE, "patch_size": SIDE // 2,
        },
        text_config={
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 32, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
            "pad_token_id": eos, **common,
        },
    )  # fmt: skip
    config.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    pixels = _PIXELS | {"image_processor_type": "Idefics3ImageProcessor"}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(pixels | {"processor_class": "Idefics3Processor"})
    )
    return config


@cache
def picture(colour: tuple[int, int, int], width: int, height: int) -> Image:
    """A picture of a colour, growing darker from left to right."""
    drawn = Picture.new("RGB", (width, height))
    for x in range(width):
        shade = tuple(int(part * (1 - 0.8 * x / width)) for part in colour)
        drawn.paste(shade, (x, 0, x + 1, height))
    kept = BytesIO()
    drawn.save(kept, "PNG")
    return Image(kept.getvalue())


def tokens(image: Image) -> int:
    """How many the model sees of it: 6 a tile, a line's end after each row, and the whole again."""
    rows, columns = _pixels([image])["rows"][0][0], _pixels([image])["cols"][0][0]
    return 6 * rows * columns + rows + 1 + 7 if rows else 7


def weights(config: Any, seed: int) -> Weights:
    """Random ones, wide enough that another picture is another distribution.

    One coordinate is the same whatever the text: it keeps marks of images from being said, and ends
    a turn at one token in five or so.
    """
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
        model.model.text_model.embed_tokens.weight[:, 0] = 2.0
        for layer in model.model.text_model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        eos = config.text_config.eos_token_id
        model.lm_head.weight[eos, 0], model.lm_head.weight[eos + 1 :, 0] = 2.0, -20.0
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Weights(config, model, named)


@torch.no_grad()
def logprobs(
    weights: Weights, prompt: Numbers, sampled: Numbers, shown: Sequence[Image]
) -> list[float]:
    """What a plain forward over the prompt as the model saw it says of the sampled ids."""
    ids = [*map(int, prompt), *map(int, sampled)]
    pixels = _pixels(shown)
    seen = {name: pixels[name] for name in ("pixel_values", "pixel_attention_mask")}
    table = weights.model(input_ids=torch.tensor([ids]), **seen).logits[0].log_softmax(-1)
    return [float(table[len(prompt) - 1 + at, token]) for at, token in enumerate(map(int, sampled))]


def _pixels(shown: Sequence[Image]) -> Mapping[str, Any]:
    processor: Any = Idefics3ImageProcessorPil(**_PIXELS)
    opened = [[Picture.open(BytesIO(image.data)) for image in shown]]
    processed: Mapping[str, Any] = processor(opened, return_tensors="pt", return_row_col_info=True)
    return processed
