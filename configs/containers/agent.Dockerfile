# An agent, for amd64 and arm64. From the repository's root:
#   docker build -f configs/containers/agent.Dockerfile -t headwater-agent .
#   docker buildx build --platform linux/arm64 -f configs/containers/agent.Dockerfile -t headwater-agent .
# A device that trains encoders: --build-arg EXTRAS=agent,train, and on amd64 a place that has torch for CPUs, as for the
# coordinator: --build-arg PIP_EXTRA_INDEX_URL=ADDRESS, or --build-arg DEVICE=gpu. A mirror: --build-arg PIP_INDEX_URL=…
FROM python:3.11-slim-bookworm AS build
ARG EXTRAS=agent
ARG DEVICE=cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY configs ./configs
COPY edge_agent ./edge_agent
COPY export ./export
COPY coordinator ./coordinator
RUN python -m venv /opt/headwater && : >/tmp/constraints \
 && if [ "$DEVICE" != gpu ]; then cp configs/constraints-cpu.txt /tmp/constraints \
 && /opt/headwater/bin/pip install --quiet --disable-pip-version-check --dry-run --report /tmp/report.json -c /tmp/constraints \
      ".[$EXTRAS]" \
 && python configs/containers/check_torch.py /tmp/report.json; fi
RUN /opt/headwater/bin/pip install --no-cache-dir --disable-pip-version-check -c /tmp/constraints ".[$EXTRAS]"

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/headwater headwater
COPY --from=build /opt/headwater /opt/headwater
ENV PATH=/opt/headwater/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/headwater
VOLUME /var/lib/headwater
# Exit code 1 where the last task failed or the disk cannot be written.
HEALTHCHECK --interval=60s --timeout=20s --start-period=60s --retries=5 \
  CMD ["edge-agent", "status", "--config", "/etc/headwater/agent.toml"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["edge-agent"]
CMD ["run", "--config", "/etc/headwater/agent.toml", "--log-format", "json"]
