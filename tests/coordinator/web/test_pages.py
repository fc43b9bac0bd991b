"""Every page, with data and without, and whatever agents and addresses hold."""

from __future__ import annotations

import contextlib
import json
import random
import re
from datetime import datetime, timedelta, timezone

import pytest
from web_site import agent_status, round_line

from coordinator.cli import main
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.views.releases import AUTOMATIC
from coordinator.web import pages
from coordinator.web.folder_view import FolderView

PAGES = ("/", "/runs", "/compare", "/releases", "/bundles", "/methods", "/login")
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; DROP TABLE agents; --",
    "../../../etc/passwd",
    "{{ 7 * 7 }}",
    "a\u202eb\u0000c\nd",
    "\ud800",
    "x" * 20_000,
    "</script><script>alert(2)</script>",
)


@pytest.fixture
def populated(site):
    """A federation with two runs, two releases, and agents of all states."""
    run = site.run(4, ("a", "b"), end="run_finished")
    site.report(run, "a", 0.5, 0.6, 0.75)
    site.report(run, "b", 0.8, 0.6, 0.7, better_alone=True)
    site.device("c", "a", 1, "ok", reason="", acc=0.66, before=0.6, support=40)
    site.release("a")
    site.release("b", canary="1", max_failed="1")
    site.device("d", "a", 2, "failed", reason="self-test", acc=None, before=None, support=0)
    site.journal.append(
        fact_of("device_pinned", {"release": 1, "reason": "for the paper", "until": "", "by": "ann"}),
        agent="c",
    )
    live = site.run(2, ("b",))
    fault = {"error": "DataError", "message": "no class folders", "remedy": "make one folder for each class", "at": ""}
    agents = [
        agent_status("a"),
        agent_status("b", condition="fault", fault=fault),
        agent_status("c", tier="head", bundle_id="a" * 64, notes=["rolled back the encoder"]),
        agent_status("d", tier="head", present=False, software="0.0.9"),
    ]
    now = {"id": live, "method": "fedavg", "round": 3, "rounds": 9, "cohort": ["a", "b"], "cohort_size": 2}
    now |= {"accepted": ["a"], "accepted_count": 1, "rejected": {}, "left_out": {"z": {"reason": "failed thrice"}}}
    waiting = {"for": "round 3: 1 of 2 updates are here", "whom": ["b"], "count": 1, "seconds_left": 42.0}
    site.status(
        agents, run=now, waiting=waiting, rejected_messages=3, rejected_most={"messages": {"x: MessageError": 3}}
    )
    return site


@pytest.mark.parametrize("path", PAGES)
def test_page_of_an_empty_folder_says_what_to_do_next(site, path):
    with site.client() as client:
        answer = client.get(path)
    assert answer.status_code == 200
    assert "headwater" in answer.text or "token" in answer.text


def test_fleet_shows_each_agent_with_state_accuracies_and_what_to_do(populated):
    with populated.client() as client:
        page = client.get("/").text
    assert re.findall(r'href="/agent\?id=(\w)"', page)[:1] == ["b"], "the faulty one first"
    for part in ("75.0 %", "No class folders.", "Make one folder for each class.", "Rolled back the encoder.", "0.0.9"):
        assert part in page
    assert '<td class="n good">+25.0' in page, "what a gains"
    assert "better off alone" in page
    assert "x: MessageError (3 ×)" in page
    assert 'href="/releases?number=1"' in page


def refusal(name, message="bad password"):
    one = {"id": name, "by": "broker", "error": "LoginRefused", "message": message, "remedy": "run headwater password"}
    return one | {"times": 3, "at": "2026-01-01T00:00:00+00:00"}


def test_devices_that_are_kept_out_are_shown_once_with_the_remedy(site):
    refused = [refusal("porch"), refusal("", "no certificate"), refusal("a", "<i>same name</i>")]
    site.status([agent_status("a", acc={"local": 0.5, "personal": 0.75}, rss_mb=77.0, better_alone=True)])
    with site.client() as client:
        before = client.view.version("fleet")
        site.status(json.loads((site.path / "status.json").read_text())["agents"], refused_agents=refused)
        page = client.get("/").text
        assert client.view.version("fleet") != before, "open pages learn of it"
        assert re.findall(r'id=(\w+)"', client.get("/?only=refused").text.split("<tbody>")[1])[:1] == ["porch"]
    assert page.count("Bad password.") == 1
    assert page.count("Run headwater password.") == 3
    assert "No certificate." in page
    assert "&lt;i&gt;same name&lt;/i&gt;" in page
    assert all(part in page for part in ("75.0 %", "77 MB", "better off alone")), "figures of the status"


