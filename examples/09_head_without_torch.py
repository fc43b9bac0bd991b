"""A personal head fitted and used without torch, on the bundle of 08: python examples/09_head_without_torch.py."""

import sys

from edge_agent import Personalizer

bundle = sys.argv[1] if len(sys.argv) > 1 else "notebook/encoder.hwb"
personalizer = Personalizer.open(bundle).fit("digits:optdigits?n=300", head="lr")
print(personalizer.evaluate("digits:optdigits?n=200&seed=1"), personalizer.predict("digits:optdigits?n=5&seed=2"))
personalizer.save("notebook/head")
