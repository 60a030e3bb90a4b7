"""Nothing that rollbook reads can run code: no module unpickles, in any of the ways there are."""

import ast
from collections.abc import Iterator

import pytest

from rollbook.root import ROOT

PACKAGES = ("domain", "storage", "activities", "workflows", "trainer", "engine", "rollbook")
MODULES = sorted(
    file for package in (*PACKAGES, "examples", "bench") for file in (ROOT / package).rglob("*.py")
)
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def dangers(source: str) -> Iterator[str]:
    """What in a module could load a pickle."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.partition(".")[0] in UNPICKLERS)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPICKLERS:
                yield module
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch"))):
                if not _says(node, "weights_only", True):
                    yield "torch.load without weights_only=True"
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="np" | "numpy"))):
                if not _says(node, "allow_pickle", False):
                    yield "numpy.load without allow_pickle=False"
            case ast.Call(func=ast.Attribute(attr="from_pretrained", value=ast.Name(id=loader))):
                reads_weights = loader.startswith("AutoModel")
                of_gguf = any(k.arg == "gguf_file" for k in node.keywords)
                if reads_weights and not of_gguf and not _says(node, "use_safetensors", True):
                    yield f"{loader}.from_pretrained without use_safetensors=True"
            case _:
                pass


def _says(call: ast.Call, name: str, value: bool) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value
        for k in call.keywords
    )


def test_no_module_can_load_a_pickle() -> None:
    found = {file: [*dangers(file.read_text(encoding="utf-8"))] for file in MODULES}
    assert len(found) > 200
    assert {file: how for file, how in found.items() if how} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModelForCausalLM.from_pretrained(folder)",
    ],
)
def test_the_search_finds_each_way(source: str) -> None:
    assert [*dangers(source)]