def test_release_page_says_that_it_is_done_who_signed_it_and_where_it_comes_from(site):
    site.run(2, end="run_finished")
    site.device("c", "a")
    signed = {"signers": [{"id": "f" * 64, "name": "ann"}], "threshold": 1, "keys": 2}
    digest = site.folder.blobs.put(b"a")
    scores = {"mean": 0.9, "worst_tenth": 0.8, "clients": 4}
    lineage = {"method": "fedper", "seed": 7, "clients": 4, "scores": scores}
    body = {"bundle_id": "a" * 64, "plan": {}, "signed": signed, "lineage": lineage}
    site.journal.append(fact_of("release_made", body), run="run-0001", round=2, digest=digest)
    with site.client() as client:
        page = client.get("/releases?number=1").text
    assert 'data-word="done"' in page
    for part in ("Signed by ann; 1 of 2 needed", "fedper", "90.0 %, worst tenth 80.0 %, of 4 clients"):
        assert part in page


def test_device_that_was_unable_is_listed_once(site):
    site.run(2, end="run_finished")
    site.device("c")
    site.release("a")
    site.device("c", "", 1, "unable", reason="no space", acc=None, before=None, support=0)
    with site.client() as client:
        page = client.get("/releases?number=1").text
    assert "<span>1 device</span>" in page
    assert 'data-word="unable"' in page


def test_cards_count_what_the_table_shows_and_say_of_how_many_they_are(site):
    run = site.run(4, ("a", "b"), end="run_finished")
    site.report(run, "a", 0.5, 0.6, 0.75)
    site.report(run, "b", 0.8, 0.6, 0.7, better_alone=True)
    site.device("c", "a", 1, "ok", reason="", acc=0.9, before=0.6, support=40)
    fault = {"error": "DiskFull", "message": "x", "remedy": "y", "at": ""}
    site.status([agent_status("b", condition="fault", fault=fault), agent_status("off", present=False, fault=fault)])
    with site.client() as client:
        page = client.get("/").text
        assert client.get("/?only=fault").text.count('<tr><th scope="row">') == 2
    assert '<td class="n bad">−10.0' in page, "what b loses"
    card = re.search(r"<h2>with a fault</h2><p class=\"big\">(\d+)", page)
    assert card[1] == "2", "that of a device that is offline counts as well"
    gain = re.search(r"<h2>gain</h2><p class=\"big\">(.*?)</p><p>(.*?)</p>", page)
    assert gain[1] == "+7.5", "(25 - 10) / 2"
    assert "mean of 2 that have both; within noise; 1 better off alone" in gain[2]


def test_cards_say_what_is_not_known_yet(site):
    site.run(2, ("a",))
    site.status([agent_status("a")])
    with site.client() as client:
        page = client.get("/").text
    assert "best model alone (acc.local); known at the end of a run" in page
    assert "percentage points, personal over alone; not known yet" in page
    assert "mean of 0" not in page


def test_run_that_ended_before_its_first_round_says_so_and_shows_no_cards_of_nothing(site):
    name = site.run(0, end="run_cancelled")
    site.folder.run(name).summary_path.write_text('{"agents": []}', encoding="utf-8")
    site.status()
    with site.client() as client:
        page = client.get(f"/run?id={name}").text
    assert "It ended before its first round was closed." in page
    assert "Curves begin" not in page
    assert 'class="card ' not in page
    assert "From agents" not in page
    assert "<progress" not in page


def test_agent_without_accuracies_says_when_there_will_be_some(site):
    site.device("c", "a", 1, "ok", reason="", acc=0.66, before=0.6, support=40)
    site.release("a")
    site.status([agent_status("n"), agent_status("c", tier="head")])
    with site.client() as client:
        new, device = (client.get(f"/agent?id={name}").text for name in "nc")
    assert "No accuracy is known yet" in new
    assert 'class="card ' not in new
    assert device.count('class="card ') == 1, "acc.personal of its release"
    assert "The accuracy alone (acc.local) and the gain over it are not known yet" in device


