"""Calls that are broken off, repeated, or made side by side: each is recorded once."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from activities.chat import Chat
from storage import segments
from tests.gateways import ADD, HELLO, Make, Running, Script, call, flat, gateway, until
from tests.stub_engine import StubEngine


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


async def test_a_question_whose_answer_arrived_is_another_one_even_when_the_session_was_read_again(
    sampled_run: Make, engine: StubEngine, printable_chat: Chat
) -> None:
    """Read again because another call was broken off; what had arrived is not given twice."""
    engine.say = Script(printable_chat, ["one"])
    b = sampled_run()
    group = b.group()
    other: Any = [{"role": "user", "content": "other"}]
    async with gateway(b, printable_chat) as gate, gate.client(group, 0) as program:
        first = await program.chat.completions.create(model="m", messages=HELLO)
        assert first.choices[0].message.content == "one"
        (entry,) = gate.sessions._entries.values()
        await until(lambda: entry.delivered)
        engine.hold = asyncio.Event()
        asking = asyncio.create_task(program.chat.completions.create(model="m", messages=other))
        await until(lambda: engine.running)
        asking.cancel()
        await until(lambda: engine.aborted)
        await until(lambda: entry.opened is not None and entry.opened.doubtful)
        engine.hold.set()
        engine.say = Script(printable_chat, ["two"])
        again = await program.chat.completions.create(model="m", messages=HELLO)
        assert again.choices[0].message.content == "two"
