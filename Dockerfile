# One image for every rollbook process; the command chooses which (docker-compose.yml).
FROM python:3.11-slim-bookworm
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
