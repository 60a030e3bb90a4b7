"""What a vLLM server is asked: the front's requests as the server gets them."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from domain.errors import EngineUnavailable
from engine.vllm.control import WHOLE_VOCABULARY, Control

KEEPS_ALL = {"top_k": WHOLE_VOCABULARY}
GREEDY = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}


def control(asked: list[dict[str, Any]], *, kept_sets: bool) -> Control:
    """The routes of a server that writes down what it is asked for."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        said = {"token_id": 7, "logprob": -0.5, "top_logprobs": []}
        return httpx.Response(200, json={"choices": [{"logprobs": {"content": [said]}}]})

    made = Control("http://v", connections=1, kept_sets=kept_sets)
    made._http = httpx.AsyncClient(base_url="http://v", transport=httpx.MockTransport(answer))
    return made


@pytest.mark.parametrize(
    ("params", "bound"),
    [
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {}),
        ({"temperature": 0.7, "top_k": -1, "top_p": 0.9}, KEEPS_ALL),
        ({"temperature": 1.0}, KEEPS_ALL),
        ({"temperature": 1.0, "top_k": "all"}, {}),  # the server's to refuse
        ({"temperature": 0, "top_k": -1, "top_p": 1.0}, GREEDY),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, GREEDY),
    ],
)
async def test_a_server_that_reports_kept_sets_is_given_a_bound_on_them(
    params: dict[str, Any], bound: dict[str, Any]
) -> None:
    """It refuses requests without: of evaluations, of the probe, of runs that filter by top_p."""
    asked: list[dict[str, Any]] = []
    body = {"token_ids": [1], "sampling_params": params}
    reports = control(asked, kept_sets=True)
    await reports.generate(body)
    await control(asked, kept_sets=False).generate(body)
    assert asked == [{"token_ids": [1], "sampling_params": params | bound}, body]


async def test_the_probe_is_answered_by_such_a_server_too() -> None:
    asked: list[dict[str, Any]] = []
    found = await control(asked, kept_sets=True).logprobs("base", [3, 7], "s")
    assert found == [-0.5]
    (request,) = asked
    assert (request["token_ids"], request["sampling_params"]["logprob_token_ids"]) == ([3], [7, 7])
    assert request["sampling_params"]["top_k"] == WHOLE_VOCABULARY


async def test_what_follows_a_failed_reload_is_not_lost_with_its_connection() -> None:
    """vLLM answers 500 as if the connection were to be kept, and closes it a moment later."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        status = b"500 No" if connections == 1 else b"200 OK"
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\n{}" % status)
        await asyncio.sleep(0.1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made = Control(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections=1)
    with pytest.raises(EngineUnavailable, match="answered 500"):
        await made.resume()
    await made.resume()
    assert connections == 2
    await made.aclose()
    server.close()
