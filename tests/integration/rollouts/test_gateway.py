"""The recording gateway as programs see it: the openai client, a real ledger, a scripted engine.

Here what is recorded of a conversation; refusals and calls that are broken off have modules of their own.
"""

import json
from pathlib import Path
from typing import Any

import httpx

from activities.chat import Chat
from domain.text import REPLACEMENT
from storage import segments
from tests.gateways import ADD, HELLO, Make, Script, call, flat, gateway
from tests.scripted import printable
from tests.stub_engine import StubEngine


async def test_a_conversation_keeps_every_sampled_id(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    chat = printable_chat
    engine.say = Script(chat, ["hi  there\n", "bye"])
    b = sampled_run()
    group = b.group()
    async with gateway(b, chat) as gate, gate.client(group, 0) as program:
        said: list[Any] = [{"role": "system", "content": "be brief"}, *HELLO]
        first = await program.chat.completions.create(model="any", messages=said)
        assert first.choices[0].message.content == "hi  there\n"
        assert first.choices[0].finish_reason == "stop"
        assert first.usage is not None
        # Clients trim and reshape what they send back; that is no other history.
        parts = [{"type": "text", "text": "go on"}]
        said += [
            {"role": "assistant", "content": "hi  there", "refusal": None},
            {"role": "user", "content": parts},
        ]
        second = await program.chat.completions.create(model="any", messages=said)
        assert second.choices[0].message.content == "bye"
    one, two = gate.read(group)
    before = [*flat(one.prompt_ids), *flat(one.sampled_ids)]
    assert first.usage.prompt_tokens == len(one.prompt_ids)
    assert first.usage.completion_tokens == len(one.sampled_ids)
    assert flat(two.prompt_ids) == [*before, *chat.encode("[user]go on[assistant]")]
    places = b.ledger.call(segments.places, b.run, group, 0, 0)
    assert [(p.turn, p.chain, p.context_start) for p in places] == [(0, 0, 0), (1, 0, len(before))]
    assert [float(logprob) for logprob in one.logprobs] == [-0.5] * len(one.sampled_ids)


async def test_a_rewritten_history_starts_a_chain(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, ["one", "two", "three"])
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        histories: list[Any] = [
            HELLO,
            [*HELLO, {"role": "assistant", "content": "won"}, {"role": "user", "content": "x"}],
            [{"role": "user", "content": "summary"}],
        ]
        for history in histories:
            await program.chat.completions.create(model="m", messages=history)
    places = b.ledger.call(segments.places, b.run, group, 0, 0)
    assert [(p.chain, p.context_start) for p in places] == [(0, 0), (1, 0), (2, 0)]


async def test_streamed_or_not_a_tool_call_records_the_same_ids(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    b = sampled_run()
    group = b.group()
    messages = []
    async with gateway(b, printable_chat) as gate:
        for sample in (0, 1):
            engine.say = Script(printable_chat, ["let me see" + call("add", a=1)])
            async with gate.client(group, sample) as program:
                if sample:
                    whole = await program.chat.completions.create(
                        model="m", messages=HELLO, tools=[ADD]
                    )
                    messages.append(whole.choices[0].message.model_dump())
                    assert whole.choices[0].finish_reason == "tool_calls"
                else:
                    async with program.chat.completions.stream(
                        model="m",
                        messages=HELLO,
                        tools=[ADD],
                        stream_options={"include_usage": True},
                    ) as events:
                        done = await events.get_final_completion()
                    assert done.usage is not None
                    assert done.usage.completion_tokens == len(gate.read(group, 0)[0].sampled_ids)
                    messages.append(done.choices[0].message.model_dump())
    for message in messages:
        (made,) = message["tool_calls"]
        assert (made["function"]["name"], made["function"]["arguments"]) == ("add", '{"a": 1}')
        assert made["id"] == "call_0_0"
        assert message["content"] == "let me see"
    (one,), (two,) = gate.read(group, 0), gate.read(group, 1)
    assert flat(one.sampled_ids) == flat(two.sampled_ids)
    assert flat(one.prompt_ids) == flat(two.prompt_ids)


async def test_tool_answers_extend_the_chain_and_are_never_sampled(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, [call("add", a=1), call("add", a=2), "3"])
    b = sampled_run()
    group = b.group()
    said: list[Any] = list(HELLO)
    ids = []
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        for _ in range(2):
            answer = await program.chat.completions.create(model="m", messages=said, tools=[ADD])
            message = answer.choices[0].message
            assert message.tool_calls
            ids.append(message.tool_calls[0].id)
            said += [message, {"role": "tool", "tool_call_id": ids[-1], "content": "2" * 2000}]
        answer = await program.chat.completions.create(model="m", messages=said, tools=[ADD])
    assert answer.choices[0].message.content == "3"
    assert len(set(ids)) == 2
    read = gate.read(group)
    assert len({p.chain for p in b.ledger.call(segments.places, b.run, group, 0, 0)}) == 1
    assert sum(len(s.sampled_ids) for s in read) == b.attempt(group, 0)["policy_tokens"] < 200


async def test_half_characters_are_text_to_the_program_and_ids_to_the_ledger(
    sampled_run: Make, engine: StubEngine, tmp_path: Path
) -> None:
    chat = printable(tmp_path, more=REPLACEMENT)
    (eos,) = chat.stop_ids
    # The tokenizer has no such id: it decodes to nothing, as a broken byte would to U+FFFD.
    odd = [*chat.encode("he"), chat.tokenizer.get_vocab_size() + 5, *chat.encode("llo"), eos]
    engine.say = lambda body: odd
    b = sampled_run()
    group = b.group()
    async with gateway(b, chat) as gate, gate.client(group, 0) as program:
        odd_text = [{"role": "user", "content": "nul \x00 and surrogate \ud83d"}]
        url, bearer = f"{program.base_url}chat/completions", f"Bearer {program.api_key}"

        async def ask(messages: Any) -> Any:
            async with httpx.AsyncClient() as http:  # the openai client sends no lone surrogate
                body = json.dumps({"model": "m", "messages": messages})
                headers = {"Authorization": bearer}
                answer = await http.post(url, content=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["message"]

        first = await ask(odd_text)
        await ask([*odd_text, first, {"role": "user", "content": "x"}])
    one, two = gate.read(group)
    assert flat(one.sampled_ids) == odd
    assert flat(two.prompt_ids)[: len(one.prompt_ids) + len(odd)][-len(odd) :] == odd


async def test_a_stop_text_ends_the_record_where_an_engine_would_have_stopped(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, ["Thought: x\nObservation: made up", "next"])
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        first = await program.chat.completions.create(
            model="m", messages=HELLO, stop=["Observation:"]
        )
        text = first.choices[0].message.content
        assert text == "Thought: x\n"
        again = [*HELLO, first.choices[0].message, {"role": "user", "content": "Observation: 4"}]
        await program.chat.completions.create(model="m", messages=again)
    one, two = gate.read(group)
    assert printable_chat.text(flat(one.sampled_ids)) == "Thought: x\nObservation:"
    assert len(one.logprobs) == len(one.sampled_ids)
    kept = [*flat(one.prompt_ids), *flat(one.sampled_ids)]
    assert flat(two.prompt_ids)[: len(kept)] == kept


async def test_completions_continue_text_by_its_ids(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, [" mat"])
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        one = await program.completions.create(model="m", prompt="the cat sat on", logprobs=1)
        assert one.choices[0].text == " mat"
        assert one.choices[0].logprobs is not None
        assert "".join(one.choices[0].logprobs.tokens or ()).startswith(" mat")
        prompt = f"the cat sat on{one.choices[0].text} and"
        events = await program.completions.create(model="m", prompt=prompt, stream=True)
        assert "".join([event.choices[0].text async for event in events]) == " mat"
        await program.completions.create(model="m", prompt=printable_chat.encode("ids"))
    first, second, third = gate.read(group)
    kept = [*flat(first.prompt_ids), *flat(first.sampled_ids)]
    assert flat(second.prompt_ids) == [*kept, *printable_chat.encode(" and")]
    assert flat(third.prompt_ids) == printable_chat.encode("ids")
