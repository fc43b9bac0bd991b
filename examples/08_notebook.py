"""Two methods simulated, compared and exported, as the cells of a notebook would: python examples/08_notebook.py."""

import sys
from pathlib import Path

from coordinator import SimulationResult, simulate

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "notebook")
params = {"lr": 0.05, "momentum": 0.9, "batch_size": 32, "local_epochs": 3}
styles = ("digits:inverted?n=800", "digits:photo?n=800", "digits:slanted?n=800")
for name in ("fedavg", "fedper"):
    simulate(name, data=styles, partition="domains", rounds=8, params=params, out=folder / name, resume=True)
fedavg, fedper = (SimulationResult.open(folder / name) for name in ("fedavg", "fedper"))
print(fedper, fedper.clients, fedper.compare(fedavg), fedper.clients[0].confusion(), sep="\n\n")
fedavg.plot(folder / "fedavg.svg")
print(fedavg.export(folder / "encoder.hwb"), fedper.clients[0].export(folder / "personal.onnx"))
