"""The recording gateway as programs see it: the openai client, a real ledger, a scripted engine."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from activities.chat import Chat
from domain.text import REPLACEMENT
from storage import segments, sessions
from tests.gateways import Running, Script, call, gateway
from tests.scripted import printable
from tests.stub_engine import StubEngine

Make = Callable[..., Any]

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
HELLO: Any = [{"role": "user", "content": "hello"}]


def flat(ids: Any) -> list[int]:
    return [int(i) for i in ids]


async def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - an engine and a database have no event
            await asyncio.sleep(0.01)


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


async def test_budgets_are_refused_in_the_apis_own_words(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = lambda body: [5] * 1000
    b = sampled_run(budget={"max_context_tokens": 120, "max_generated_tokens": 100})
    group = b.group()

    def refused(sample: int) -> Any:
        return b.one(
            "SELECT refused FROM gateway_keys WHERE run_id = %s AND sample = %s", b.run, sample
        )["refused"]

    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        with pytest.raises(openai.BadRequestError) as caught:
            await program.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 200}]
            )
        assert caught.value.code == "context_length_exceeded"
        assert "maximum context length is 120 tokens" in caught.value.message
        assert refused(0) == "context"
        cut = await program.chat.completions.create(model="m", messages=HELLO, max_tokens=20)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage is not None
        assert cut.usage.completion_tokens == 20
        assert refused(0) is None
        await program.chat.completions.create(model="m", messages=HELLO, max_tokens=70)  # 90 of 100
        last = await program.chat.completions.create(model="m", messages=HELLO)
        assert last.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as caught:
            await program.chat.completions.create(model="m", messages=HELLO)
        assert caught.value.code == "rollout_budget_exhausted"
        assert refused(0) == "tokens"
    assert b.attempt(group, 0)["policy_tokens"] == 100
    assert b.attempt(group, 0)["turns"] == 3


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


async def test_what_cannot_be_honoured_is_refused_by_name(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        ask: Any = program.chat.completions.create
        bad: list[tuple[str, dict[str, Any]]] = [
            ("n", {"n": 2}),
            ("response_format", {"response_format": {"type": "json_object"}}),
            ("messages", {"messages": []}),
            ("messages[0]", {"messages": [{"role": "judge", "content": "x"}]}),
            ("max_tokens", {"max_tokens": 0}),
            ("stop", {"stop": [""]}),
            ("tools", {"tools": [{"type": "function"}]}),
        ]
        for param, fields in bad:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(**{"model": "m", "messages": HELLO} | fields)
            assert caught.value.param == param
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        with pytest.raises(openai.BadRequestError, match="PNG, JPEG, GIF or WebP"):
            await ask(model="m", messages=[{"role": "user", "content": [image]}])
        with pytest.raises(openai.NotFoundError, match="no /v1/responses here"):
            await program.responses.create(model="m", input="hello")
        assert [model.id async for model in program.models.list()] == [b.run]
    assert gate.read(group) == []
    assert engine.requests == []


async def test_unknown_ended_cancelled_and_superseded_sessions_are_refused(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate:

        async def ask(program: AsyncOpenAI) -> Any:
            return await program.chat.completions.create(model="m", messages=HELLO)

        async with gate.client(group, 0) as program, gate.client(group, 1) as other:
            for url, key in (
                (program.base_url, "made up"),
                (other.base_url, program.api_key),
            ):
                async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as stranger:
                    with pytest.raises(openai.AuthenticationError):
                        await ask(stranger)
            await ask(program)
            b.finish(group, 0)
            with pytest.raises(openai.PermissionDeniedError, match="ended as completed"):
                await ask(program)
            b.sql(
                "UPDATE attempts SET cancel_cause = 'stale' WHERE run_id = %s AND sample = 1", b.run
            )
            with pytest.raises(openai.PermissionDeniedError, match=r"cancelled \(stale\)"):
                await ask(other)
        async with gate.client(group, 2) as old:
            await ask(old)
            sampled = len(gate.read(group, 2))
            async with gate.client(group, 2) as new:
                with pytest.raises(openai.AuthenticationError):
                    await ask(old)
                assert len(gate.read(group, 2)) == sampled
                await ask(new)
                b.start(group, 2)
                with pytest.raises(openai.PermissionDeniedError, match="superseded"):
                    await ask(new)
        keys = b.sql("SELECT key_sha256 FROM gateway_keys WHERE run_id = %s", b.run)
        assert all(len(row["key_sha256"]) == 32 for row in keys)


async def test_a_revoked_key_opens_nothing(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        b.ledger.call(sessions.revoke, b.key(group, 0), b.attempt(group, 0)["fence"])
        with pytest.raises(openai.PermissionDeniedError, match="is over"):
            await program.chat.completions.create(model="m", messages=HELLO)
    assert engine.requests == []


@pytest.mark.parametrize("trouble", ["nan", "missing", "400"])
async def test_an_answer_that_cannot_be_trained_on_fails_the_attempt(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat, trouble: str
) -> None:
    if trouble == "nan":
        engine.logprob = float("nan")
    elif trouble == "missing":
        engine.drop_logprobs = True
    else:
        engine.status = 400
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0, retries=2) as program:
        with pytest.raises(openai.InternalServerError, match="sampling failed"):
            await program.chat.completions.create(model="m", messages=HELLO)
        with pytest.raises(openai.PermissionDeniedError, match="has failed"):
            await program.chat.completions.create(model="m", messages=HELLO)
    assert len(engine.requests) == 1
    seen = b.ledger.call(sessions.look, b.key(group, 0), b.attempt(group, 0)["fence"])
    assert seen.failure is not None
    assert seen.segments == 0


async def test_a_client_that_goes_away_aborts_its_request_and_may_take_it_up_again(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.hold = asyncio.Event()
    engine.say = Script(printable_chat, ["well then"])
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        asking = asyncio.create_task(program.chat.completions.create(model="m", messages=HELLO))
        await until(lambda: engine.running)
        asking.cancel()
        await until(lambda: engine.aborted)
        await until(lambda: gate.read(group))
        engine.hold.set()
        (part,) = gate.read(group)
        assert printable_chat.text(flat(part.sampled_ids)) == "we"
        engine.say = Script(printable_chat, ["ird"])
        whole = await program.chat.completions.create(model="m", messages=HELLO)
        assert whole.choices[0].message.content == "weird"
    assert b.attempt(group, 0)["turns"] == 1


async def test_calls_side_by_side_share_the_budget_to_the_token(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = lambda body: [5] * 1000
    b = sampled_run(budget={"max_generated_tokens": 100, "segment_tokens": 8})
    group = b.group()
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:

        async def ask(number: int) -> Any:
            said: Any = [{"role": "user", "content": f"{number}"}]
            return await program.chat.completions.create(model="m", messages=said, max_tokens=30)

        answers = await asyncio.gather(*(ask(n) for n in range(8)), return_exceptions=True)
    assert b.attempt(group, 0)["policy_tokens"] == 100
    given = [a for a in answers if not isinstance(a, BaseException)]
    assert sum(answer.usage.completion_tokens for answer in given) == 100


async def test_an_answer_that_was_recorded_but_never_arrived_is_given_again(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, ["one", call("add", a=1), "three", "four"])
    b = sampled_run()
    group = b.group()
    key = ""

    async def ask(gate: Running, messages: Any) -> Any:
        async with AsyncOpenAI(base_url=gate.base_url(group, 0), api_key=key) as program:
            answer = await program.chat.completions.create(
                model="m", messages=messages, tools=[ADD]
            )
            return answer.choices[0].message

    async with gateway(b, printable_chat) as gate:
        key = gate.key(group, 0)
        first = await ask(gate, HELLO)
        asked = [*HELLO, first, {"role": "user", "content": "add"}]
        second = await ask(gate, asked)
    # The process is gone, and with it the knowledge of what arrived.
    async with gateway(b, printable_chat) as gate:
        again = await ask(gate, asked)
        assert again == second
        assert len(gate.read(group)) == 2
        assert again.tool_calls
        tool = {"role": "tool", "tool_call_id": again.tool_calls[0].id, "content": "1"}
        third = await ask(gate, [*asked, again, tool])
        assert third.content == "three"
        # A repeated question whose answer did arrive is another question.
        assert (await ask(gate, asked)).content == "four"
    one, two, three, _ = gate.read(group)
    assert flat(three.prompt_ids)[: len(two.prompt_ids)] == flat(two.prompt_ids)
    assert flat(two.prompt_ids)[: len(one.prompt_ids)] == flat(one.prompt_ids)
    places = b.ledger.call(segments.places, b.run, group, 0, 0)
    assert [p.chain for p in places] == [0, 0, 0, 1]


async def test_two_gateways_never_write_over_each_other(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, ["yes"])
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as one, gateway(b, printable_chat) as two:
        key = one.key(group, 0)
        said: list[Any] = list(HELLO)
        for number, gate in enumerate((one, two, one, two)):
            async with AsyncOpenAI(base_url=gate.base_url(group, 0), api_key=key) as program:
                answer = await program.chat.completions.create(model="m", messages=said)
                said += [answer.choices[0].message, {"role": "user", "content": f"{number}"}]
    assert {p.chain for p in b.ledger.call(segments.places, b.run, group, 0, 0)} == {0}
    assert b.attempt(group, 0)["turns"] == 4


async def test_what_is_no_request_is_answered_all_the_same(
    sampled_run: Make, printable_chat: Chat
) -> None:
    b = sampled_run()
    group = b.group()
    async with gateway(b, printable_chat) as gate, httpx.AsyncClient() as http:
        url = gate.base_url(group, 0) + "/chat/completions"
        key = gate.key(group, 0)
        assert (await http.post(url, json={"messages": HELLO})).status_code == 401
        bearer = {"Authorization": f"Bearer {key}"}
        for body in (b"", b"[1]", b"{", b"[" * 100_000):
            answer = await http.post(url, content=body, headers=bearer)
            assert answer.status_code == 400, body[:10]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await http.get(gate.url + "/health")).json()["sessions"] == 0
