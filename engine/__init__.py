"""The built-in inference server: token ids in, token ids and log-probabilities out.

    app (HTTP, event loop) ── scheduler (one torch thread) ── batch, one per resident policy
                                                                ├── slots      the KV of running requests
                                                                ├── prefixes   the KV of earlier ones
                                                                └── sampling   logits to ids
    residents ── weights      which policies are here, and how they came

It speaks the subset of vLLM's HTTP interface that `activities/inference.py` uses, plus
`/rollbook/load` and `/rollbook/unload`.
"""
