"""Two methods simulated, plotted and exported, as the cells of a notebook would: python examples/08_notebook.py."""

import sys
from pathlib import Path

from coordinator import simulate

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "notebook")
params = {"lr": 0.05, "momentum": 0.9, "batch_size": 32, "local_epochs": 3}
styles = ("digits:inverted?n=800", "digits:photo?n=800", "digits:slanted?n=800")
methods = ("fedavg", "fedper")
results = {name: simulate(name, data=styles, partition="domains", rounds=8, params=params) for name in methods}
for name, result in results.items():
    print(f"{name}: accuracy {result.accuracy:.3f}, last round {result.rounds[-1]}")
    result.plot(folder / f"{name}.svg")
print(results["fedavg"].export(folder / "encoder.hwb"))