def test_analysis_of_a_run_is_linked_and_has_no_part_in_the_session(populated):
    folder = populated.folder.run("run-0001").folder / "analysis"
    with populated.client() as client:
        assert "/analysis/" not in client.get("/run?id=run-0001").text
        missing = client.get("/analysis/run-0001/index.html")
        assert missing.status_code == 404
        assert "headwater analyze run-0001" in missing.text
        folder.mkdir()
        (folder / "index.html").write_text("<p>measured</p>")
        (folder / "cka.svg").write_text("<svg/>")
        (folder / "secret.key").write_text("x")
        (folder.parent / "report.html").write_text("x")
        assert 'href="/analysis/run-0001/index.html"' in client.get("/run?id=run-0001").text
        page, picture = (client.get(f"/analysis/run-0001/{name}") for name in ("index.html", "cka.svg"))
        assert page.text == "<p>measured</p>"
        assert "sandbox" in page.headers["content-security-policy"]
        assert picture.headers["content-type"].startswith("image/svg+xml")
        for name in ("secret.key", "..%2freport.html", "%2e%2e", ".html", "analysis", "index.html.key"):
            assert client.get(f"/analysis/run-0001/{name}").status_code == 404, name
        assert client.get("/analysis/run-0009/index.html").status_code == 404


def test_methods_are_text_without_markup(site):
    with site.client() as client:
        page = client.get("/methods?name=fedfomo").text
    assert "Privacy: clients get other clients&#39; models, from which" in page
    assert "``" not in page
    assert "**" not in page


def test_accuracies_are_percentages_in_tables_charts_and_their_data(populated):
    with populated.client() as client:
        page = client.get("/").text
    chart = json.loads(re.search(r'id="gains".*?<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert chart["value"]["share"] is True
    assert chart["rows"][0]["marks"]["personal"][0] == 0.75
    assert "<td>75.0 % (" in page[page.index('id="gains"') :]


def test_fleet_is_searched_filtered_and_sorted_by_the_server(populated):
    with populated.client() as client:
        ids = lambda query: re.findall(
            r'<tr><th scope="row"><a class="id" href="/agent\?id=(\w)"', client.get("/" + query).text
        )
        assert ids("?only=fault") == ["b"]
        assert ids("?only=pinned") == ["c"]
        assert ids("?only=offline") == ["d"]
        assert ids("?tier=head&sort=id&order=desc") == ["d", "c"]
        assert ids("?find=A") == ["a"]
        assert "None of 4 agents is chosen" in client.get("/?find=zzz").text


def test_agent_page_has_history_fault_and_pin(populated):
    with populated.client() as client:
        page = client.get("/agent", params={"id": "c"}).text
        assert "pinned to release 1" in page
        assert "for the paper" in page
        assert "release 1: ok" in page
        page = client.get("/agent", params={"id": "b"}).text
        assert "better off alone" in page
        assert "Make one folder for each class." in page
        assert "finished run-0001" in page


def test_faults_that_are_over_stay_on_the_page_of_the_agent(populated):
    from coordinator.state.fault_log import Fault, FaultLog

    FaultLog(populated.path).note("a", Fault("DiskFull", "no space", "make room", code="disk"))
    with populated.client() as client:
        assert "Make room." in client.get("/agent?id=a").text


def test_run_page_says_for_whom_the_round_waits_and_until_when(populated):
    with populated.client() as client:
        page = client.get("/run?id=run-0002").text
    assert "round 3: 1 of 2 updates are here" in page
    assert 'data-until="' in page
    assert re.search(r'<li data-word="working"><a class="id" href="/agent\?id=b">', page)
    assert re.search(r'<li data-word="done"><a class="id" href="/agent\?id=a">', page)
    assert "failed thrice" in page
    assert page.count('<figure class="chart"') == 4
    assert "/act?do=cancel" in page


def test_rounds_that_close_while_nobody_looks_are_shown_after_the_end(site):
    run = site.run(0)
    with site.client() as client:
        assert "No round is closed yet" in client.get(f"/run?id={run}").text
        lines = [json.dumps({"kind": "round", "round": number, "agents": ["a"]}) + "\n" for number in (1, 2)]
        site.folder.run(run).metrics_path.write_text("".join(lines))
        site.journal.append(fact_of("run_finished", {}), run=run)
        assert "2 of 1" in client.get(f"/run?id={run}").text, "rounds closed of those requested"


def test_run_page_has_the_log_of_the_run_with_what_is_new(site):
    run = site.run(1)
    with site.client() as client:
        assert "requested: fedavg, 1 round, seed 0" in client.get(f"/run?id={run}").text
        body = {"reason": "<b>bad</b>"}
        site.journal.append(fact_of("update_refused", body), run=run, round=1, agent="a")
        page = client.get(f"/run?id={run}").text
        assert "update of a for round 1 rejected: &lt;b&gt;bad&lt;/b&gt;" in page
        assert page.count("requested: fedavg") == 1
        assert client.get("/run?id=run-0999").status_code == 404


def test_report_of_a_run_is_linked_and_has_no_part_in_the_session(site):
    run = site.run(1, end="run_finished")
    with site.client() as client:
        assert "/report?" not in client.get(f"/run?id={run}").text
        missing = client.get(f"/report?id={run}")
        assert (missing.status_code, f"headwater report {run}" in missing.text) == (404, True)
        (site.folder.run(run).folder / "report.html").write_text("<p>whole</p>")
        assert f'href="/report?id={run}"' in client.get(f"/run?id={run}").text
        answer = client.get(f"/report?id={run}")
        assert answer.text == "<p>whole</p>"
        assert answer.headers["content-security-policy"].startswith("sandbox allow-scripts;")
        assert client.get("/report?id=../run-0001").status_code == 404


def test_chart_of_a_run_has_all_rounds_and_its_numbers_as_a_table(populated):
    with populated.client() as client:
        page = client.get("/run?id=run-0001").text
    data = re.search(
        r'<figure class="chart" id="accuracy".*?<script type="application/json">(.*?)</script>', page, re.DOTALL
    )
    chart = json.loads(data[1])
    assert [one["name"] for one in chart["series"]][:2] == ["shared, mean", "shared, worst tenth"]
    assert len(chart["series"][0]["x"]) == 4
    assert '<th scope="col">personal, mean</th>' in page


def test_releases_show_the_canary_and_what_can_be_done(populated):
    with populated.client() as client:
        page = client.get("/releases").text
        assert "Canary: 0 of 1 successes needed" in page
        assert "do=promote&amp;number=2" in page
        assert "do=rollback&amp;number=1" in page
        page = client.get("/releases?number=2").text
        assert "self-test" in page


def test_compare_begins_with_the_last_ten_runs_that_have_started(site):
    started = [site.run(1, method="fedavg", end="run_finished") for _ in range(12)]
    cancelled = site.journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 1}))
    site.journal.append(fact_of("run_cancelled", {"reason": "before its start"}), run=cancelled)
    site.journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 1}))
    with site.client() as client:
        shown = set(re.findall(r'href="/run\?id=(run-\d+)"', client.get("/compare").text))
    assert shown == {*started[2:]}


