"""One vLLM server over its HTTP routes: what rollbook asks of it besides sampling.

Each method is one request and says in its name what it does there. The order in which they must
come, and why, is in `strategies.py`.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from domain import tracing
from domain.errors import EngineRefused, EngineUnavailable

PROBE_PATIENCE_S = 120.0
RELOAD_PATIENCE_S = 600.0
ABORT_PREFIX = "generate-tokens-"
WHOLE_VOCABULARY = 2**31 - 1
"""As `top_k`: vLLM lowers it to what there is."""

Crossing = Literal["hold", "refill"]
"""What requests do that are running when weights are replaced: go on with the KV they have, or
compute it again under the new weights."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of a sampling request, passed on as they are."""

    status: int
    body: bytes


class Control:
    """HTTP client of one server. Raises EngineUnavailable when it is away, EngineRefused on 4xx."""

    def __init__(self, url: str, *, connections: int, kept_sets: bool = False) -> None:
        """Nothing is connected yet.

        Args:
            url: base URL of the server.
            connections: kept open.
            kept_sets: whether it was started to report what filtered sampling keeps.
        """
        self.url = url
        self._kept_sets = kept_sets
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=url, limits=limits, timeout=httpx.Timeout(30.0), trust_env=False
        )

    async def aclose(self) -> None:
        """Close all connections: vLLM aborts what runs on them."""
        await self._http.aclose()

    async def healthy(self, within_s: float = 3.0) -> bool:
        """Whether the server and its engine core answer."""
        try:
            answer = await self._http.get("/health", timeout=within_s)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def metrics(self) -> str:
        """Prometheus text."""
        return (await self._send("GET", "/metrics")).text

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        """Sample. Being cancelled closes the connection, which aborts the request."""
        try:
            answer = await self._http.post(
                "/inference/v1/generate",
                json=self._bounded(body),
                timeout=None,
                headers=tracing.carrier(),
            )
        except httpx.TransportError as error:
            raise self._away("/inference/v1/generate", error) from error
        return Answer(answer.status_code, answer.content)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each is answered with what it has. Ids with their prefix."""
        await self._send(
            "POST", "/inference/v1/abort_requests", json={"request_ids": list(request_ids)}
        )

    async def hold_back(self, mode: Literal["abort", "wait", "keep"], *, clear: bool) -> None:
        """Pause the scheduler; returns once nothing computes.

        Args:
            mode: running requests are ended with what they have, finished, or frozen.
            clear: forget all KV. Frozen requests compute theirs again then.
        """
        query = f"mode={mode}&clear_cache={'true' if clear else 'false'}"
        await self._send("POST", f"/pause?{query}", timeout_s=RELOAD_PATIENCE_S)

    async def resume(self) -> None:
        """Let the scheduler go on."""
        await self._send("POST", "/resume")

    async def reload(self, folder: Path) -> None:
        """Replace the weights by those in the folder. Only while paused.

        A folder that lacks a tensor is taken without a word: verify it before. What the old weights
        made of images is forgotten with them; where KV is kept the scheduler would otherwise rely on
        it, and the server die of the first image it has seen before.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._send("POST", "/collective_rpc", json=body, timeout_s=RELOAD_PATIENCE_S)
        await self._send("POST", "/reset_encoder_cache")

    async def label(self, version: str) -> None:
        """Name the weights: `weight_versions` of every answer from here on. Only while paused."""
        await self._send("POST", "/update_weight_version", json={"new_version": version})

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve an adapter. The folder stays until its last request has ended."""
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._send("POST", "/v1/load_lora_adapter", json=body, timeout_s=RELOAD_PATIENCE_S)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; running ones finish on it."""
        await self._send("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    async def models(self) -> list[str]:
        """Names that may be asked for."""
        return [entry["id"] for entry in (await self._send("GET", "/v1/models")).json()["data"]]

    async def logprobs(self, model: str, ids: Sequence[int], salt: str) -> list[float]:
        """Log-probability of each id after the first, at temperature 1, from a forward of now.

        Asked of the next token of each prefix. Scoring a prompt at once would be one request, but a
        server with adapters dies of it when anything else is in the batch (CPU kernels).
        """
        return list(
            await asyncio.gather(
                *(self._next(model, ids[:at], ids[at], salt) for at in range(1, len(ids)))
            )
        )

    async def _next(self, model: str, prefix: Sequence[int], token: int, salt: str) -> float:
        body = {
            "model": model,
            "token_ids": list(prefix),
            "cache_salt": salt,
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                # As many as ids, and only so many are answered, the sampled one first.
                "logprobs": 2,
                "logprob_token_ids": [token, token],
            },
        }
        answer = await self._send(
            "POST",
            "/inference/v1/generate",
            json=self._bounded(body),
            timeout_s=PROBE_PATIENCE_S,
            alone=False,
        )
        content = answer.json()["choices"][0]["logprobs"]["content"][0]
        for entry in (content, *content["top_logprobs"]):
            if entry["token_id"] == token:
                return float(entry["logprob"])
        raise EngineRefused(f"vLLM at {self.url} gave no log-probability of the probe's {token}")

    def _bounded(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same request as a server takes it that reports kept sets: none without a bound.

        It refuses `top_k` of none, and greedy sampling, which is to keep the likeliest id alone.
        """
        params = body.get("sampling_params")
        if not self._kept_sets or not isinstance(params, Mapping):
            return body
        if params.get("temperature") == 0:
            bound = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
        elif params.get("top_k") in (None, 0, -1):
            bound = {"top_k": WHOLE_VOCABULARY}
        else:
            return body
        return {**body, "sampling_params": {**params, **bound}}

    async def _send(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        timeout_s: float = 30.0,
        alone: bool = True,
    ) -> httpx.Response:
        # A moment after it answered 500 the server closes the connection: what is sent over it next
        # would be lost, and be taken for the server's end, when all it needs is its weights back.
        headers = {"Connection": "close"} if alone else None
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.request(
                    method, path, json=json, timeout=timeout_s, headers=headers
                )
        except (httpx.TransportError, TimeoutError) as error:
            raise self._away(path, error) from error
        if answer.status_code == 200:
            return answer
        said = f"vLLM at {self.url}{path} answered {answer.status_code}: {_message(answer)}"
        if answer.status_code >= 500:
            raise EngineUnavailable(said)
        raise EngineRefused(said)

    def _away(self, path: str, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(f"vLLM at {self.url}{path}: {type(error).__name__} {error}")


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except json.JSONDecodeError:
        return answer.text[:1000]
    found = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message", found) if isinstance(found, dict) else found)[:1000]
