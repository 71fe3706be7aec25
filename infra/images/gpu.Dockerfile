# syntax=docker/dockerfile:1
# Never built yet. torch's wheels bring CUDA; the node brings the driver. Pinned by tag; put the
# digest of your mirror's image behind it.
FROM python:3.11.13-slim-bookworm
# g++ and ninja compile DeepSpeed's communication op at the first start, into the home's cache.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home rollbook \
 && install -d -o 1000 -g 1000 /var/lib/rollbook
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
# Its own pins, not those of CPU engines: vLLM's two builds want other versions of some packages.
RUN python -m venv .venv-engines \
 && .venv-engines/bin/pip install --no-cache-dir -c infra/constraints/engines-gpu.txt -e '.[gpu]'
ENV PATH=/opt/rollbook/.venv/bin:/opt/rollbook/.venv-engines/bin:$PATH \
    ROLLBOOK_HOME=/var/lib/rollbook \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000:1000
CMD ["rollbook", "--help"]