def test_files_are_read_without_the_lock_of_the_pages(populated, monkeypatch):
    """The journal, a summary of all agents, a bundle: a slow disk holds up the one who asks, and nobody else."""
    run = populated.folder.run("run-0001")
    run.summary_path.write_text(json.dumps({"agents": [{"id": "a", "acc": {"local": 0.5}}]}), encoding="utf-8")
    read = []
    with populated.client() as client:

        def free(owner, name):
            real = getattr(owner, name)

            def checked(*args, **kwargs):
                assert not client.view.lock._is_owned(), name
                read.append(name)
                return real(*args, **kwargs)

            monkeypatch.setattr(owner, name, checked)

        free(SqliteJournal, "_selected")
        free(pages, "read_json")
        free(pages, "_bundle_file")
        populated.journal.append(fact_of("bundle_exported", {"bundle_id": "a" * 64}), run="run-0001", digest="0" * 64)
        for path in ("/agent?id=a", "/run?id=run-0001", *PAGES):
            assert client.get(path).status_code == 200, path
    assert {*read} == {"_selected", "read_json", "_bundle_file"}


@pytest.mark.parametrize("path", ["/runs", "/compare"])
def test_a_run_that_has_ended_is_shown_with_its_accuracy_after_the_training(site, path):
    """The last round's own figure, 60 to 70 %, is of the model before that round."""
    name = site.run(2, end="run_finished")
    summary = {"agents": [{"id": "a", "acc": {"personal": 0.25}}, {"id": "b", "acc": {"personal": 0.26}}]}
    site.folder.run(name).summary_path.write_text(json.dumps(summary), encoding="utf-8")
    with site.client() as client:
        page = client.get(path).text
    shown = re.findall(r'<td class="n">(\d+\.\d) %</td>', page)
    assert len(shown) == 2, "shared, then personal"
    assert 60 <= float(shown[0]) <= 70, "the summary does not have it"
    assert shown[1] == "25.5"


def test_the_page_of_a_run_lists_what_to_try_next(site):
    steps = {
        "run-0001": [{"step": "more_rounds", "message": "more <b>rounds</b>"}, "as earlier versions wrote it", 7],
        "run-0002": 7,
    }
    for name, of_run in steps.items():
        assert site.run(1, end="run_finished") == name
        summary = {"agents": [], "next_steps": of_run}
        site.folder.run(name).summary_path.write_text(json.dumps(summary), encoding="utf-8")
    with site.client() as client:
        page = client.get("/run?id=run-0001").text
        without = client.get("/run?id=run-0002").text
    listed = re.search(r"<h2>What to try next</h2><ul>(.*?)</ul>", page)
    assert listed is not None
    assert listed[1] == "<li>More &lt;b&gt;rounds&lt;/b&gt;.</li><li>As earlier versions wrote it.</li>"
    assert "What to try next" not in without


