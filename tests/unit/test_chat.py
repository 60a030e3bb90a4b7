"""Messages to ids and back, exactly; and without torch."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from activities import toolcalls
from activities.chat import Chat
from activities.turns import Conversation
from domain.config import TinyModel
from domain.errors import ConfigError, SourceBroken
from domain.text import clean, clean_json, not_json
from domain.tools import MALFORMED, Message, Tool, tool
from trainer.folders import materialise_tiny

ROOT = Path(__file__).parents[2]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's two habits: tools in the system message, and thinking only in the last turns.
QWEN = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# Mistral's habit: the system message is moved before the last user message.
MOVING = (
    "{% set ns = namespace(system='', last=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{{ ns.system if loop.index0 == ns.last else '' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
OPEN_ENDED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_level(folder: Path, template: str | None, *, end: str = "<|im_end|>") -> Chat:
    """A byte-level tokenizer without merges: half an emoji is two of its four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Chat.open(folder)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return byte_level(tmp_path_factory.mktemp("chatml"), CHATML)


def says(chat: Chat, ids: list[int]) -> str:
    return str(chat.tokenizer.decode(ids, skip_special_tokens=False))


def test_the_end_of_a_turn_is_a_stop_even_when_the_model_has_another(tmp_path: Path) -> None:
    chat = byte_level(tmp_path, CHATML, end="<|endoftext|>")
    names = {chat.tokenizer.id_to_token(i) for i in chat.stop_ids}
    assert names == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("template", [CHATML, QWEN])
@pytest.mark.parametrize("ended", [True, False])
def test_the_next_prompt_starts_with_exactly_what_was_sent_and_sampled(
    tmp_path: Path, template: str, ended: bool
) -> None:
    chat = byte_level(tmp_path, template)
    (stop,) = chat.stop_ids
    conversation = Conversation(chat)
    conversation.begin([{"role": "user", "content": "hi"}])
    before = conversation.ids
    sampled = [*chat.encode("h"), *chat.encode("ello"), *([stop] if ended else [])]
    conversation.sampled.extend(sampled)
    conversation.close_turn()
    conversation.extend([{"role": "user", "content": "and?"}])
    assert conversation.ids[: len(before) + len(sampled)] == [*before, *sampled]
    rest = says(chat, conversation.ids[len(before) + len(sampled) :])
    closing = "" if ended else "<|im_end|>"
    assert rest == f"{closing}\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@given(
    sampled=st.lists(st.integers(0, 255), max_size=40),
    stopped=st.booleans(),
    new=st.text(max_size=30),
)
def test_whatever_was_sampled_stays_at_the_front(
    chatml: Chat, sampled: list[int], stopped: bool, new: str
) -> None:
    (stop,) = chatml.stop_ids
    prompt = chatml.prompt([{"role": "user", "content": "q"}])
    ids = [*sampled, *([stop] if stopped else [])]
    chatml.text(ids).encode()  # always storable
    following = chatml.continuation(prompt, ids, [{"role": "user", "content": new}])
    assert following[: len(prompt) + len(ids)] == [*prompt, *ids]
    assert following[len(prompt) + len(ids) :].count(stop) >= 1 + (not stopped)


def test_half_an_emoji_keeps_its_ids_and_reads_as_a_replacement(chatml: Chat) -> None:
    half = chatml.encode("😀")[:2]
    prompt = chatml.prompt([{"role": "user", "content": "q"}])
    assert chatml.text(half) == "�"
    following = chatml.continuation(prompt, half, [{"role": "user", "content": "x"}])
    assert following[len(prompt) : len(prompt) + 2] == half


