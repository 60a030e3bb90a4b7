"""The model folder: architecture, tokenizer and chat template of a run, without weights.

Engines, rollout workers and the trainer build the same network and read the same tokenizer from it.
It is a plain Hugging Face folder, so anything that reads those reads it too. A built-in tiny model
is materialised as such a folder first; from there on nothing knows that it was tiny.
"""

import json
from hashlib import sha256
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from domain.config import RunConfig, TinyModel
from domain.errors import ConfigError

EOS = "<eos>"
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ckpt")
_LARGEST = 64 * 2**20


def materialise_tiny(tiny: TinyModel, folder: Path) -> None:
    """Write a GPT-2 of the given size with one token per character, EOS last, also used to pad.

    Raises:
        ConfigError: the alphabet repeats a character, or heads do not divide dim.
    """
    if len(set(tiny.alphabet)) != len(tiny.alphabet) or not tiny.alphabet:
        raise ConfigError(
            f"model.tiny.alphabet = {tiny.alphabet!r} must list each character once, at least one"
        )
    if tiny.dim % tiny.heads:
        raise ConfigError(
            f"model.tiny.dim = {tiny.dim} is no multiple of heads = {tiny.heads}; change either"
        )
    vocabulary = {character: i for i, character in enumerate(tiny.alphabet)}
    eos = vocabulary[EOS] = len(tiny.alphabet)
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    # (?m) lets the dot be a line's end too: two in a row are two characters.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS])
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": len(vocabulary),
        "n_positions": tiny.max_positions,
        "n_embd": tiny.dim,
        "n_layer": tiny.layers,
        "n_head": tiny.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
        # Untied and wider than GPT-2's 0.02: networks this small otherwise start on a plateau.
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": EOS,
            "model_max_length": tiny.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    )


def source_folder(config: RunConfig, scratch: Path) -> Path:
    """The folder that the run's model comes from, with or without weights.

    Raises:
        ConfigError: model.path is not a folder with config.json and tokenizer.json.
    """
    if config.model.tiny is not None:
        materialise_tiny(config.model.tiny, scratch)
        return scratch
    assert config.model.path is not None
    return existing(Path(config.root) / config.model.path, key="model.path")


def existing(path: Path, *, key: str) -> Path:
    """A model folder that is there, as an absolute path; `key` is what names it, for messages.

    Raises:
        ConfigError: it is not a folder with config.json and tokenizer.json.
    """
    folder = path.resolve()
    missing = [n for n in ("config.json", "tokenizer.json") if not (folder / n).is_file()]
    if missing:
        raise ConfigError(
            f"{key} = {str(path)!r} ({folder}) has no {' and no '.join(missing)}; give the folder "
            "of a Hugging Face causal language model with a fast tokenizer"
        )
    return folder


def description_files(folder: Path, dtype: str) -> dict[str, bytes]:
    """The files of a model folder that describe it: everything small that is not weights.

    `config.json` states the run's dtype, so that whoever builds the network builds the same one.
    """
    files: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if (
            not path.is_file()
            or path.name.startswith(".")
            or path.name.endswith((*_WEIGHTS, ".index.json"))
            or path.stat().st_size > _LARGEST
        ):
            continue
        files[path.name] = path.read_bytes()
    described = json.loads(files["config.json"])
    described.pop("torch_dtype", None)
    described.pop("quantization_config", None)
    files["config.json"] = _json(described | {"dtype": dtype})
    return files


def files_digest(files: dict[str, bytes]) -> str:
    """sha256 over names and contents, hex: the name of the folder in the object store."""
    digest = sha256()
    for name, body in sorted(files.items()):
        digest.update(f"{name}\0{len(body)}\0".encode())
        digest.update(body)
    return digest.hexdigest()


def longest_context(folder: Path) -> int | None:
    """Positions the architecture was made for, from config.json; None when it names no bound."""
    described = json.loads((folder / "config.json").read_text())
    described = described.get("text_config") or described
    bound = described.get("max_position_embeddings") or described.get("n_positions")
    return None if bound is None else int(bound)


def check_context(folder: Path, config: RunConfig) -> None:
    """Refuse contexts beyond the positions of the model.

    Raises:
        ConfigError: names both numbers.
    """
    bound = longest_context(folder)
    if bound is not None and config.max_context_tokens > bound:
        raise ConfigError(
            f"budget.max_context_tokens = {config.max_context_tokens} (default: trainer.width) "
            f"exceeds the {bound} positions of the model; set it to {bound} or less"
        )


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _write(path: Path, value: object) -> None:
    path.write_bytes(_json(value))
