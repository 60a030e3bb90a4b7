"""The optional renderers package behind the same face (`pip install renderers`)."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from activities.chat import Chat
from activities.turns import Conversation
from domain.errors import ConfigError
from domain.tools import MALFORMED

pytest.importorskip("renderers")

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with Qwen3's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tags = ("think", "tool_call", "tool_response")
    tokenizer.add_tokens([f"<{slash}{tag}>" for tag in tags for slash in ("", "/")])
    made = tmp_path_factory.mktemp("qwen")
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return made


def test_a_conversation_grows_exactly_and_keeps_earlier_thoughts(folder: Path) -> None:
    chat = Chat.open(folder, renderer="qwen3")
    conversation = Conversation(chat, [ADD])
    conversation.begin([{"role": "user", "content": "hi"}])
    turns = [
        (
            '<think>\nhm\n</think>\n\nok<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
            "</tool_call><|im_end|>",
            {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "5"},
            "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "<tool_call>\n{bad</tool_call>",
            {"role": "user", "content": "again"},
            "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n",
        ),
    ]
    said = []
    for reply, answer, tail in turns:
        before = conversation.ids
        sampled = chat.encode(reply)
        conversation.sampled.extend(sampled)
        said.append(conversation.close_turn())
        conversation.extend([answer])
        assert conversation.ids[: len(before) + len(sampled)] == [*before, *sampled]
        rest = conversation.ids[len(before) + len(sampled) :]
        assert chat.tokenizer.decode(rest, skip_special_tokens=False) == tail
    assert said[0]["content"] == "ok"
    assert said[0]["reasoning_content"] == "hm"
    assert said[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert said[1]["tool_calls"][0]["function"] == {"name": MALFORMED, "arguments": "{bad"}


def test_an_unknown_name_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope.*qwen3"):
        Chat.open(folder, renderer="nope")