def test_nul_and_lone_surrogates_never_leave_this_module(chatml: Chat) -> None:
    assert chatml.text(chatml.encode("a\x00b")) == "a�b"
    assert chatml.encode("\ud83d\ude00") == chatml.encode("😀")
    assert says(chatml, chatml.encode("a\ud83d b")) == "a� b"
    said = '<tool_call>{"name": "f", "arguments": {"x": "\\ud83d\\u0000"}}</tool_call>'
    message = toolcalls.parse(said)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": "��"}


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (MOVING, "earlier messages differently"),
        (OPEN_ENDED, "does not close the assistant's turn with a special token"),
        ("{{ messages[0].content }}", "does not write an assistant's turn once"),
        (
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endif %}"
            "{% endfor %}",
            "does not write 'tool' messages",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools!') }}"
            "{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
            "no tools!",
        ),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused_for_several_turns(
    tmp_path: Path, template: str, why: str
) -> None:
    chat = byte_level(tmp_path, template)
    with pytest.raises(ConfigError, match=why):
        chat.require_turns(tools=True)
    conversation = Conversation(chat, [add.schema])
    conversation.begin([{"role": "user", "content": "one turn is fine"}])
    conversation.sampled.append(3)
    conversation.close_turn()
    with pytest.raises(SourceBroken, match="cannot continue"):
        conversation.extend([{"role": "tool", "content": "x"}])


def test_an_environment_without_tools_does_not_need_tool_messages(tmp_path: Path) -> None:
    chat = byte_level(
        tmp_path,
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}",
    )
    chat.require_turns(tools=False)


