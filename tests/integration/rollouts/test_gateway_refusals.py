"""What the gateway refuses, in the words of the OpenAI API, and what that leaves in the ledger."""

from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from activities.chat import Chat
from storage import sessions
from tests.gateways import HELLO, Make, gateway
from tests.stub_engine import StubEngine


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
