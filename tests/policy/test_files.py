"""Files that the three packages remove, rename or read: each place is in a table here, with what makes it safe."""

from __future__ import annotations

import ast
from collections import Counter

from syntax import dotted

REMOVING_METHODS = {"unlink", "rmdir", "rename", "truncate", "ftruncate"}
"""Methods of paths and files, and functions of ``os``, by which something goes, or gets another name."""

REMOVING_FUNCTIONS = {
    *("os.remove", "os.removedirs", "os.renames", "os.replace", "shutil.rmtree", "shutil.move"),
    *("tempfile.TemporaryDirectory", "tempfile.NamedTemporaryFile", "tempfile.mkdtemp", "tempfile.TemporaryFile"),
}

NAMES_HANDED_ON = {*REMOVING_FUNCTIONS, "RotatingFileHandler"}
"""What counts where it is named without being called."""

CHILD_FILES = "a temporary folder of this process alone, made by `tempfile`"
STATE_FILE = "a file of a fixed name in the program's own folder"

REMOVALS = {
    # --- sockets and copies of serving
    ("edge_agent.serving.http_api.server", "HttpServer._remove_own_socket", ".unlink"): (
        "the socket that this server made, by its inode"
    ),
    ("edge_agent.serving.http_api.server", "_remove_old_socket", ".unlink"): (
        "a socket that nobody listens at any more, at the path where one is to be"
    ),
    ("edge_agent.serving.inputs", "_as_file", "tempfile.NamedTemporaryFile"): "a file of its own, made for one input",
    # --- folders with what is in them: by `own_folders.remove_folder` alone, which looks at their mark
    ("edge_agent.core.own_folders", "remove_folder", "os.rmdir"): (
        "the folder that was opened, marked and emptied; no link"
    ),
    ("edge_agent.core.own_folders", "remove_folder", "shutil.rmtree"): (
        "the same on Windows, whose rmtree follows no link"
    ),
    (
        "edge_agent.core.own_folders",
        "_remove_below",
        "os.unlink",
    ): "below the opened folder, by descriptors; links go, not targets",
    ("edge_agent.core.own_folders", "_remove_below", "os.rmdir"): (
        "below the opened folder, by descriptors; no other mount"
    ),
    ("coordinator.research.compare.simulated_runs", "forget_method", "remove_folder"): "its simulations, by their mark",
    ("coordinator.research.compare.simulated_runs", "forget_method", ".unlink"): "their outcomes, by their names",
    ("coordinator.rounds.server_side", "OwnFunctions.next_state", "remove_folder"): "answers, by their mark",
    ("coordinator.loggers.log_files", "LineFile.append", ".truncate"): "its own file, behind the last whole batch",
    ("coordinator.loggers.wandb_log", "WandbLogger._set_aside", ".rename"): "folders of the very run, by its id",
    ("coordinator.aggregators.open_round", "write_round", ".unlink"): "files of earlier rounds, by their names",
    ("coordinator.aggregators.remote", "RemoteAggregators._remove_partial", ".rmdir"): "empty folders of uploads",
    ("coordinator.aggregators.requests", "PassFiles.remove", ".unlink"): "a request and its answer, by their number",
    ("coordinator.aggregators.requests", "PassFiles.remove_others", ".unlink"): "requests and answers, by their names",
    ("edge_agent.run_folder.layout", "remove_ended_runs", "remove_folder"): "folders of runs, by their mark",
    ("edge_agent.run_folder.layout", "remove_all_runs", "remove_folder"): "folders of runs, by their mark",
    ("edge_agent.agent.release_record", "clean", "remove_folder"): "the folder of a candidate, by its mark",
    ("edge_agent.bundle.unpacked", "unpack", "remove_folder"): "the new folder that was just marked, of a random name",
    (
        "edge_agent.bundle.installed",
        "staged",
        "remove_folder",
    ): "a damaged bundle, by its mark; otherwise the new one goes beside it",
    ("edge_agent.bundle.installed", "remove_unused", "remove_folder"): "bundles that are not kept, by their mark",
    ("coordinator.api", "_temporary_run", "remove_folder"): "the temporary folder of this call, by its mark",
    (
        "coordinator.cli.demo",
        "_make_demo_folder",
        "remove_folder",
    ): "an earlier demo, by its mark, with nothing else in it",
    ("coordinator.research.reproduce.cells", "Cell.forgive", "remove_folder"): "a simulation to restart, by its mark",
    ("coordinator.research.compare.simulated_runs", "forget", "remove_folder"): "a trial that is over, by its mark",
    ("coordinator.rounds.server_side", "OwnFunctions._answers", "remove_folder"): "answers of one call, by their mark",
    ("coordinator.state.backup", "back_up", "remove_folder"): "links of one backup in the state folder, by their mark",
    ("coordinator.state.backup", "_pin", "remove_folder"): "links of one backup in the state folder, by their mark",
    (
        "coordinator.blobs.object_store",
        "ServedFolder.remove",
        ".unlink",
    ): "a file that this program has put there, named by a SHA-256",
    ("coordinator.aggregators.sites", "RemoteSites.start", ".unlink"): "a sum that was being checked, by its name",
    ("coordinator.aggregators.sites", "RemoteSites._take", ".replace"): "a sum that has arrived becomes a blob",
    ("coordinator.aggregators.sites", "RemoteSites._finish", ".unlink"): "a sum that has arrived, by its SHA-256",
    ("edge_agent.relay.update_files", "UpdateFiles.remove", ".unlink"): "an update of the open round, by its SHA-256",
    (
        "edge_agent.relay.update_files",
        "UpdateFiles.keep_only",
        ".unlink",
    ): "updates and sums of rounds that are over, by names",
    ("edge_agent.relay.update_files", "UpdateFiles._remove_empty", ".rmdir"): "an empty folder of an upload",
    (
        "edge_agent.relay.members",
        "Members.gone",
        ".unlink",
    ): "the file of an agent's hello, by the agent's checked name",
    # --- empty folders
    ("edge_agent.core.storage", "check_writable", ".rmdir"): (
        "only folders that this call has made; rmdir takes empty ones"
    ),
    (
        "coordinator.cli.init",
        "_put_back_on_error",
        ".rmdir",
    ): "only the folder that this call has made; rmdir takes empty ones",
    (
        "coordinator.state.journal_location",
        "_begin",
        ".replace",
    ): "the folder's own journal, after all of its entries are in the database",
    ("coordinator.state.store", "BlobStore.sweep", ".rmdir"): "empty folders of uploads in the state folder",
    # --- temporary folders and files
    ("edge_agent.heads.svm", "_fit_in_child", "tempfile.TemporaryDirectory"): CHILD_FILES,
    ("edge_agent.core.children", "answer_of_watched", "tempfile.TemporaryFile"): "a file without a name",
    ("export.quantize", "Quantizer.__init__", "tempfile.TemporaryDirectory"): CHILD_FILES,
    ("coordinator.api", "_temporary_run", "tempfile.mkdtemp"): "made here and marked; `remove_folder` removes it",
    ("coordinator.broker", "MosquittoBroker", "tempfile.TemporaryDirectory"): "the type of the next one",
    ("coordinator.broker", "MosquittoBroker.start", "tempfile.TemporaryDirectory"): CHILD_FILES,
    ("coordinator.processes.cluster", "connect_to_cluster", "tempfile.TemporaryDirectory"): CHILD_FILES,
    ("coordinator.processes.pipe", "SharedBuffer.of", "tempfile.TemporaryFile"): "a file without a name",
    ("edge_agent.core.large_arrays", "new_array", "tempfile.TemporaryFile"): "a file without a name",
    ("edge_agent.core.large_arrays", "reserve", ".truncate"): "the same file, which is new, and made longer",
    ("coordinator.research.analyze.targets", "_open_bundle", "tempfile.TemporaryDirectory"): CHILD_FILES,
    ("coordinator.research.bench.measuring", "scratch", "tempfile.TemporaryDirectory"): CHILD_FILES,
    ("coordinator.simulation.engines.kept_workers", "KeptWorkers.__init__", "tempfile.TemporaryDirectory"): (
        "the type of the next one"
    ),
    ("coordinator.simulation.engines.kept_workers", "_end_all", "tempfile.TemporaryDirectory"): (
        "the type of the same object"
    ),
    ("coordinator.simulation.engines.kept_workers", "KeptWorkers.take", "tempfile.TemporaryDirectory"): (
        "the logs of worker processes"
    ),
    ("coordinator.state.release_keys", "file_to_release", "tempfile.TemporaryDirectory"): CHILD_FILES,
    # --- files that are replaced as a whole
    ("edge_agent.core.storage", "write_atomic", ".replace"): (
        "a file of a random name takes the place of the one to write"
    ),
    ("edge_agent.core.storage", "write_atomic", ".unlink"): "that file of a random name, where writing failed",
    ("edge_agent.core.storage", "check_writable", ".unlink"): "a file of a random name that this call has made",
    (
        "edge_agent.core.storage",
        "sweep",
        ".unlink",
    ): "whole names of those random files, in a folder whose lock is held; no links",
    (
        "edge_agent.core.locks",
        "shared_folder_lock",
        ".truncate",
    ): "the lock: a regular file with one name, opened without links",
    ("edge_agent.core.locks", "remove_lock", ".unlink"): "the lock, where it is that of the holder that was named",
    ("edge_agent.bundle.unpacked", "unpack", ".rename"): "the new folder of a random name, to a name that is free",
    (
        "edge_agent.personal.encoder",
        "_mapped",
        ".replace",
    ): "a file of this process's number takes the place of the converted one",
    (
        "edge_agent.personal.encoder",
        "_mapped",
        ".unlink",
    ): "that file, and older converted ones, in the folder `.made` of a bundle",
    (
        "edge_agent.wire.blobs.chunks",
        "Incoming.__init__",
        "os.ftruncate",
    ): "the partial file of a blob, named by its SHA-256",
    ("edge_agent.wire.blobs.chunks", "Incoming.finish", ".replace"): "the partial file becomes the blob of its SHA-256",
    ("edge_agent.wire.blobs.chunks", "Incoming.finish", ".unlink"): "the notes beside that partial file",
    (
        "edge_agent.wire.blobs.chunks",
        "Incoming.discard",
        ".unlink",
    ): "the partial file of a blob and its notes, by SHA-256",
    (
        "edge_agent.wire.blobs.chunks",
        "Incoming._resume",
        ".unlink",
    ): "the partial file of a blob and its notes, by SHA-256",
    (
        "edge_agent.wire.blobs.chunks",
        "BlobCache.read",
        ".unlink",
    ): "a blob of the cache, by its SHA-256, which it does not have",
    (
        "edge_agent.wire.blobs.chunks",
        "_remove_file",
        ".unlink",
    ): "blobs of the cache, by whole names of 64 hexadecimal digits",
    ("coordinator.fleet.uploads", "remove_partial", ".unlink"): "partial uploads in the blob store, by whole names",
    ("coordinator.fleet.uploads", "Collector._finish", ".unlink"): "the upload that has just arrived and is rejected",
    ("coordinator.fleet.uploads", "Collector._on_judged", ".unlink"): "the upload that has arrived and is rejected",
    ("coordinator.fleet.uploads", "Collector._accept", ".replace"): "the upload becomes the blob of its SHA-256",
    ("coordinator.state.fault_log", "FaultLog.note", ".replace"): STATE_FILE,
    # --- files of a state folder
    (
        "edge_agent.agent.head_tier",
        "_remove_taken_in",
        ".unlink",
    ): "the owner's files in [data] watch, which says that they go",
    ("edge_agent.agent.health", "try_disk", ".unlink"): STATE_FILE,
    ("edge_agent.agent.local_state", "make_room", ".unlink"): "cached features in the state folder, by whole names",
    ("edge_agent.run_folder.receipts", "note_receipt", ".truncate"): "the line that this call could not write whole",
    (
        "edge_agent.run_folder.client_state",
        "ClientStateFiles.write",
        ".unlink",
    ): "states of other rounds, named by their number",
    ("edge_agent.run_folder.client_state", "ClientStateFiles.remove", ".unlink"): "the state of a round, by its number",
    ("edge_agent.run_folder.checkpoint", "TrainingCheckpointFile.remove", ".unlink"): STATE_FILE,
    ("edge_agent.agent.release_record", "ReleaseRecord.pin", ".unlink"): STATE_FILE,
    ("edge_agent.agent.release_record", "WaitFile.remove", ".unlink"): STATE_FILE,
    ("edge_agent.agent.transfers", "Outbox.get", ".unlink"): STATE_FILE,
    ("edge_agent.agent.transfers", "Outbox.forget", ".unlink"): "the note, and the update named by its SHA-256",
    ("edge_agent.agent.transfers", "Outbox._remove_all_but", ".unlink"): "updates in the outbox, by whole names",
    (
        "edge_agent.data.collected",
        "Collection._write",
        ".unlink",
    ): "samples that the index does not name, by whole names",
    ("edge_agent.personal.encoder", "features_of", ".unlink"): "cached features, by whole names",
    ("edge_agent.personal.encoder", "remove_features", ".unlink"): "cached features, by whole names",
    ("edge_agent.personal.encoder", "trim_features", ".unlink"): "cached features, by whole names",
    ("edge_agent.heads.saved", "_replace", ".unlink"): "arrays of heads, by whole names with the hash of their content",
    ("edge_agent.identity.certificates", "IdentityFolder.install", ".unlink"): STATE_FILE,
    ("edge_agent.identity.certificates", "enroll", ".unlink"): (
        "the key that this call has made, where nothing was certified"
    ),
    ("edge_agent.cli.collect", "classes", ".rename"): "no file: a class of the collection gets another name",
    (
        "coordinator.cli.init",
        "_put_back_on_error",
        ".unlink",
    ): "the configuration that this call has made, where the rest failed",
    (
        "coordinator.hosted.spread",
        "other_processes",
        ".unlink",
    ): "the file at which processes meet, named by this one's id",
    ("coordinator.hosted.run_hooks", "OwnDataHooks.after_round", ".unlink"): STATE_FILE,
    ("coordinator.hosted.run_hooks", "OwnDataHooks._warm", ".unlink"): STATE_FILE,
    ("coordinator.hosted.run_hooks", "_remove", ".unlink"): "states that wait for an evaluation, by whole names",
    (
        "coordinator.identity.serving",
        "IdentityService._end_sessions",
        ".unlink",
    ): "the certificate that this call has made",
    ("coordinator.research.reproduce.cells", "Cell.forgive", ".unlink"): STATE_FILE,
    (
        "coordinator.runs.release",
        "release_during_run",
        ".unlink",
    ): "bundles of earlier rounds of this run, by whole names",
    ("coordinator.service.coordinator", "Coordinator._advance", ".unlink"): "the marker of a backup that serves now",
    ("coordinator.state.backup", "_link_below", ".unlink"): "a link below the marked folder of links of one backup",
    ("coordinator.state.backup", "_copy", ".unlink"): "files below a folder whose marker names this journal; no links",
    (
        "coordinator.state.release_keys",
        "ReleaseKeys.accept",
        ".unlink",
    ): "key files of fixed names that sign nothing any more",
    ("coordinator.state.release_keys", "ReleaseKeys._take_next", ".replace"): STATE_FILE,
    (
        "coordinator.state.retention",
        "prune_runs",
        ".unlink",
    ): "blobs that the journal names, and bundles by whole names",
    ("coordinator.state.store", "BlobStore.remove", ".unlink"): "blobs of the store, by their SHA-256",
    ("coordinator.state.store", "RunFolder.append_metrics", ".truncate"): "the line that a crash has torn",
    ("coordinator.state.store", "sweep", ".unlink"): "whole names of random files that were left by a kill",
    ("coordinator.state.log_file", "_Lines", "RotatingFileHandler"): "log.jsonl and log.jsonl.1 of the state folder",
}
"""(module, function, what removes or renames) -> why nothing goes there that this program has not made."""

