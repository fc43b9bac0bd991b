"""Stop the build of an image for CPUs before gigabytes of CUDA are downloaded, and say what to do.

Run as ``check_torch.py REPORT``: REPORT is what ``pip install --dry-run --report`` would install. The usual place of
pip has torch with CUDA alone for amd64, which makes an image of 5.7 GB in place of 1.7 GB.
"""

import json
import sys
from pathlib import Path

ADVICE = """\
torch with CUDA would be installed: the image would have 5.7 GB, and not 1.7 GB as with torch for CPUs.
For CPUs name the place that has it, with --build-arg PIP_EXTRA_INDEX_URL=ADDRESS, or with that variable in the
environment of 'docker compose'. ADDRESS is what pytorch.org, 'Get started', shows behind '--index-url' for Linux, pip
and CPU. With a GPU, or to take CUDA all the same: --build-arg DEVICE=gpu
"""


def cuda_packages(report: dict) -> list[str]:
    """Return the names of the packages of CUDA in a report of pip, sorted."""
    names = [entry["metadata"]["name"].lower() for entry in report["install"]]
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


def main(path: str) -> int:
    """Return the exit code: 1 where packages of CUDA would be installed."""
    found = cuda_packages(json.loads(Path(path).read_text(encoding="utf-8")))
    if not found:
        return 0
    sys.stderr.write(ADVICE)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
