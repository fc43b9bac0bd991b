# The coordinator. From the repository's root:
#   docker build -f configs/containers/coordinator.Dockerfile -t headwater-coordinator .
# torch for CPUs is the default (1.7 GB). On amd64 pip's usual place has torch with CUDA alone: name the place with the other,
# --build-arg PIP_EXTRA_INDEX_URL=ADDRESS; the build stops at once where that is missing, and says which address it is.
# With a GPU: --build-arg DEVICE=gpu (5.7 GB), and the container runtime of its maker. A mirror: --build-arg PIP_INDEX_URL=…
FROM python:3.11-slim-bookworm AS build
ARG DEVICE=cpu
ARG EXTRAS=coordinator
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY configs ./configs
COPY edge_agent ./edge_agent
COPY export ./export
COPY coordinator ./coordinator
# Not the newest pair of torch and torchvision but the tested one; a variant for CPUs (+cpu) fits it and is taken first.
RUN python -m venv /opt/headwater && : >/tmp/constraints \
 && if [ "$DEVICE" != gpu ]; then cp configs/constraints-cpu.txt /tmp/constraints \
 && /opt/headwater/bin/pip install --quiet --disable-pip-version-check --dry-run --report /tmp/report.json -c /tmp/constraints \
      torch torchvision \
 && python configs/containers/check_torch.py /tmp/report.json; fi
RUN /opt/headwater/bin/pip install --no-cache-dir --disable-pip-version-check -c /tmp/constraints ".[$EXTRAS]"

FROM python:3.11-slim-bookworm
# 'serve' starts Mosquitto for a federation with certificates ('headwater init'). Debian keeps its versions secure.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends mosquitto && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --home-dir /var/lib/headwater headwater
COPY --from=build /opt/headwater /opt/headwater
ENV PATH=/opt/headwater/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib
USER 10001:10001
WORKDIR /var/lib/headwater
VOLUME /var/lib/headwater
# The web view; with certificates the broker's port and that of the enrolment.
EXPOSE 8470 8883 8884
# Heard within 30 s; /ready, which also asks about the broker, is for load balancers: a restart does not bring a broker back.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=5 \
  CMD ["python", "-m", "coordinator.web.health", "--state", "/var/lib/headwater/state"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["headwater"]
CMD ["serve", "--config", "/etc/headwater/coordinator.toml", "--log-format", "json"]
