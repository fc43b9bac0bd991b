"""Who may act: the token, sessions, forms, origins, names of the server, and floods."""

from __future__ import annotations

import stat
import threading

import pytest
from web_site import BASE, act, agent_status, fields, sign_in

from coordinator.journal.entries import fact_of
from coordinator.views.runs import replay
from coordinator.web.access import WRONG_AT_ONCE, WRONG_EVERY_S, Access, WrongTokens, is_known_host, token_path
from coordinator.web.folder_view import FolderView
from edge_agent.core.errors import StateError

ORIGIN = {"origin": BASE}


@pytest.fixture
def released(site):
    """Two releases, the second one at its canary."""
    run = site.run(1, end="run_finished")
    site.device("c", "a")
    site.release("a", run)
    site.release("b", run, canary="1")
    site.status([agent_status("c", tier="head", bundle_id="a" * 64)])
    return site


def stages(site):
    from coordinator.views.releases import book_of

    return [release.stage for release in book_of(site.folder.journal).releases]


def test_token_is_made_once_for_its_owner_alone(tmp_path):
    first, is_new = Access.of(tmp_path)
    assert is_new
    assert stat.S_IMODE(token_path(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE(token_path(tmp_path).parent.stat().st_mode) == 0o700
    again, is_new = Access.of(tmp_path)
    assert not is_new
    assert again.token == first.token
    assert len(first.token) >= 43, "256 bits"


def test_token_that_is_none_is_refused(tmp_path):
    Access.of(tmp_path)
    token_path(tmp_path).write_text("short\n")
    with pytest.raises(StateError, match="are no token"):
        Access.of(tmp_path)


def test_session_ends_with_its_time_and_with_the_token():
    now = 1000.0
    access = Access("t" * 43, now=lambda: now)
    cookie = access.session()
    assert access.is_session(cookie)
    assert not Access("u" * 43, now=lambda: now).is_session(cookie)
    for other in ("", ".", "x.y.z", cookie[:-1], "9" + cookie, cookie.replace(".", "", 1), cookie + "0", "\u00e9" * 50):
        assert not access.is_session(other)
    now += 12 * 3600 + 1
    assert not access.is_session(cookie)


def test_wrong_tokens_are_limited_for_each_address_and_for_all():
    now = 0.0
    wrong = WrongTokens(clock=lambda: now)
    for _ in range(WRONG_AT_ONCE):
        assert not wrong.are_too_many("1.2.3.4")
        wrong.note("1.2.3.4")
    assert wrong.are_too_many("1.2.3.4")
    assert not wrong.are_too_many("1.2.3.5")
    for number in range(2000):
        wrong.note(f"10.0.0.{number}")
    assert wrong.are_too_many("1.2.3.5"), "however many addresses one has"
    now = WRONG_EVERY_S + 1
    assert not wrong.are_too_many("1.2.3.4")


@pytest.mark.parametrize(
    "header, known",
    [
        ("127.0.0.1:8470", True),
        ("localhost", True),
        ("[::1]:8470", True),
        ("coordinator.example:8470", True),
        ("COORDINATOR.example", True),
        ("attacker.example", False),
        ("127.0.0.1.attacker.example", False),
        ("localhost.attacker.example", False),
        ("", False),
        ("[::1", False),
        ("coordinator.example@attacker.example", False),
        ("x" * 400, False),
    ],
)
def test_server_answers_to_its_own_names_only(header, known):
    assert is_known_host(header, frozenset({"coordinator.example"})) is known


def test_page_of_another_site_that_points_its_name_here_reads_nothing(released):
    with released.client() as client:
        answer = client.get("/", headers={"host": "attacker.example"})
    assert answer.status_code == 421
    assert "agent" not in answer.text


def test_action_needs_a_session(released):
    with released.client() as client:
        answer = client.get("/act?do=promote&number=2")
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=")
        answer = client.post("/act", data={"do": "promote", "number": "2"}, headers=ORIGIN)
        assert answer.status_code == 403
        assert "token" in answer.text
    assert stages(released) == ["everybody", "canary"]


def test_promote_hold_resume_and_roll_back_with_a_session(released):
    with released.client() as client:
        sign_in(client)
        assert act(client, "promote", number=2).headers["location"] == "/releases?number=2"
        assert stages(released) == ["everybody", "everybody"]
        act(client, "hold", number=2, reason="<b>complaints</b>")
        assert stages(released) == ["everybody", "held"]
        assert "&lt;b&gt;complaints" in client.get("/releases").text
        act(client, "resume", number=2)
        act(client, "rollback", number=2, reason="wrong")
        assert stages(released) == ["everybody", "rolled back", "everybody"]
    journal = released.journal.entries(kinds=("release_stage", "release_held", "release_resumed", "release_made"))
    assert all(entry.body["by"].endswith(", web view") for entry in journal[2:])


def test_pin_and_unpin_with_a_session(released):
    with released.client() as client:
        sign_in(client)
        assert act(client, "pin", agent="c").status_code == 400, "a pin needs a reason"
        assert act(client, "pin", agent="c", number="", reason="for the paper").headers["location"] == "/agent?id=c"
        assert "for the paper" in client.get("/agent?id=c").text
        act(client, "unpin", agent="c")
    assert [e.kind for e in released.journal.entries(agent="c")][-2:] == ["device_pinned", "device_unpinned"]


def test_queued_run_is_cancelled_with_a_session(site):
    run = site.journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 3}))
    with site.client() as client:
        sign_in(client)
        assert act(client, "cancel", run=run).headers["location"] == f"/run?id={run}"
        assert "cancelled" in client.get(f"/run?id={run}").text
    assert replay(site.journal, run).status == "cancelled"


