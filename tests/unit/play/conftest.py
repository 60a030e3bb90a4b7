"""The chat of a tiny tokenizer."""

import pytest

from activities.chat import Chat
from tests.scripted import printable


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return printable(tmp_path_factory.mktemp("model"))