def test_compare_shows_settings_that_differ_and_all_when_asked(site):
    for lr in (0.1, 0.2):
        site.run(3, end="run_finished", params={"lr": lr})
    with site.client() as client:
        page = client.get("/compare?run=run-0001&run=run-0002").text
        assert '<th scope="col">params.lr</th>' in page
        assert '<th scope="col">method</th>' not in page
        assert '<th scope="col">method</th>' in client.get("/compare?run=run-0001&run=run-0002&all=1").text
        assert client.get("/compare?" + "&".join(f"run=run-{n}" for n in range(101))).status_code == 400


@pytest.mark.parametrize(
    "path, status",
    [
        ("/run?id=run-9999", 404),
        ("/run", 404),
        ("/run?id=../../etc/passwd", 404),
        ("/agent?id=nobody", 404),
        ("/releases?number=7", 404),
        ("/releases?number=x", 400),
        ("/releases?before=99999999999999", 400),
        ("/?sort=x", 400),
        ("/?after=x", 400),
        ("/compare?run=nope", 404),
        ("/assets/../app.py", 404),
        ("/assets/%2e%2e%2fapp.py", 404),
        ("/assets/app.py", 404),
        ("/nothing", 404),
        ("/act?do=format", 404),
    ],
)
def test_bad_address_is_a_clear_page_and_no_leak(populated, path, status):
    with populated.client() as client:
        answer = client.get(path)
    assert answer.status_code == status
    assert "Traceback" not in answer.text
    assert str(populated.path.parent / "x") not in answer.text
    assert 'role="alert"' in answer.text or status == 404


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_escaped_on_every_page(site, name):
    storable = name.encode(errors="replace").decode()  # SQLite refuses half a surrogate pair, JSON files do not
    run = site.run(2, (name,), end="run_failed", method=storable, params={storable: storable})
    site.report(run, storable, 0.5, 0.6, 0.7)
    site.release("a", note=name)
    fault = {"error": name, "message": name, "remedy": name, "at": name}
    site.status([agent_status(name, software=name, bundle_id=name, notes=[name], condition="fault", fault=fault)])
    with site.client() as client:
        for path in (*PAGES, f"/run?id={run}", "/releases?number=1"):
            check(client.get(path))
        check(client.get("/agent", params={"id": storable[:2000]}))
        check(client.get("/", params={"find": storable[:2000]}))


def check(answer):
    assert answer.status_code in {200, 404}, answer.text[:500]
    page = answer.content.decode()
    assert not re.search(r"<script(?! src=\"/assets/| type=\"application/json\")", page)
    assert "<img src=x" not in page
    assert " onerror=alert(1)>" not in re.sub(r'="[^"]*"', "", page).replace("&lt;img src=x onerror=alert(1)&gt;", "")
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", page)
    assert not {"\u202e", "\u0000"} & set(page)
    for data in re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL):
        json.loads(data)


def test_half_written_files_cost_their_content_and_no_page(populated):
    (populated.path / "status.json").write_text('{"at": "2026', encoding="utf-8")
    folder = populated.folder.run("run-0001")
    folder.summary_path.write_text("{", encoding="utf-8")
    with folder.metrics_path.open("a") as file:
        file.write('not json\n{"kind":"round","round":5,"acc":{"per')
    with populated.client() as client:
        page = client.get("/run?id=run-0001")
        assert page.status_code == 200
        assert "Damaged and left out: 1 line of metrics.jsonl." in page.text
        for path in PAGES:
            assert client.get(path).status_code == 200


def test_damaged_journal_is_named_and_the_status_still_shown(populated, tmp_path):
    populated.journal.close()
    (populated.path / "journal.db").write_bytes(b"not a database" * 100)
    for end in ("-wal", "-shm"):
        (populated.path / f"journal.db{end}").unlink(missing_ok=True)
    with populated.client() as client:
        page = client.get("/").text
    assert "The journal cannot be read" in page
    assert "No class folders." in page


def test_folder_without_a_coordinator_says_so_and_shows_what_was(populated):
    content = json.loads((populated.path / "status.json").read_text())
    populated.status(content["agents"], at="2026-01-01T00:00:00.000+00:00")
    with populated.client() as client:
        page = client.get("/").text
    assert "No coordinator is at work on this folder" in page
    assert page.count('data-word="unknown"') == 4
    assert "75.0 %" in page


