"""The coordinator's program with the next version of the wire protocol: ``python next_protocol.py serve ...``.

Two commands have one more field there, which is always sent to those who know it. Agents beside it are of this version.
"""

from __future__ import annotations

import importlib.machinery
import sys
from importlib.abc import MetaPathFinder

MODULE = "edge_agent.wire.messages"
KINDS = ("job", "receipt")
FIELD = """\
    colour: str = Field(
        default_factory=lambda: "red", description="of version 5", json_schema_extra={"since": 5}
    )
"""


class _NextVersion(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        return compile(changed(self.get_source(fullname)), self.path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is not None:
            spec.loader = _NextVersion(name, spec.origin)
        return spec


def changed(source):
    """The module of messages as its next version may look."""
    assert source.count("\nPROTOCOL = 4\n") == 1
    source = source.replace("\nPROTOCOL = 4\n", "\nPROTOCOL = 5\n")
    for kind in KINDS:
        line = f'    type: Literal["{kind}"] = "{kind}"\n'
        assert source.count(line) == 1
        source = source.replace(line, line + FIELD)
    return source


if __name__ == "__main__":
    sys.meta_path.insert(0, _Finder())
    from coordinator.cli import main
    from edge_agent.wire.messages import down, fields

    assert (fields.PROTOCOL, fields.OLDEST_PROTOCOL, "colour" in down.Job.model_fields) == (5, 3, True)
    main()
