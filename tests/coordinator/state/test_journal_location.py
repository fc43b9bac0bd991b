"""The journal of a state folder in a database: a new one, one that is carried over, and databases of others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from coordinator.config import load_config
from coordinator.journal.entries import RunRequested, UpdateAccepted
from coordinator.journal.postgres import PostgresJournal
from coordinator.journal.schemes import STORES, mistakes_in
from coordinator.journal.sqlite import SqliteJournal
from coordinator.state import journal_location
from coordinator.state.backup import back_up
from coordinator.state.journal_location import BEGUN, MOVED, NAME, has_journal, read_location, use_database
from coordinator.state.store import StateFolder
from edge_agent.core.errors import ConfigError, JournalAway, StateError


@pytest.fixture
def url(postgres):
    return postgres.database()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def request_run(folder):
    with StateFolder(folder).look(create=True) as state:
        return state.journal.request_run(RunRequested(method="fedavg"))


def test_a_new_folder_gets_an_empty_database_and_all_commands_follow_the_folder(folder, url):
    assert not has_journal(folder)
    use_database(folder, url)
    assert request_run(folder) == "run-0001"
    assert not (folder / "journal.db").exists()
    assert has_journal(folder)
    use_database(folder, url)
    use_database(folder, None)
    with StateFolder(folder).open("me") as state:
        assert state.journal.runs() == ["run-0001"]
        assert state.journal.location.startswith("postgresql://headwater@127.0.0.1:")
    assert (folder / NAME).stat().st_mode & 0o077 == 0


def test_without_a_database_nothing_changes(folder):
    use_database(folder, None)
    request_run(folder)
    assert (folder / "journal.db").is_file()
    assert read_location(folder) is None


def test_a_journal_of_sqlite_is_carried_over_once(folder, url):
    request_run(folder)
    with SqliteJournal(folder / "journal.db") as journal:
        entries = journal.entries()
    use_database(folder, url)
    assert (folder / MOVED).is_file()
    assert not (folder / "journal.db").exists()
    with StateFolder(folder).look() as state:
        assert state.journal.entries() == entries
    assert request_run(folder) == "run-0002"


@pytest.mark.parametrize("call", ["open", "fill", "closed"])
def test_a_move_that_was_killed_is_completed(folder, url, call, monkeypatch):
    request_run(folder)
    with monkeypatch.context() as patch:
        if call == "closed":  # everything is there, and the folder does not know of it
            patch.setattr(Path, "replace", lambda *_: exit_now())
        else:
            patch.setattr(PostgresJournal, call, lambda *_, **__: exit_now())
        with pytest.raises(KeyboardInterrupt):
            use_database(folder, url)
    assert read_location(folder) is None
    assert (folder / "journal.db").is_file()
    use_database(folder, url)
    assert request_run(folder) == "run-0002"


def test_a_move_whose_database_has_kept_nothing_leaves_the_old_journal(folder, url, monkeypatch):
    request_run(folder)
    with monkeypatch.context() as patch:
        patch.setattr(PostgresJournal, "fill", lambda *_: 0)
        with pytest.raises(StateError, match=r"has 0 entries, and .* has 1 others"):
            use_database(folder, url)
    assert (folder / "journal.db").is_file()
    use_database(folder, url)
    assert request_run(folder) == "run-0002"


def test_the_move_is_on_disk_before_the_old_journal_goes(folder, url, monkeypatch):
    """A power cut after the first new entry would else have brought the old journal back, beside other entries."""
    request_run(folder)
    steps = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (steps.append(to.name), replace(path, to))[1])
    monkeypatch.setattr(journal_location, "sync_folder", lambda path: steps.append(f"sync {path.name}"))
    use_database(folder, url)
    moved = steps.index(NAME)
    assert steps[moved:] == [NAME, f"sync {folder.name}", MOVED]


def exit_now():
    raise KeyboardInterrupt


def test_nothing_is_carried_over_while_a_coordinator_works(folder, url):
    with StateFolder(folder).open("headwater serve"), pytest.raises(StateError, match="in use by headwater serve"):
        use_database(folder, url)
    assert read_location(folder) is None


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
def test_the_database_of_another_folder_is_refused(folder, tmp_path, url, has_own, is_begun):
    """As where two coordinators are given one database, and each a folder of its own machine."""
    use_database(folder, url)
    if is_begun:
        request_run(folder)
    other = tmp_path / "other"
    if has_own:
        request_run(other)
    for _ in range(2):
        with pytest.raises(StateError, match="of another state folder"):
            use_database(other, url)
    assert read_location(other) is None
    assert request_run(folder) == ("run-0002" if is_begun else "run-0001")


def test_other_entries_than_those_of_the_folder_are_kept(folder, url):
    """As where the old journal was put back, and continued, after a move that was killed."""
    request_run(folder)
    kept = (folder / "journal.db").read_bytes()
    use_database(folder, url)
    request_run(folder)
    (folder / NAME).rename(folder / BEGUN)
    (folder / "journal.db").write_bytes(kept)
    with pytest.raises(StateError, match=r"has 2 entries, and .* has 1 others"):
        use_database(folder, url)


def test_a_database_at_another_address_must_be_the_same(folder, url, postgres):
    use_database(folder, url)
    request_run(folder)
    with pytest.raises(StateError, match="no journal here"):
        use_database(folder, postgres.database())
    moved = url.replace("127.0.0.1", "localhost")
    use_database(folder, moved)
    assert read_location(folder).url == moved
    assert request_run(folder) == "run-0002"


def test_a_damaged_location_and_a_database_that_is_away_are_named(folder, url):
    use_database(folder, url)
    content = json.loads((folder / NAME).read_text())
    for damaged in ({}, {**content, "id": 7}, {**content, "url": "file:///etc/passwd"}):
        (folder / NAME).write_text(json.dumps(damaged))
        with pytest.raises(StateError, match=r"journal.json: damaged"):
            StateFolder(folder)
    (folder / NAME).unlink()
    with pytest.raises(JournalAway):
        use_database(folder, "postgresql://127.0.0.1:9/x")
    assert read_location(folder) is None


def test_a_backup_is_a_state_folder_with_a_journal_of_its_own(folder, tmp_path, url, postgres):
    use_database(folder, url)
    request_run(folder)
    with StateFolder(folder).open("me") as state:
        digest = state.blobs.put(b"weights")
        state.journal.append(UpdateAccepted(), run="run-0001", round=1, agent="a", digest=digest)
        assert back_up(state, tmp_path / "copy").entries == 2
        entries = state.journal.entries()
        assert back_up(state, tmp_path / "copy").copied_bytes == 0, "it is brought up to date"
    with StateFolder(tmp_path / "copy").look() as copy:
        assert copy.journal.entries() == entries
    # To restore: the copy, and an empty database.
    use_database(tmp_path / "copy", postgres.database())
    with StateFolder(tmp_path / "copy").look() as copy:
        assert copy.journal.entries() == entries


# --- the configuration ---

CONFIG = """
[task]
class_names = ["a", "b"]
encoder = "linear"
input = { kind = "image", channels = 1, height = 8, width = 8 }
"""


@pytest.mark.parametrize(
    "url, said",
    [
        ("postgresql://a:secret@db/x", "holds a password"),
        ("postgresql://a@db/x?password=secret", "holds a password"),
        ("mysql://a@db/x", "has the scheme 'mysql'"),
        ("postgresql://a@db", "names no database"),
        ("postgresql://[::1/x", "is no URL"),
        ("state.db", "has the scheme ''"),
    ],
)
def test_a_url_that_names_no_database_or_holds_a_password_is_a_mistake(tmp_path, url, said):
    (tmp_path / "coordinator.toml").write_text(f"journal = {json.dumps(url)}\n{CONFIG}")
    with pytest.raises(ConfigError, match=said) as raised:
        load_config(tmp_path / "coordinator.toml")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("scheme", STORES)
def test_a_database_of_each_scheme_can_be_named(tmp_path, scheme):
    url = f"{scheme}://coordinator@one:5432,two/headwater?passfile=/etc/headwater/passfile"
    assert mistakes_in(url) == []
    (tmp_path / "coordinator.toml").write_text(f"journal = {json.dumps(url)}\n{CONFIG}")
    config = load_config(tmp_path / "coordinator.toml")
    assert config.journal == url
    assert "journal" not in config.digests()


def test_doctor_looks_at_the_database_without_making_tables(tmp_path, call, url, postgres):
    config = tmp_path / "coordinator.toml"
    config.write_text(f"journal = {json.dumps(url)}\n{CONFIG}")

    def checked(code):
        actual, out, _ = call("doctor", "--config", config, "--json")
        assert actual == code, out
        return json.loads(out)

    new = checked(0)
    assert "no journal yet: 'headwater serve' makes it" in new["journal"]["detail"]
    assert any("fsync = off" in line for line in new["advice"]), "the server of the tests has it off"
    assert postgres.query("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'headwater%%'", url=url) == [(0,)]
    use_database(tmp_path / "state", url)
    request_run(tmp_path / "state")
    assert checked(0)["journal"]["detail"].endswith("with 1 entries; nobody serves")
    with StateFolder(tmp_path / "state").open("headwater serve"):
        assert "; headwater serve (host " in checked(0)["journal"]["detail"]
    # A folder without a journal does not get that of another one: 'serve' would say the same.
    config.write_text(f'state = "elsewhere"\njournal = {json.dumps(url)}\n{CONFIG}')
    refused = checked(1)["journal"]
    assert re.search(r"of another state folder, and .*elsewhere has no journal yet", refused["detail"])
    assert not (tmp_path / "elsewhere").exists()
    config.write_text(f"journal = {json.dumps(postgres.url('nowhere'))}\n{CONFIG}")
    refused = checked(75)["journal"]
    assert not refused["ok"]
    assert 'database "nowhere" does not exist' in refused["detail"]
