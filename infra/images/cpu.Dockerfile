# syntax=docker/dockerfile:1
# Never built yet. Pinned by tag; put the digest of your mirror's image behind it.
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /opt/rollbook
COPY pyproject.toml README.md ./
COPY infra/constraints infra/constraints
COPY flows flows
COPY tasks tasks
COPY storage storage
COPY rewards rewards
COPY infra infra
RUN python -m venv .venv \
 && .venv/bin/pip install --no-cache-dir -c infra/constraints/controller.txt \
    -e '.[controller,kubernetes]'

FROM python:3.11.13-slim-bookworm
# The reward `code` isolates programs with bubblewrap; its pod must allow user namespaces.
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home rollbook \
 && install -d -o 1000 -g 1000 /var/lib/rollbook
COPY --from=build /opt/rollbook /opt/rollbook
ENV PATH=/opt/rollbook/.venv/bin:$PATH \
    ROLLBOOK_HOME=/var/lib/rollbook \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /opt/rollbook
USER 1000:1000
CMD ["rollbook", "--help"]
