"""vLLM behind the interface of the built-in engine: a front beside each server.

    callers ──▶ front (HTTP) ──▶ residents ──▶ strategies   reload in place, or one adapter a version
                  │                  └───────▶ sets         fetched from the object store, verified
                  └── sampling ─────────────▶ server        a vLLM process, and its control routes

A vLLM server cannot read the object store, does not know versions, and takes some wrong weights
without a word. The front does that, on the server's own machine, so that whoever samples or
publishes talks to every engine alike (docs/adr/vllm-front.md). No torch, and nothing of vLLM, is
imported here: the server runs in an environment of its own.
"""
