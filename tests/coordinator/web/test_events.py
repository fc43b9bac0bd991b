"""Live pages: news reaches a stream, nothing is queued for a slow client, streams end at once with the server."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from web_site import agent_status

from coordinator.state.fault_log import Fault, FaultLog
from coordinator.web import events
from coordinator.web.events import EventStream, Watch
from coordinator.web.folder_view import FolderView


def versions(view, *topics):
    view.refresh()
    return [view.version(topic) for topic in topics]


@pytest.fixture
def view(site):
    site.run(2)
    site.status([agent_status("a")])
    made = FolderView(site.path)
    made.refresh()
    yield made
    made.close()


def changed(view, act, *topics):
    before = versions(view, *topics)
    act()
    return [old != new for old, new in zip(before, versions(view, *topics), strict=True)]


TOPICS = ("fleet", "run:run-0001", "agent:a", "releases")


def again(site, **changes):
    """The status of the same moment, with changes: what is heard later is not what is tested here."""
    content = json.loads((site.path / "status.json").read_text())
    (site.path / "status.json").write_text(json.dumps({**content, **changes}))


def test_what_is_no_news_wakes_nobody(site, view):
    again(site)
    again(site, agents=[agent_status("a", silent_s=9.0, bytes_up=5)], traffic={"dropped": 1})
    assert changed(view, lambda: again(site, agents=[agent_status("a", silent_s=1.0)]), *TOPICS) == [False] * 4


def test_a_fault_is_news_for_fleet_and_agent(site, view):
    act = lambda: again(site, agents=[agent_status("a", condition="fault", fault={"error": "x"})])
    assert changed(view, act, *TOPICS) == [True, False, True, False]
    act = lambda: FaultLog(site.path).note("a", Fault("x", "", ""))
    assert changed(view, act, *TOPICS) == [True, False, True, False]


def test_a_round_is_news_for_its_run_and_the_accuracies_of_agents(site, view):
    def act():
        with site.folder.run("run-0001").metrics_path.open("a") as file:
            file.write('{"kind":"round","round":3,"acc":{"personal":{"a":0.5}}}\n')

    assert changed(view, act, *TOPICS) == [True, True, True, False]


def test_an_entry_of_the_journal_is_news_for_all(site, view):
    assert changed(view, lambda: site.device("c"), *TOPICS) == [True] * 4


def test_stream_says_what_is_new_once_and_ends_with_the_server(site, view):
    async def scene():
        watch = Watch(view)
        looking = asyncio.create_task(watch.run())
        stream = watch.events("releases", view.version("releases"))
        received = [await anext(stream)]
        site.device("c")
        received.append(await asyncio.wait_for(anext(stream), 10))
        assert watch.streams == 1
        rest = asyncio.create_task(anext(stream, b"the end"))
        await watch.end()
        received.append(await asyncio.wait_for(rest, 5))
        assert watch.streams == 0
        looking.cancel()
        return received

    version = lambda: view.version("releases")
    retry, news, end = asyncio.run(scene())
    assert retry.startswith(b"retry:")
    assert news == f"event: news\nid: {version()}\ndata: {version()}\n\n".encode()
    assert end == b"the end"


def test_a_stream_without_news_is_never_silent_for_long(view, monkeypatch):
    monkeypatch.setattr(events, "PING_EVERY_S", 0.05)
    monkeypatch.setattr(events, "LOOK_EVERY_S", 0.01)  # looks that find nothing delay no ping

    async def scene():
        watch = Watch(view)
        looking = asyncio.create_task(watch.run())
        stream = watch.events("fleet", view.version("fleet"))
        received = [await asyncio.wait_for(anext(stream), 10) for _ in range(4)]
        await stream.aclose()
        looking.cancel()
        return received

    assert asyncio.run(scene())[1:] == [b": ping\n\n"] * 3


def test_the_loop_of_all_requests_waits_for_no_reader(site, view):
    async def scene():
        watch = Watch(view)
        looking = asyncio.create_task(watch.run())
        stream = watch.events("fleet", "")
        for _ in range(2):
            await anext(stream)
        news = asyncio.create_task(anext(stream))
        release = threading.Event()
        held = threading.Event()

        def hold():
            with view.lock:
                held.set()
                assert release.wait(5)

        holder = threading.Thread(target=hold)
        holder.start()
        await asyncio.to_thread(held.wait)
        await asyncio.to_thread(site.device, "c")
        for _ in range(200):  # the loop goes round although a page holds the lock
            await asyncio.sleep(0)
        async with watch._news:
            watch._news.notify_all()
        await asyncio.sleep(0)
        assert not news.done()
        release.set()
        assert (await asyncio.wait_for(news, 10)).startswith(b"event: news")
        await stream.aclose()
        looking.cancel()
        holder.join()

    asyncio.run(scene())


def test_stream_of_a_page_that_is_behind_begins_with_news(view):
    async def first_two():
        watch = Watch(view)
        stream = watch.events("fleet", "an older version")
        result = [await anext(stream), await anext(stream)]
        await stream.aclose()
        return result

    assert asyncio.run(first_two())[1].startswith(b"event: news")


def test_a_client_that_takes_nothing_is_disconnected(view, monkeypatch):
    monkeypatch.setattr(events, "SEND_TIMEOUT_S", 0.01)

    async def scene():
        watch = Watch(view)

        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()  # its buffers are full

        async def receive():
            await asyncio.Event().wait()

        stream = EventStream(watch.events("fleet", ""))
        await asyncio.wait_for(stream({"type": "http", "method": "GET"}, receive, send), 5)
        return watch.streams

    assert asyncio.run(scene()) == 0


def test_no_more_than_so_many_streams(site):
    with site.client() as client:
        client.site.watch.streams = events.MOST_STREAMS
        answer = client.get("/events?topic=fleet")
        client.site.watch.streams = 0
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def test_fault_log_is_bounded_and_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.state.fault_log.FILE_BYTES", 1000)
    log = FaultLog(tmp_path)
    for number in range(100):
        log.note("a", Fault("E", f"fault {number}", "r"))
    kept = [reported.fault.message for reported in log.read()]
    assert kept == [f"fault {number}" for number in range(100 - len(kept), 100)]
    assert 8 <= len(kept) <= 24
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write('{"torn": "li')
    assert len(list(log.read())) == len(kept)


def test_streams_that_come_at_once_are_counted_before_any_of_them_has_begun(view):
    """A stranger's 256 requests in one packet were all let in, and took the connections of everybody's pages."""

    async def scene():
        watch = Watch(view)
        statuses = []
        all_answered = asyncio.Event()

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            if len(statuses) == len(streams):
                all_answered.set()

        async def receive():
            await asyncio.Event().wait()

        streams = [EventStream(watch.events("fleet", "")) for _ in range(events.MOST_STREAMS + 6)]
        scope = {"type": "http", "method": "GET"}
        tasks = [asyncio.create_task(stream(scope, receive, send)) for stream in streams]
        await all_answered.wait()
        await watch.end()
        await asyncio.gather(*tasks)
        return statuses

    statuses = asyncio.run(scene())
    assert statuses.count(200) == events.MOST_STREAMS
    assert statuses.count(503) == 6