def test_state_folder_that_is_replaced_is_read_again(populated):
    with populated.client() as client:
        assert client.get("/run?id=run-0002").status_code == 200
        populated.journal.close()
        for path in populated.path.glob("journal.db*"):
            path.unlink()
        populated.journal.open()
        populated.run(1, end="run_finished")
        assert client.get("/run?id=run-0002").status_code == 404
        assert client.get("/run?id=run-0001").status_code == 200


def test_pages_of_long_tables_follow_each_other_without_a_gap(site):
    for _ in range(120):
        site.journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 1}))
    seen = []
    path = "/runs"
    with site.client() as client:
        while path:
            page = client.get(path).text
            seen += re.findall(r'<th scope="row"><a class="id" href="/run\?id=(run-\d+)"', page)
            link = re.search(r'rel="next" href="([^"]+)"', page)
            path = link[1] if link else ""
    assert seen == [f"run-{number:04d}" for number in range(120, 0, -1)]


def test_every_page_has_the_headers_that_keep_browsers_safe(populated):
    with populated.client() as client:
        for path in (*PAGES, "/nothing", "/assets/web.js", "/run?id=x"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
            if not path.startswith("/assets"):
                assert headers["cache-control"] == "no-store" or path == "/nothing"


def test_no_page_has_inline_script_or_style(populated):
    with populated.client() as client:
        for path in (*PAGES, "/run?id=run-0001", "/agent?id=a"):
            page = client.get(path).text
            assert not re.search(r"\sstyle=|\son\w+=", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))


def test_scripts_and_styles_are_kept_by_their_hash_and_sent_compressed(populated):
    with populated.client() as client:
        page = client.get("/").text
        addresses = re.findall(r'(?:src|href)="(/assets/[^"]+)"', page)
        assert len(set(addresses)) == 6
        packed = 0
        for address in set(addresses):
            answer = client.get(address)
            assert "immutable" in answer.headers["cache-control"]
            assert answer.headers["content-encoding"] == "gzip"
            packed += int(answer.headers["content-length"]) * address.partition("?")[0].endswith(".js")
        assert packed < 60_000
        assert "immutable" not in client.get("/assets/web.js").headers["cache-control"]


def test_run_older_than_those_held_is_read_when_it_is_asked_for(site, monkeypatch):
    monkeypatch.setattr("coordinator.web.folder_view.MOST_CURVES", 2)
    monkeypatch.setattr("coordinator.web.run_curves.RunCurves.read.__defaults__", (2000,))
    # The site's own thread would read the run between the page and the look at its version.
    monkeypatch.setattr("coordinator.web.events.Watch._refresh", lambda watch: False)
    for rounds in (30, 2, 2):
        site.run(rounds, end="run_finished")
    with site.client() as client:
        assert "being read" in client.get("/run?id=run-0001").text
        version = client.view.version("runs")
        while client.view.refresh():
            pass
        assert client.view.version("runs") != version, "an open page is loaded again"
        page = client.get("/run?id=run-0001").text
        assert "30 of 30" in page
        assert "being read" not in page
        assert "30/30" in client.get("/runs").text
        assert "30/30" in client.get("/compare?run=run-0001").text


def test_figures_of_single_agents_have_one_budget_over_all_runs(site, monkeypatch):
    monkeypatch.setattr("coordinator.web.folder_view.AGENT_RUNS", 3)
    monkeypatch.setattr("coordinator.web.folder_view.MOST_HELD", 60)  # a run: 2 agents, 3 rounds: 20 + 6
    for _ in range(4):
        site.run(3, end="run_finished")
    with contextlib.closing(FolderView(site.path)) as view:  # a client's own thread would read meanwhile
        while view.refresh():
            pass
        view.refresh()  # the budget counts what the look before has read
        held = {name: curves.held for name, curves in view._curves.items()}
        assert held == {"run-0001": 0, "run-0002": 0, "run-0003": 26, "run-0004": 26}
        assert all(len(curves.points) == 3 for curves in view._curves.values()), "those over all agents stay"


