"""``--log wandb``: a run of Weights & Biases, written into a folder and sent nowhere; ``wandb sync`` sends it later.

The target is ``PROJECT`` or ``ENTITY/PROJECT``, default ``headwater``; with ``?mode=online`` behind it the run is sent
while it goes on, which needs an account (``wandb login``), and ``?dir=FOLDER`` says where it is written. Runs of one
parent are a group. A run that is resumed is written again from its first round, into a new folder; that of before gets
the ending ``.superseded``, so that ``wandb sync`` leaves it out. The package's own error reports are off unless the
environment says otherwise. A process of the package writes the folder, and says nothing of a full disk, so what it has
written is read again at the end.
"""

from __future__ import annotations

import importlib
import netrc
import os
import socket
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from edge_agent.core.errors import StateError, UsageError, cause
from edge_agent.core.storage import check_writable, read_regular, write_atomic

from .base import Logger
from .records import RoundResult, RunDescription, RunEnd, clients_table, label_of, short_id
from .wandb_file import read_records

if TYPE_CHECKING:
    import wandb

DEFAULT_PROJECT = "headwater"
MODES = ("offline", "online")
CHECK_LIMIT_S = 5.0
"""How long the check before a run waits for the server."""

ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false"}
"""What the package reads when it is imported: by its own default it reports errors to its makers."""

WRITE_LIMIT_S = 10.0
"""How long the file of an offline run may stay the same before its end is missing: its writer takes 0.3 s."""

LOOK_S = 0.1
"""The seconds between two looks at that file."""

INIT_LIMIT_S = 30.0
"""How long a server may take to open a run."""