READS = {
    ("edge_agent.core.installation", "read_text"): "metadata of the installed package",
    ("edge_agent.core.limits", "read_text"): "files of the system below /proc and /sys",
    ("coordinator.simulation.memory_plan", "read_text"): "files of the system below /proc",
    ("coordinator.simulation.memory_watch", "read_text"): "files of the system below /proc",
    ("edge_agent.core.own_folders", "read_text"): "the system's note about a descriptor, below /proc",
    ("edge_agent.core.storage", "open"): "`open_regular` itself, on Windows, and a file of a random name",
    ("edge_agent.core.own_folders", "read_bytes"): "a mark, on Windows",
    ("edge_agent.serving.sources.samples", "open"): "a pipe or a serial device that a person named, in its own thread",
    ("edge_agent.agent.own_method", "read_bytes"): "the source of an imported module",
    ("edge_agent.agent.release_record", "read_text"): "the system's boot id",
    ("edge_agent.agent.candidate", "read_text"): "files of the system below /proc",
    ("edge_agent.privacy.disclosure", "read_text"): "the source of an imported module",
    ("edge_agent.core.capabilities", "read_text"): "files of the system below /proc and /sys",
    ("coordinator.research.bench.device_child", "read_text"): "files of the system below /proc",
    ("coordinator.research.bench.simulate", "read_text"): "files of the system below /proc",
    ("coordinator.research.bench.measuring", "read_text"): "files of the system below /proc",
    ("coordinator.web.pages", "read_bytes"): "a file of the installed package",
    ("coordinator.web.asset_files", "read_bytes"): "files of the installed package",
    ("coordinator.report.page", "read_text"): "a file of the installed package",
    ("coordinator.report.charts", "read_text"): "files of the installed package",
    ("coordinator.report.charts", "read_bytes"): "files of the installed package",
    ("coordinator.cli.methods", "read_bytes"): "a file of the installed package",
}
"""(module, method of a path) -> why no FIFO can be there; all other reads go by `storage.open_regular`."""