@pytest.fixture
def went_back(site):
    """Release 1 is for everybody, 2 was rolled back by itself, as release 3; the device refused release 2."""
    site.release("a")
    site.release("b", run="run-0002")
    running = {"acc": {"local": 0.6, "global": 0.7, "personal": 0.75}, "head": "lr", "better_alone": False}
    site.device("cam", "a", 1, "ok", acc=0.75)
    candidate = {"bundle_id": "b" * 64, "run": "run-0002", "release": 2, "reason": "worse", "acc": {"personal": 0.25}}
    result = {"outcome": "failed", "reason": "worse", "acc": 0.25, "before": 0.74}
    body = {"runs": "a" * 64, "channel": "stable", "running": running, "candidate": candidate, "release": 2}
    site.journal.append(fact_of("device_reported", {**body, "result": result}), agent="cam")
    plan = {"channel": "stable", "note": "1 of 1 devices failed"}
    made = {"bundle_id": "a" * 64, "plan": plan, "by": AUTOMATIC, "rolls_back": 2}
    site.journal.append(fact_of("release_made", made), run="run-0001", round=1, digest="0" * 64)
    return site


def test_the_page_of_an_agent_keeps_what_it_runs_and_what_it_tried_apart(went_back):
    with went_back.client() as client:
        page = client.get("/agent?id=cam").text
    cards = page[page.index('aria-label="Accuracies"') : page.index('aria-label="Actions"')]
    assert "75.0 %" in cards
    assert "25.0 %" not in cards
    assert re.search(r"<dt>Tried, not in use</dt><dd><code[^>]*>bbbbbbbbbbbb</code>.*?25\.0 %", page)
    history = page[page.index('id="history"') :]
    assert re.search(r"release 2: failed</td><td><code[^>]*>bbbbbbbbbbbb</code>.*?25\.0 %", history, re.DOTALL)
    assert "Rolled back the encoder of run-0002: worse." in page


def test_pages_and_terminal_say_the_same_of_where_releases_stand(went_back, capsys):
    with went_back.client() as client:
        page = client.get("/releases").text
    for words in (["release", "status", str(number), "--state", str(went_back.path)] for number in (1, 2, 3)):
        with contextlib.suppress(SystemExit):
            main(words)
    printed = capsys.readouterr().out
    badges = re.findall(r'class="badge" data-word="([^"]*)">([^<]*)</span></span>', page)
    assert badges == [
        ("done", "rolls back 2, done"),
        ("rolled back", "rolled back by 3"),
        ("replaced", "replaced by 3"),
    ]
    for _, stage in badges:
        assert stage in printed
    assert page.count("Release 2 was rolled back: 1 of 1 devices failed") == 2, "beside release 2, and the rollback"
    assert "Note: 1 of 1 devices failed" not in page
    assert printed.count("release 2 was rolled back: 1 of 1 devices failed") == 2
    assert "by automatic rollback" in " ".join(printed.split())
    assert ", automatic rollback</span>" in page


def test_the_author_of_an_automatic_rollback_is_named_also_where_an_older_version_wrote_it(went_back):
    body = {"bundle_id": "a" * 64, "plan": {"note": "bad"}, "by": "failures"}
    went_back.journal.append(fact_of("release_made", body), run="run-0001", round=1, digest="0" * 64)
    with went_back.client() as client:
        assert ", automatic rollback</span>" in client.get("/releases?number=4").text


def test_gain_comes_first_and_what_may_be_noise_is_grey(site):
    run = site.run(2, ("a", "b"), end="run_finished")
    site.report(run, "a", 0.74, 0.6, 0.733)  # 0.7 points on 40 samples: nothing
    site.report(run, "b", 0.8, 0.6, 0.7, better_alone=True)
    site.status([agent_status("a"), agent_status("b")])
    with site.client() as client:
        page = client.get("/").text
        agent = client.get("/agent?id=a").text
    assert '<td class="n even">−0.7' in page
    assert "within noise</span>" in page, "who does not see the colour reads it"
    assert '<td class="n bad">−10.0' in page
    columns = re.findall(r'<th scope="col"[^>]*><a [^>]*>([\w .]+)', page[page.index('id="agents"') :])
    assert columns[:6] == ["agent", "state", "gain", "personal", "alone", "shared"]
    for content in (page, agent):
        cards = re.findall(r'<div class="card ([^"]*)"><h2>(\w+)</h2>', content)
        assert [name for _, name in cards][:4] == ["gain", "personal", "alone", "shared"]
        assert cards[0][0].split() == ["lead", "even"], "larger, and neither good nor bad"


