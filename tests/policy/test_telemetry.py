"""ONNX Runtime reports home by default, except where it believes to be in CI: here it believes not to be."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

RUN_A_SESSION = """
import os, sys

connections = []
outward = {"socket.connect", "socket.sendto"}
sys.addaudithook(lambda event, args: connections.append(args[1]) if event in outward else None)

door, model = sys.argv[1:]
module = __import__(door, fromlist=["onnxruntime"])
runtime = module.onnxruntime()
session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
import numpy as np
print(session.run(None, {"x": np.ones((1, 3), np.float32)})[0].sum())
sockets = [name for name in os.listdir("/proc/self/fd") if is_socket(name)] if os.path.isdir("/proc/self/fd") else []
print("sockets", len(sockets), "connections", len(connections))
"""
IS_SOCKET = """
import os

def is_socket(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:
        return False
"""
SIGNS_OF_CI = ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "JENKINS_URL", "TF_BUILD", "TRAVIS", "CIRCLECI", "BUILDKITE")
SIGNS_OF_CI += ("APPVEYOR", "TEAMCITY_VERSION", "CODEBUILD_BUILD_ID", "BUILD_ID", "ORT_DISABLE_TELEMETRY")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """y = 2 x as a file."""
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    two = helper.make_tensor("two", kind, [], [2.0])
    node = helper.make_node("Mul", ["x", "two"], ["y"])
    tensors = [[helper.make_tensor_value_info(name, kind, [1, 3])] for name in "xy"]
    graph = helper.make_graph([node], "double", *tensors, initializer=[two])
    path = tmp_path_factory.mktemp("telemetry") / "double.onnx"
    opset = helper.make_opsetid("", 17)
    path.write_bytes(helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString())
    return path


def run(code, home, *arguments, **environment):
    kept = {
        name: value for name, value in os.environ.items() if name not in SIGNS_OF_CI and not name.startswith("XDG_")
    }
    command = [sys.executable, "-c", IS_SOCKET + code, *map(str, arguments)]
    return subprocess.run(
        command,
        check=False,
        env={**kept, "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("door", ["edge_agent.personal.encoder", "export.parity"])
def test_running_an_encoder_leaves_no_trace_and_calls_nobody(door, model, tmp_path):
    done = run(RUN_A_SESSION, tmp_path, door, model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6.0", "sockets", "0", "connections", "0"]
    assert float(np.float32(2) * 3) == 6.0
    assert list(tmp_path.rglob("*")) == [], "nothing was written below the home folder"


def test_importing_the_packages_calls_nobody_and_writes_nothing(tmp_path, sources):
    modules = [s.name for s in sources if "__main__" not in s.name and s.name.split(".")[0] != "edge_agent"]
    code = """
import importlib, sys
calls = []
outward = {"socket.connect", "socket.sendto"}
sys.addaudithook(lambda event, args: calls.append((event, args[1])) if event in outward else None)
for module in sys.argv[1].split(","):
    importlib.import_module(module)
print(calls)
"""
    done = run(code, tmp_path, ",".join(modules), MPLCONFIGDIR=str(tmp_path / "matplotlib"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    written = [path for path in tmp_path.rglob("*") if "matplotlib" not in path.parts]
    assert written == []