@tool
async def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Both are whole.

    Args:
        a: The first
            of them.
        b (int): The second.

    Returns:
        The sum.
    """
    return str(a + b)


def test_a_tool_s_schema_comes_from_hints_and_docstring() -> None:
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nBoth are whole.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first of them."},
                    "b": {"type": "integer", "description": "The second.", "default": 1},
                },
                "required": ["a"],
            },
        },
    }


async def test_a_tool_may_be_a_method() -> None:
    class Box:
        def __init__(self, value: int) -> None:
            self.value = value

        @tool
        async def look(self) -> str:
            """Look into the box."""
            return str(self.value)

    assert await Box(3).look() == "3"
    assert isinstance(Box.look, Tool)
    assert Box.look.schema["function"]["parameters"]["properties"] == {}


def test_what_is_no_tool_is_refused() -> None:
    async def silent(a: int) -> str:
        return ""

    async def untyped(a) -> str:  # type: ignore[no-untyped-def]
        """Do."""
        return ""

    async def many(*a: int) -> str:
        """Do."""
        return ""

    def plain() -> str:
        """Do."""
        return ""

    for function, why in (
        (silent, "docstring"),
        (untyped, "type hint"),
        (many, "name of its own"),
        (plain, "async"),
    ):
        with pytest.raises(ConfigError, match=why):
            tool(function)  # type: ignore[arg-type]


def test_templates_that_know_tools_get_them_and_others_are_told(tmp_path: Path) -> None:
    user = {"role": "user", "content": "q"}
    knows = byte_level(tmp_path / "a", QWEN)
    assert says(knows, knows.prompt([user], [add.schema])).count('"name": "add"') == 1
    ignores = byte_level(tmp_path / "b", CHATML)
    told = says(ignores, ignores.prompt([user], [add.schema]))
    assert told.startswith("<|im_start|>system\nYou may call functions.")
    assert told.count('"name": "add"') == 1
    system = {"role": "system", "content": "Be brief."}
    both = says(ignores, ignores.prompt([system, user], [add.schema]))
    assert both.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")


def test_a_model_without_template_reads_contents_as_they_are(tmp_path: Path) -> None:
    materialise_tiny(TinyModel(), tmp_path)
    chat = Chat.open(tmp_path)
    assert chat.prompt([{"role": "user", "content": "12="}]) == [1, 2, 10]
    assert chat.continuation([1, 2, 10], [2, 1, 11], [{"role": "user", "content": "3="}]) == [
        1, 2, 10, 2, 1, 11, 3, 10,
    ]  # fmt: skip
    assert chat.stop_ids == {11}
    assert chat.text([2, 1, 11]) == "21"
    assert chat.text([2, 11, 1]) == "2<eos>1"
    with pytest.raises(SourceBroken, match="cannot encode 'a'"):
        chat.encode("a")
    with pytest.raises(ConfigError, match="no chat template"):
        chat.prompt([{"role": "user", "content": "1"}], [add.schema])
    with pytest.raises(ConfigError, match="has no chat template"):
        Chat.open(tmp_path, renderer="template")


def test_a_broken_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Chat.open(tmp_path)
    with pytest.raises(ConfigError, match="template is not valid"):
        byte_level(tmp_path / "a", "{% if %}")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        Chat.open(tmp_path / "a")


def test_an_unknown_renderer_is_refused(tmp_path: Path) -> None:
    byte_level(tmp_path, CHATML)
    with pytest.raises(ConfigError, match=r"model\.renderer = 'no-such'"):
        Chat.open(tmp_path, renderer="no-such")


def test_tool_calls_are_read_from_hermes_tags() -> None:
    text = (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "add", "parameters": {"a": "ü"}}</tool_call>'
    )
    message = toolcalls.parse(text)
    assert message["content"] == "Let me see."
    assert [c["id"] for c in message["tool_calls"]] == ["call_0", "call_1"]
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"a": 1}', '{"a": "ü"}']
    assert toolcalls.parse("  plain\n") == {"role": "assistant", "content": "  plain\n"}


@pytest.mark.parametrize(
    "inside",
    ["", "{", "[]", "3", '{"name": 1}', '{"name": "f", "arguments": "x"}', '{"arguments": {}}',
     "[" * 5000],
)  # fmt: skip
@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_a_malformed_call_is_kept_as_such(inside: str, end: str) -> None:
    message = toolcalls.parse(f"<tool_call>{inside}{end}")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": MALFORMED, "arguments": inside}


@given(st.text())
def test_any_text_can_be_parsed_and_stored(text: str) -> None:
    message = toolcalls.parse(clean(text))
    assert not_json(message) is None
    json.dumps(message).encode()


@given(st.text(alphabet=st.characters(categories=None), max_size=20))
def test_cleaned_text_is_storable_and_cleaning_is_stable(text: str) -> None:
    cleaned = clean(text)
    assert "\x00" not in cleaned
    cleaned.encode()
    assert clean(cleaned) == cleaned
    assert clean_json({text: [text]}) == {cleaned: [cleaned]}


def test_elision_keeps_both_ends(chatml: Chat) -> None:
    text, left_out = chatml.elide("a" * 50 + "b" * 50, 10)
    assert (text, left_out) == ("aaaaa\n[.. 90 tokens left out ..]\nbbbbb", 90)
    assert chatml.elide("short", 10) == ("short", 0)
    text, left_out = chatml.elide("a" * 500_000 + "b" * 500_000, 10)
    assert (text, left_out) == ("aaaaa\n[.. 999990 tokens left out ..]\nbbbbb", 999_990)
    assert chatml.elide("xyz", 1) == ("x\n[.. 2 tokens left out ..]\n", 2)


@pytest.mark.parametrize(
    "module", ["activities.play", "activities.chat", "domain.environments", "storage.datasets"]
)
def test_torch_is_not_imported(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "print([m for m in ('torch', 'transformers', 'temporalio') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def conversation_of(chat: Chat, turns: list[tuple[str, Message]]) -> list[int]:
    """Ids of a conversation grown turn by turn, each reply sampled as its own encoding."""
    (stop,) = chat.stop_ids
    conversation = Conversation(chat)
    conversation.begin([turns[0][1]])
    for (reply, _), (_, following) in pairwise(turns):
        conversation.sampled.extend([*chat.encode(reply), stop])
        conversation.close_turn()
        conversation.extend([following])
    return conversation.ids


@pytest.mark.parametrize("template", [CHATML])
def test_growing_and_rendering_whole_agree(tmp_path: Path, template: str) -> None:
    chat = byte_level(tmp_path, template)
    users: list[Message] = [{"role": "user", "content": f"question {i}"} for i in range(4)]
    grown = conversation_of(chat, [(f"reply {i}", user) for i, user in enumerate(users)])
    whole: list[Message] = []
    for i, user in enumerate(users):
        whole += [user, {"role": "assistant", "content": f"reply {i}"}]
    assert grown == chat.prompt(whole[:-1])
