# One image for every rollbook process; the command chooses which (docker-compose.yml).
# With `--target vllm` the same on top of vLLM's own image, for engines on GPUs.
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

FROM python:3.11-slim-bookworm AS rollbook
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/rollbook PIP_NO_CACHE_DIR=1
WORKDIR /rollbook
COPY requirements.lock pyproject.toml ./
RUN pip install -r requirements.lock
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . \
    && useradd --create-home --uid 10001 rollbook \
    && mkdir -p /state && chown rollbook /state
USER rollbook
ENTRYPOINT ["rollbook"]