def _places(source):
    """Yield (function, what) of each place that removes or renames: calls, and names that are handed on."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            inside = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = [*function, child.name]
            if isinstance(child, ast.Call):
                called = _removes(child)
                if called:
                    yield ".".join(inside), called
            elif dotted(child) in NAMES_HANDED_ON and not isinstance(node, ast.Call | ast.ImportFrom):
                yield ".".join(inside), dotted(child)
            yield from visit(child, inside)

    yield from visit(source.tree, [])


def _removes(call):
    """Return what a call removes or renames by; None where it does neither."""
    name = dotted(call.func)
    if name in REMOVING_FUNCTIONS or name == "remove_folder":
        return name
    if not isinstance(call.func, ast.Attribute):
        return None
    is_replacement = call.func.attr == "replace" and len(call.args) == 1 and not call.keywords  # that of a text has two
    if call.func.attr in REMOVING_METHODS or is_replacement:
        return name if name.startswith("os.") else f".{call.func.attr}"
    return None


def test_each_place_that_removes_or_renames_says_why_it_takes_only_what_is_ours(sources):
    found = Counter((source.name, *place) for source in sources for place in _places(source))
    assert sorted(set(found) - set(REMOVALS)) == [], "add it to REMOVALS, with its guard"
    assert sorted(set(REMOVALS) - set(found)) == [], "it is gone: remove the line"


def test_files_are_read_by_the_functions_that_never_wait_for_a_fifo(sources):
    found = set()
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            opens_to_read = node.func.attr == "open" and _mode_of(node) in READING_MODES and _is_path(node)
            if node.func.attr in {"read_bytes", "read_text"} or opens_to_read:
                found.add((source.name, node.func.attr))
    assert sorted(found - set(READS)) == [], "use storage.read_regular, read_regular_text or open_regular"
    assert sorted(set(READS) - found) == [], "it is gone: remove the line"


READING_MODES = {"r", "rb"}


def _mode_of(call):
    """Return the mode that a call of ``open`` names first, as text; ``r`` where it names nothing."""
    if not call.args:
        return "r"
    return ast.unparse(call.args[0]).strip("'")


def _is_path(call):
    """Whether the receiver of ``open`` is called as a path; stores and journals have a method ``open``, too."""
    return ast.unparse(call.func.value).lower().endswith(("path", "file"))