@pytest.mark.parametrize(
    "do, given, message",
    [
        ("promote", {"number": 1}, "is at stage"),
        ("promote", {"number": 9}, "no release 9"),
        ("promote", {"number": "x"}, "is no number"),
        ("rollback", {"number": 1}, "is the first of channel"),
        ("pin", {"agent": "<x>", "reason": "y"}, "&lt;x&gt;"),
        ("pin", {"agent": "c", "reason": "y", "until": "soon"}, "not a date or time"),
        ("unpin", {"agent": "c"}, "is not pinned"),
        ("cancel", {"run": "run-0001"}, "finished already"),
        ("cancel", {"run": "../x"}, "unknown run"),
        ("revoke", {"agent": "c"}, "[identity]"),
    ],
)
def test_action_that_is_impossible_says_why_and_changes_nothing(released, do, given, message):
    before = released.journal.last_id()
    with released.client() as client:
        sign_in(client)
        answer = act(client, do, **given)
    assert answer.status_code in {400, 404}
    assert message in answer.text
    assert released.journal.last_id() == before


@pytest.mark.parametrize(
    "changes, headers, status",
    [
        ({"form_token": ""}, ORIGIN, 403),
        ({"form_token": "0" * 64}, ORIGIN, 403),
        ({}, {}, 403),
        ({}, {"origin": "http://attacker.example"}, 403),
        ({}, {"origin": "null"}, 403),
        ({}, {"origin": "http://127.0.0.1:9999"}, 403),
        ({}, {**ORIGIN, "content-type": "text/plain"}, 415),
        ({"reason": "x" * 20_000}, ORIGIN, 413),
        ({str(n): "x" for n in range(30)}, ORIGIN, 400),
    ],
)
def test_form_counts_only_from_a_page_of_this_server_and_session(released, changes, headers, status):
    with released.client() as client:
        sign_in(client)
        form = fields(client.get("/act?do=promote&number=2").text)
        answer = client.post("/act", data={**form, **changes}, headers=headers)
    assert answer.status_code == status
    assert stages(released) == ["everybody", "canary"]


def test_form_of_another_session_does_not_count(released):
    with released.client() as one, released.client() as other:
        sign_in(one)
        sign_in(other)
        form = fields(other.get("/act?do=promote&number=2").text)
        assert one.post("/act", data=form, headers=ORIGIN).status_code == 403
    assert stages(released) == ["everybody", "canary"]


