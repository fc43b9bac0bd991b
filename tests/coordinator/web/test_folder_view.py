"""The view of a state folder, as the pages use it in several threads."""

from __future__ import annotations

import threading

from coordinator.state.store import StateFolder
from coordinator.web.folder_view import FolderView


def test_a_view_is_closed_after_the_look_under_way_in_another_thread_and_opens_nothing_again(tmp_path):
    """A connection to SQLite that is closed while another thread reads by it ends the process."""
    with StateFolder(tmp_path).open("test"):
        view = FolderView(tmp_path)
        view.refresh(wait=True)
        begun = threading.Event()
        go_on = threading.Event()
        order = []
        read = view._read_status

        def slow():
            begun.set()
            go_on.wait(60)
            read()
            order.append("read")

        view._read_status = slow
        looking = threading.Thread(target=view.refresh)
        looking.start()
        assert begun.wait(60)
        closing = threading.Thread(target=lambda: (view.close(), order.append("closed")))
        closing.start()
        assert order == []
        go_on.set()
        looking.join(60)
        closing.join(60)
        assert order == ["read", "closed"]
        assert not view.refresh()
        assert not view.folder.journal.is_open