class WandbLogger(Logger):
    """A run of Weights & Biases."""

    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    writes_files: ClassVar[bool] = True
    takes_clients: ClassVar[bool] = False

    def __init__(self, target: str = "", folder: Path = Path()) -> None:
        """Only assign; the parameters are those of the contract."""
        super().__init__(target, folder)
        name, _, options = target.partition("?")
        entity, _, project = name.rpartition("/")
        self._entity = entity or None
        self._project = project or DEFAULT_PROJECT
        self._options = urllib.parse.parse_qs(options)
        self._mode = self._options.get("mode", ["offline"])[0]
        chosen = self._options.get("dir", [""])[0]
        self._folder = Path(chosen).expanduser().absolute() if chosen else folder.absolute()
        self._run: wandb.sdk.wandb_run.Run | None = None
        self._place = ""
        self._file = Path()
        """The file of an offline run, once it has begun."""

        self._has_waited = False
        """Whether the end of that file was waited for in vain."""

        self._rounds: set[int] = set()
        """Rounds that the package got."""

    @classmethod
    def absolute_target(cls, target: str, folder: Path) -> str:
        """Return the target with an absolute path of its folder, where it names one."""
        name, _, options = target.partition("?")
        if not options:
            return target
        pairs = dict(urllib.parse.parse_qsl(options))
        if "dir" in pairs:
            pairs["dir"] = str((folder / Path(pairs["dir"]).expanduser()).absolute())
        return f"{name}?{urllib.parse.urlencode(pairs, safe='/')}"

    @property
    def where(self) -> str:
        """The folder of the run, and what sends it."""
        return self._place or str(self._folder)

    def check(self) -> None:
        """Return quietly where the package is installed, the folder writable, and a server reachable if it is needed.

        Raises:
            MissingCapability: The package is not installed.
            UsageError: An option is unknown, the folder cannot be written, or the server cannot be used.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        super().check()
        unknown = sorted(self._options.keys() - {"mode", "dir"})
        if unknown or self._mode not in MODES:
            wrong = ", ".join(unknown) or f"mode={self._mode}"
            raise UsageError(f"--log wandb: {wrong}: expected mode=offline, mode=online or dir=FOLDER")
        check_writable(self._folder)
        if self._mode == "online":
            _check_server()

    def begin(self, run: RunDescription) -> None:
        """Open the run; folders that it had before are set aside."""
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        run_id = short_id(run.uid, 16)
        if self._mode == "offline":
            self._set_aside(run_id)
        # Nothing of this machine and its programs is gathered; what stdout gets is nobody's business either.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            init_timeout=INIT_LIMIT_S,
        )
        group = None
        if run.is_parent:
            group = label_of(run.name, run.uid)
        elif run.parent is not None:
            group = run.parent.label
        self._run = wandb.init(
            entity=self._entity,
            project=self._project,
            dir=str(self._folder),
            id=run_id,
            name=run.name,
            notes=run.note or None,
            tags=[f"{name}={value}"[:64] for name, value in run.tags.items()],
            config=dict(run.params),
            group=group,
            job_type="parent" if run.is_parent else "run",
            mode="online" if self._mode == "online" else "offline",
            resume="allow" if self._mode == "online" else None,
            reinit="create_new",
            settings=settings,
        )
        self._place = str(self._run.settings.sync_dir)
        self._file = Path(self._run.settings.sync_file)
        if self._mode == "offline":
            self._place = f"{self._place} (send it with: wandb sync {self._place})"

    def log_round(self, row: RoundResult) -> None:
        """Add the figures of a round; its number is the step, by which a server that has it drops it."""
        if self._run is not None:
            self._run.log({**row.metrics(), "round": row.round}, step=row.round)
            self._rounds.add(row.round)

    def end(self, end: RunEnd) -> None:
        """Add the final figures, the table of clients and the files of the result, close the run, and check its file.

        Raises:
            StateError: The file of an offline run lacks something.
        """
        if self._run is not None:
            self._finish(self._run, end)
            self._run = None
        if self._mode == "offline":
            self._wait_for_file()

    def _finish(self, run: wandb.sdk.wandb_run.Run, end: RunEnd) -> None:
        """Add what is known at the end, and close the run."""
        import wandb

        run.summary.update({**end.figures, "status": end.status, "reason": end.reason})
        if end.clients:
            columns, rows = clients_table(end)
            run.log({"clients": wandb.Table(columns=[*columns], data=rows)}, step=end.round + 1)
        for name, path in end.artefacts.items():
            if path.exists():
                # A copy: the package would make a link, which leads nowhere once the folder of the simulation is gone.
                copy = Path(run.dir) / name
                write_atomic(copy, read_regular(path))
                run.save(str(copy), base_path=run.dir, policy="now")
        run.finish(exit_code=0 if end.status == "finished" else 1)

    def _wait_for_file(self) -> None:
        """Wait until the file of the run is whole: its writer goes on after the package has said that it is closed.

        Raises:
            StateError: It is not, and has not grown for `WRITE_LIMIT_S`, or had not when this was called before.
        """
        size = -1
        grown_at = time.monotonic()
        while True:
            try:
                self._check_file()
            except StateError:
                size_now = self._file.stat().st_size if self._file.exists() else 0
                if size_now > size:
                    size = size_now
                    grown_at = time.monotonic()
                if self._has_waited or time.monotonic() - grown_at >= WRITE_LIMIT_S:
                    self._has_waited = True
                    raise
                time.sleep(LOOK_S)
            else:
                return

    def _check_file(self) -> None:
        """Return quietly where the file of the run has all its rounds and its end.

        Raises:
            StateError: It has not, because the disk is full for example.
        """
        # The module takes its names from another one, by the version of a third; type checkers see none of them.
        record_class = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
        rounds = 0
        has_end = False
        try:
            for content in read_records(self._file):
                record = record_class.FromString(content)
                rounds += int(record.HasField("history"))
                has_end = record.HasField("exit")
        except (OSError, StateError) as error:
            raise StateError(f"{cause(error)}; make room on the disk, and log the run again") from error
        if rounds < len(self._rounds) or not has_end:
            raise StateError(
                f"{self._file} has {rounds} of {len(self._rounds)} rounds, expected all and the end; make room on the "
                "disk, and log the run again"
            )

    def _set_aside(self, run_id: str) -> None:
        """Rename the folders that an earlier process has written of this run."""
        for folder in (self._folder / "wandb").glob(f"offline-run-*-{run_id}"):
            folder.rename(folder.with_name(f"{folder.name}.superseded"))


def _check_server() -> None:
    """Return quietly where there is a key for the server, and it can be reached.

    Raises:
        UsageError: There is none, or it cannot.
    """
    import wandb

    settings = wandb.setup().settings
    address = urllib.parse.urlsplit(str(settings.base_url))
    host = str(address.hostname)
    port = address.port or (443 if address.scheme == "https" else 80)
    later = "log without sending now (--log wandb), and send the run later with 'wandb sync'"
    # Without a key the package would ask for one at the terminal, or fail once the run has begun.
    if not settings.api_key and not _has_netrc_entry(host):
        raise UsageError(f"--log wandb: there is no key for {host}; run 'wandb login', or {later}")
    try:
        socket.create_connection((host, port), timeout=CHECK_LIMIT_S).close()
    except OSError as error:
        raise UsageError(f"--log wandb: {host} cannot be reached ({cause(error)}); {later}") from error


def _has_netrc_entry(host: str) -> bool:
    """Return whether the user's file of logins, where ``wandb login`` puts the key, has one for a host."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
