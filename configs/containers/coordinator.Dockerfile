# The coordinator. From the repository's root:
#   docker build -f configs/containers/coordinator.Dockerfile -t headwater-coordinator .
# With a GPU: --build-arg DEVICE=gpu, and the container runtime of its maker. A mirror of packages: --build-arg PIP_INDEX_URL=…
# A place with torch for CPUs: --build-arg PIP_EXTRA_INDEX_URL=…; with CUDA, which pip may bring, the image has 5.7 GB, not 1.7.
FROM python:3.11-slim-bookworm AS build
ARG DEVICE=cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY configs ./configs
COPY edge_agent ./edge_agent
COPY export ./export
COPY coordinator ./coordinator
# Not the newest pair of torch and torchvision but the tested one; a variant for CPUs (+cpu) fits it and is taken first.
RUN if [ "$DEVICE" = gpu ]; then : >/tmp/constraints; else cp configs/constraints-cpu.txt /tmp/constraints; fi \
 && python -m venv /opt/headwater \
 && /opt/headwater/bin/pip install --no-cache-dir --disable-pip-version-check -c /tmp/constraints '.[coordinator]'

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/headwater headwater
COPY --from=build /opt/headwater /opt/headwater
ENV PATH=/opt/headwater/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib
USER 10001:10001
WORKDIR /var/lib/headwater
VOLUME /var/lib/headwater
EXPOSE 8470
# Heard within 30 s; /ready, which also asks about the broker, is for load balancers: a restart does not bring a broker back.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=5 \
  CMD ["python", "-m", "coordinator.web.health", "--state", "/var/lib/headwater/state"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["headwater"]
CMD ["serve", "--config", "/etc/headwater/coordinator.toml", "--log-format", "json"]