def test_session_is_in_a_cookie_that_scripts_and_other_sites_cannot_use(released):
    with released.client() as client:
        answer = client.post("/login", data={"token": client.token}, headers=ORIGIN)
        cookie = answer.headers["set-cookie"].lower()
        assert {"httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.split(";")}
        assert client.token not in cookie
        assert "Sign out" in client.get("/").text
        form = fields(client.get("/runs").text.partition("</header>")[0])
        client.post("/logout", data=form, headers=ORIGIN)
        assert "Sign out" not in client.get("/").text


def test_signing_out_ends_the_session_for_good(released):
    with released.client() as client:
        sign_in(client)
        form = fields(client.get("/act?do=promote&number=2").text)
        cookies = dict(client.cookies)
        client.post("/logout", data=form, headers=ORIGIN)
        client.cookies.update(cookies)
        assert client.get("/act?do=promote&number=2").status_code == 303
        assert client.post("/act", data=form, headers=ORIGIN).status_code == 403
    with released.client() as client:  # also after a restart of the server
        client.cookies.update(cookies)
        assert client.get("/act?do=promote&number=2").status_code == 303
        sign_in(client)
        assert client.get("/act?do=promote&number=2").status_code == 200
    assert stages(released) == ["everybody", "canary"]


@pytest.mark.parametrize("content", [None, "", "n" * 43])
def test_token_that_is_removed_or_replaced_ends_all_sessions_at_once(released, content):
    with released.client() as client:
        sign_in(client)
        form = fields(client.get("/act?do=promote&number=2").text)
        token_path(released.path).unlink()
        if content is not None:
            token_path(released.path).write_text(content)
        assert client.post("/act", data=form, headers=ORIGIN).status_code == 403
        codes = [
            client.post("/login", data={"token": t}, headers=ORIGIN).status_code for t in (client.token, "", "n" * 43)
        ]
        assert codes == [403, 403, 303 if content else 403]
    assert stages(released) == ["everybody", "canary"]


def test_wrong_tokens_are_slowed_down_and_the_right_one_always_counts(released):
    with released.client() as client:
        codes = [
            client.post("/login", data={"token": "x"}, headers=ORIGIN).status_code for _ in range(WRONG_AT_ONCE + 1)
        ]
        assert codes == [403] * WRONG_AT_ONCE + [429]
        assert client.post("/login", data={"token": client.token}, headers=ORIGIN).status_code == 303
        assert client.get("/").status_code == 200, "looking goes on"


@pytest.mark.parametrize(
    "address", ["//attacker.example", "https://attacker.example", "/\\attacker.example", "/\nx", "x"]
)
def test_sign_in_leads_nowhere_else(released, address):
    with released.client() as client:
        answer = client.post("/login", data={"token": client.token, "next": address}, headers=ORIGIN)
        assert answer.headers["location"] == "/"


def test_nobody_acts_where_the_token_cannot_be_written(released, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    token_path(released.path).unlink(missing_ok=True)
    monkeypatch.setattr("coordinator.web.access.write_private", refuse)
    with released.client() as client:
        assert "Sign in" not in client.get("/").text
        assert client.post("/login", data={"token": "x"}, headers=ORIGIN).status_code == 403
        assert client.post("/act", data={"do": "promote"}, headers=ORIGIN).status_code == 403


def test_token_is_on_no_page_and_in_no_header(released):
    with released.client() as client:
        sign_in(client)
        for path in ("/", "/login", "/releases", "/act?do=promote&number=2", "/nothing"):
            answer = client.get(path)
            assert client.token not in answer.text
            assert client.token not in str(answer.headers)


def test_over_long_address_is_refused(released):
    with released.client() as client:
        assert client.get("/?find=" + "x" * 9000).status_code == 414


def test_what_follows_an_action_waits_for_a_reading_under_way_and_reads_what_it_has_missed(released):
    view = FolderView(released.path)
    view.refresh()
    with view._reading:  # the watcher is in the middle of its look
        released.run(2, end="run_finished")
        assert view.refresh() is False
        waiting = threading.Thread(target=view.refresh, kwargs={"wait": True}, daemon=True)
        waiting.start()
        assert "run-0002" not in view.runs
    waiting.join(30)
    assert "run-0002" in view.runs
