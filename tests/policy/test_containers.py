"""Container files and manifests, held against the programs, against each other, and by linters that are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import asgi_client
import pytest
import yaml
from starlette.applications import Starlette

from coordinator.config import CoordinatorConfig, IdentityConfig
from coordinator.identity import serving
from coordinator.journal.store import utc_now
from coordinator.web import health, metrics
from coordinator.web.app import ROUTES, Guard
from edge_agent.core.config import AgentConfig, load, parse
from edge_agent.core.errors import MissingCapability
from edge_agent.core.storage import read_toml

PROGRAMS = ("coordinator", "agent")
hadolint = pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
validator = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed"
)


def _is_compose_there():
    """Docker Compose by its own program, which reads the file without a daemon; version 1 knows an older form."""
    if shutil.which("docker-compose") is None:
        return False
    command = ["docker-compose", "version", "--short"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout
    return not found.startswith("1.")


docker_compose = pytest.mark.skipif(not _is_compose_there(), reason="Docker Compose is not installed")


@pytest.fixture(scope="module")
def folder(root):
    return root / "configs/containers"


@pytest.fixture(scope="module")
def compose(folder):
    return yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def manifests(root):
    return list(yaml.safe_load_all((root / "configs/kubernetes/headwater.yaml").read_text(encoding="utf-8")))


def instructions(path):
    """(instruction, rest) of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    return [tuple(line.strip().split(maxsplit=1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_image_has_two_stages_no_root_and_a_health_check(root, folder, program):
    steps = instructions(folder / f"{program}.Dockerfile")
    stages = [number for number, (name, _) in enumerate(steps) if name == "FROM"]
    assert len(stages) == 2
    final = dict(steps[stages[1] :])
    assert final["USER"] == "10001:10001"
    assert final["VOLUME"] == "/var/lib/headwater"
    assert "RUN" not in dict(steps[steps.index(("USER", "10001:10001")) :]), "nothing is made by another user"
    assert final["COPY"] == "--from=build /opt/headwater /opt/headwater", "no compiler and no sources in the image"
    assert "HEALTHCHECK" in final
    ignored = (folder / f"{program}.Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for name, rest in steps[: stages[1]]:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (root / source).exists()
                assert f"!{source}" in ignored, "left out of what is sent to the builder"


@pytest.mark.parametrize("program", PROGRAMS)
def test_commands_of_an_image_are_commands_of_the_program(folder, program):
    steps = dict(instructions(folder / f"{program}.Dockerfile")[-8:])
    (entry,) = yaml.safe_load(steps["ENTRYPOINT"])
    words = yaml.safe_load(steps["CMD"])
    module = {"headwater": "coordinator", "edge-agent": "edge_agent"}[entry]
    done = subprocess.run(
        [sys.executable, "-m", module, words[0], "--help"], check=True, capture_output=True, text=True, timeout=60
    )
    assert all(word in done.stdout for word in words if word.startswith("--"))
    check = shlex.split(steps["HEALTHCHECK"].partition("CMD ")[2].strip("[]").replace(",", ""))
    if check[0] == "python":
        done = subprocess.run([sys.executable, *check[1:3], "--help"], check=True, capture_output=True, timeout=60)
        assert b"--state" in done.stdout


def report_of(*names):
    return {"install": [{"metadata": {"name": name, "version": "1"}} for name in names]}


@pytest.mark.parametrize(
    "report, code",
    [
        (report_of("torch", "torchvision", "numpy"), 0),
        (report_of("torch", "nvidia-cublas-cu12", "triton"), 1),
        (report_of("torch", "cuda-bindings"), 1),
        (report_of(), 0),
    ],
)
def test_the_build_stops_before_cuda_is_downloaded_and_says_what_to_do(folder, tmp_path, report, code):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    command = [sys.executable, folder / "check_torch.py", path]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert ("--build-arg PIP_EXTRA_INDEX_URL=ADDRESS" in done.stderr) is bool(code)
    assert ("DEVICE=gpu" in done.stderr) is bool(code)


@pytest.mark.parametrize("program", PROGRAMS)
def test_torch_is_for_cpus_unless_a_gpu_is_asked_for(folder, program):
    """The default brought CUDA, 5.7 GB, without a word."""
    steps = instructions(folder / f"{program}.Dockerfile")
    assert ("ARG", "DEVICE=cpu") in steps
    (check,) = (rest for name, rest in steps if name == "RUN" and "check_torch.py" in rest)
    (install,) = (number for number, (name, rest) in enumerate(steps) if name == "RUN" and "--no-cache-dir" in rest)
    assert steps.index(("RUN", check)) < install, "before anything large is downloaded"
    assert "--dry-run --report /tmp/report.json" in " ".join(check.split())
    assert 'if [ "$DEVICE" != gpu ]' in check


def test_the_image_of_the_coordinator_has_what_serve_starts_for_devices_elsewhere(folder, monkeypatch):
    """'headwater init' was documented for an image in which 'serve' then ended: Mosquitto was not in it."""
    steps = instructions(folder / "coordinator.Dockerfile")
    final = steps[[number for number, (name, _) in enumerate(steps) if name == "FROM"][1] :]
    installed = " ".join(rest for name, rest in final if name == "RUN" and "apt-get install" in rest)
    needed = ("mosquitto",)
    monkeypatch.setattr("coordinator.identity.serving.find_mosquitto", lambda: None)
    identity = parse(IdentityConfig, {"host": "coordinator.example"}, where="[identity]")
    lacking = dict(serving.checks(folder, "home", identity))["mosquitto"]
    with pytest.raises(MissingCapability, match=needed[0]):
        lacking()
    assert all(re.search(rf"\b{name}\b", installed) for name in needed)
    exposed = {int(port) for name, rest in final if name == "EXPOSE" for port in rest.split()}
    assert {identity.port, identity.enroll_port} <= exposed


@pytest.fixture(scope="module")
def fleet_compose(folder):
    return yaml.safe_load((folder / "compose-fleet.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def fleet_manifests(root):
    return list(yaml.safe_load_all((root / "configs/kubernetes/fleet.yaml").read_text(encoding="utf-8")))


def test_devices_elsewhere_reach_both_ports_of_the_compose_file(fleet_compose):
    identity = parse(IdentityConfig, {"host": "coordinator.example"}, where="[identity]")
    (service,) = fleet_compose["services"].values()
    assert service["ports"] == [f"{port}:{port}" for port in (identity.port, identity.enroll_port)]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["volumes"] == ["coordinator:/var/lib/headwater"]
    assert "--insecure" not in service["command"]


def test_devices_elsewhere_reach_both_ports_of_the_manifest(fleet_manifests):
    identity = parse(IdentityConfig, {"host": "coordinator.example"}, where="[identity]")
    wanted = {identity.port, identity.enroll_port}
    by_kind = {one["kind"]: one for one in fleet_manifests}
    spec = by_kind["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (init,) = pod["initContainers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(named.values()) == wanted
    service = by_kind["Service"]["spec"]
    assert service["type"] == "LoadBalancer"
    assert {named[port["targetPort"]] for port in service["ports"]} == wanted
    assert all(named[port["targetPort"]] == port["port"] for port in service["ports"])
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == service["selector"]
    assert spec["serviceName"] == by_kind["Service"]["metadata"]["name"]
    (rule,) = by_kind["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == wanted
    volumes = {one["name"] for one in pod["volumes"]} | {
        one["metadata"]["name"] for one in spec["volumeClaimTemplates"]
    }
    assert pod["securityContext"]["runAsNonRoot"]
    for one in (container, init):
        assert one["securityContext"]["readOnlyRootFilesystem"]
        assert {mount["name"] for mount in one["volumeMounts"]} == volumes
    assert "--insecure" not in container["args"]


def test_the_first_start_in_a_volume_makes_a_federation_that_the_next_ones_keep(fleet_manifests, tmp_path):
    """The command of the manifest, in a volume as the image has it: not empty, and without a configuration."""
    (init,) = fleet_manifests[0]["spec"]["template"]["spec"]["initContainers"]
    (args,) = (one["args"] for one in fleet_manifests[0]["spec"]["template"]["spec"]["containers"])
    (tmp_path / ".profile").touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "headwater").write_text(f'#!/bin/sh\nexec {sys.executable} -m coordinator "$@"\n', encoding="utf-8")
    (programs / "headwater").chmod(0o755)
    named = {one["name"]: one["value"] for one in init["env"]}
    environment = {**os.environ, **named, "PATH": f"{programs}:{os.environ['PATH']}"}
    authorities = []
    for _ in range(2):
        subprocess.run(init["command"], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
        authorities.append((tmp_path / "state/identity/ca.pem").read_bytes())
    assert authorities[0] == authorities[1]
    assert args[args.index("--config") + 1] == "/var/lib/headwater/coordinator.toml"
    config = load(CoordinatorConfig, tmp_path / "coordinator.toml")
    assert config.identity.host == named["DEVICES_CONNECT_TO"]
    assert config.state == tmp_path / "state", "which the health check looks at, too"


def test_every_service_is_hardened_and_watched(compose, folder):
    services = compose["services"]
    assert services.keys() == {"mosquitto", "coordinator", "agent-1", "agent-2", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        is_ours = "build" in service
        if is_ours:
            dockerfile = (folder.parents[1] / service["build"]["dockerfile"]).read_text(encoding="utf-8")
        assert "HEALTHCHECK" in dockerfile if is_ours else "test" in service["healthcheck"], name
        assert is_ours or re.fullmatch(r"[a-z/-]+:[\w.-]+", service["image"]), (
            "a plain name with a version, of no registry"
        )
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            if source.startswith("."):
                assert (folder / source).is_file(), source
                assert mode == ["ro"]
            else:
                assert source in compose["volumes"]
                assert target.startswith("/")
        assert {*service["networks"]} <= compose["networks"].keys()
        assert {*service.get("depends_on", ())} <= services.keys()
    assert compose["networks"]["federation"]["internal"], "the broker without TLS is reached by nobody else"
    reached = [name for name, one in services.items() if "federation" in one["networks"]]
    assert reached == ["mosquitto", "coordinator", "agent-1", "agent-2"]


@docker_compose
@pytest.mark.parametrize("place", [{}, {"PIP_EXTRA_INDEX_URL": "file:///wheels"}])
def test_docker_compose_reads_the_file_and_hands_on_where_packages_are(folder, compose, place):
    command = ["docker-compose", "-f", "compose.yaml", "config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **place}
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    read = json.loads(done.stdout)
    assert read["services"].keys() == compose["services"].keys()
    built = {name: one["build"] for name, one in read["services"].items() if "build" in one}
    assert {name: one.get("args", {}) for name, one in built.items()} == {
        "coordinator": place,
        "agent-1": {**place, "EXTRAS": "agent,train"},
        "agent-2": place,
    }
    assert all((folder.parents[1] / one["dockerfile"]).is_file() for one in built.values())
    for name, one in read["services"].items():
        assert one["read_only"], name
        assert all(port["host_ip"] == "127.0.0.1" for port in one.get("ports", ())), name


def test_the_settings_in_containers_are_understood_and_fit_each_other(folder, compose):
    raw = read_toml(folder / "coordinator.toml")
    web = raw["web"]
    coordinator = parse(CoordinatorConfig, raw, where="coordinator.toml")
    assert (web["listen"], "coordinator" in web["hosts"]) == ("0.0.0.0:8470", True)
    agents = [load(AgentConfig, folder / f"agent-{number}.toml") for number in (1, 2)]
    assert {agent.federation for agent in agents} == {coordinator.federation}
    assert {agent.broker.url for agent in agents} == {coordinator.broker.url} == {"mqtt://mosquitto:1883"}
    assert [(agent.id, agent.tier) for agent in agents] == [("agent-1", "train"), ("agent-2", "head")]
    for one in (coordinator, *agents):
        assert str(one.state).startswith("/var/lib/headwater/"), "the one folder that can be written"
    scraped = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"][0]
    assert scraped["job_name"] == "headwater", "which the alerts name"
    assert scraped["static_configs"] == [{"targets": ["coordinator:8470"]}]
    limits = re.findall(r"^max_\w+ .*", (folder / "mosquitto.conf").read_text(encoding="utf-8"), re.MULTILINE)
    documented = (folder.parent / "mosquitto.conf").read_text(encoding="utf-8").splitlines()
    assert set(limits) <= {*documented}
    assert len(limits) == 4


def test_manifests_fit_the_images_and_each_other(manifests):
    by_kind = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
    assert by_kind.keys() == {
        ("StatefulSet", "coordinator"),
        ("Service", "coordinator"),
        ("Deployment", "mosquitto"),
        ("Service", "mosquitto"),
        ("NetworkPolicy", "mosquitto"),
        ("NetworkPolicy", "coordinator"),
    }
    for kind, name in (("StatefulSet", "coordinator"), ("Deployment", "mosquitto")):
        spec = by_kind[kind, name]["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels == by_kind["Service", name]["spec"]["selector"]
        assert spec["template"]["spec"]["securityContext"]["runAsNonRoot"]
        (container,) = spec["template"]["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        for port in by_kind["Service", name]["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]}
        volumes |= {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", ())}
        assert {one["name"] for one in container["volumeMounts"]} == volumes
    assert by_kind["StatefulSet", "coordinator"]["spec"]["replicas"] == 1
    for name in ("coordinator", "mosquitto"):
        policy = by_kind["NetworkPolicy", name]["spec"]
        service = by_kind["Service", name]["spec"]
        assert policy["podSelector"]["matchLabels"] == service["selector"]
        (rule,) = policy["ingress"]
        assert rule["from"], "not everybody"
        assert [one["port"] for one in rule["ports"]] == [one["port"] for one in service["ports"]]


def test_the_web_view_answers_what_a_cluster_asks(root, folder, manifests, tmp_path):
    """Pages by names alone; probes and Prometheus by whatever address a cluster has for the pod."""
    coordinator = parse(CoordinatorConfig, read_toml(folder / "coordinator.toml"), where="coordinator.toml")
    text = (root / "configs/kubernetes/headwater.yaml").read_text(encoding="utf-8")
    (scraped,) = re.findall(r'targets: \["([^"]+)"\]', text)
    (container,) = manifests[0]["spec"]["template"]["spec"]["containers"]
    probed = container["readinessProbe"]["httpGet"]
    assert probed.keys() == {"path", "port"}
    (tmp_path / "status.json").write_text(json.dumps({"at": utc_now().isoformat()}))
    routes = [*ROUTES, *health.routes(tmp_path), *metrics.routes(tmp_path)]
    app = Guard(Starlette(routes=routes), frozenset(coordinator.web.hosts))
    for path in (probed["path"], "/metrics", "/live"):
        for host in (scraped, "10.1.2.3:8470", "[fd00::3]:8470", ""):
            assert asgi_client.get(app, path, host).status == 200
    assert asgi_client.get(app, "/assets/web.js", scraped).status == 200
    assert asgi_client.get(app, "/assets/web.js", "localhost:8470").status == 200, "by port-forward"
    assert asgi_client.get(app, "/assets/web.js", "10.1.2.3:8470").status == 421


@validator
def test_manifests_are_valid_by_the_schema_of_kubernetes(manifests, fleet_manifests):
    import kubernetes_validate

    for manifest in (*manifests, *fleet_manifests):
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    broken = {**manifests[0], "spec": {**manifests[0]["spec"], "replicas": "one"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


@hadolint
@pytest.mark.parametrize("program", PROGRAMS)
def test_hadolint_has_nothing_to_say(folder, program):
    command = ["hadolint", "--no-color", f"{program}.Dockerfile"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# --- the cluster of examples/cluster ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(root):
    return yaml.safe_load((root / "examples/cluster/compose.yaml").read_text(encoding="utf-8"))["services"]


def test_the_cluster_has_an_aggregator_for_each_partition_and_brokers_and_a_database_by_their_names(root, cluster):
    config = load(CoordinatorConfig, root / "examples/cluster/coordinator.toml")
    of = config.aggregators.partitions
    served = [body["command"][2] for name, body in cluster.items() if name.startswith("aggregator")]
    assert served == [f"{number}/{of}" for number in range(1, of + 1)]
    hosts = {url.partition("//")[2] for url in config.broker.urls}
    assert hosts == {name for name in cluster if name.startswith("broker")}
    assert "@database/" in config.journal
    assert config.cohort.min_agents == len([name for name in cluster if name.startswith("agent-")])


def test_the_cluster_mounts_files_that_are_there_and_agents_that_differ(root, cluster):
    folder = root / "examples/cluster"
    mounts = [mount.partition(":")[0] for body in cluster.values() for mount in body.get("volumes", [])]
    files = {mount for mount in mounts if mount.startswith("./")}
    assert all((folder / name).is_file() for name in files)
    agents = [load(AgentConfig, folder / f"agent-{number}.toml") for number in (1, 2, 3)]
    assert len({agent.id for agent in agents}) == len({agent.data.source for agent in agents}) == 3
    assert {agent.federation for agent in agents} == {"cluster"}