def test_rounds_and_log_beyond_the_tenth_are_folded(site):
    run = site.run(14, ("a",), end="run_finished")
    for number in range(12):
        site.report(run, f"agent-{number}", 0.5, 0.6, 0.7)
    site.status()
    with site.client() as client:
        page = client.get(f"/run?id={run}").text
        older = client.get(f"/run?id={run}&before=14").text
    rounds = page[page.index('id="rounds"') : page.index('id="incidents"')]
    shown, folded = rounds.split('<details id="more-rounds">')
    assert (shown.count('<th scope="row"'), folded.count('<th scope="row"')) == (10, 4)
    assert "4 more rounds" in folded
    log = page[page.index('id="log"') : page.index('id="settings"')]
    shown, folded = log.split('<details id="more-log">')
    assert shown.count("<tr><td>") == 10
    assert folded.count("<tr><td>") > 0
    assert '<details id="more-rounds" open>' in older, "who asks for older rounds sees them"


def test_no_page_shows_where_the_state_folder_is(populated):
    with populated.client() as client:
        pages = [
            "/",
            "/runs",
            "/releases",
            "/bundles",
            "/methods",
            "/login",
            "/compare",
            "/agent?id=a",
            "/run?id=run-0001",
        ]
        texts = {path: client.get(path).text for path in [*pages, "/analysis/run-0001/index.html"]}
    assert [path for path, text in texts.items() if str(populated.path) in text] == []
    assert "Federation home" in texts["/"]
    assert "<h1>Methods</h1>" in texts["/methods"]
    assert "ask them for the token" in texts["/login"]


def test_missing_and_bounded_updates_beyond_the_tenth_are_folded(site):
    run = site.run(0, ("a",), end="run_finished")
    lines = [
        {**round_line(number, ("a",), random.Random(0)), "bounded": {"a": f"clipped (x 0.{number})"}}
        for number in range(1, 14)
    ]
    metrics = site.folder.run(run).metrics_path
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    site.status()
    with site.client() as client:
        page = client.get(f"/run?id={run}").text
    incidents = page[page.index('id="incidents"') : page.index('id="log"')]
    shown, folded = incidents.split('<details id="more-incidents">')
    assert (shown.count("clipped (x"), folded.count("clipped (x")) == (10, 3)
    assert "3 earlier updates" in folded


@pytest.mark.parametrize(
    "closed, title, line",
    [(3, "After round 3", "3 of 9 rounds are closed"), (0, "Before round 1", "0 of 9 rounds are closed")],
)
def test_run_without_an_open_round_shows_how_many_are_closed(site, closed, title, line):
    """Before the first round and after the last one the status has round 0."""
    run = site.run(closed, ("a",), wanted=9)
    now = {"id": run, "method": "fedavg", "round": 0, "rounds": 9, "cohort": [], "cohort_size": 0}
    site.status([agent_status("a")], run=now, waiting={"for": "the encoder is being exported", "whom": []})
    with site.client() as client:
        page = client.get(f"/run?id={run}").text
        fleet = client.get("/").text
    assert f"<h2>{title}</h2>" in page
    assert line in fleet
    assert "ound 0" not in page + fleet


def test_results_of_an_agent_are_drawn_over_time(site, monkeypatch):
    run = site.run(2, ("a",), end="run_finished")
    begin = datetime(2026, 1, 31, 23, 0, tzinfo=timezone.utc)
    for hours, personal in ((0, 0.6), (26, 0.7)):
        moment = begin + timedelta(hours=hours)
        monkeypatch.setattr(site.journal, "_now", lambda moment=moment: moment)
        site.report(run, "a", 0.5, 0.6, personal)
    monkeypatch.undo()
    site.status([agent_status("a")])
    with site.client() as client:
        page = client.get("/agent?id=a").text
    chart = json.loads(re.search(r'id="history".*?<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert (chart["title"], chart["x"]["time"]) == ("Accuracy over time", True)
    assert chart["series"][2]["x"] == [round(begin.timestamp()), round(begin.timestamp()) + 26 * 3600]
    assert "<td>2026-02-02 01:00</td>" in page
    assert "result, oldest first" not in page


def test_results_of_one_minute_have_no_chart_because_the_axis_would_have_no_width(site, monkeypatch):
    """A run that releases its bundle ends with two results of an agent within a second."""
    begin = datetime(2026, 1, 31, 23, 0, tzinfo=timezone.utc)
    for seconds in (0.25, 0.5):
        run = site.run(2, ("a",), end="run_finished")
        monkeypatch.setattr(site.journal, "_now", lambda seconds=seconds: begin + timedelta(seconds=seconds))
        site.report(run, "a", 0.5, 0.6, 0.7)
    monkeypatch.undo()
    site.status([agent_status("a")])
    with site.client() as client:
        page = client.get("/agent?id=a").text
    assert "Accuracy over time" not in page
    assert "70.0 %" in page
