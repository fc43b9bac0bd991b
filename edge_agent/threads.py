"""How many threads numpy's linear algebra takes: settled before numpy is loaded, for it looks only then.

The matrices of a head are small. On two cores, waiting for one another costs threads ten times the CPU time of the
work itself, and sums that are split in another way end in other bits.
"""

from __future__ import annotations

import os
import sys

_NUMPY = ("OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_WITH_TORCH = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that torch reads as well."""


def limit_threads(threads: int | None = None, *, spare_torch: bool = False) -> None:
    """Set the number of threads that numpy, imported after this call, uses here and in child processes.

    ``threads`` None = one, unless the environment already names a number; 0 = whatever the libraries choose.
    ``spare_torch`` leaves alone the variables that torch reads as well. Where numpy is loaded already it has made its
    choice, and nothing is set.
    """
    if "numpy" in sys.modules:
        return
    names = _NUMPY if spare_torch else (*_NUMPY, *_WITH_TORCH)
    if threads is None:
        threads = 0 if any(name in os.environ for name in (*_NUMPY, *_WITH_TORCH)) else 1
    if threads > 0:
        os.environ.update(dict.fromkeys(names, str(threads)))
