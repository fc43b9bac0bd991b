"use strict";
// Live pages: a stream says that there is news, the page is fetched again, and its parts that differ are replaced.
(() => {
  const body = document.body, sign = document.getElementById("live");
  const seconds = () => Date.now() / 1000;

  // --- texts that change with the clock
  const ago = (s) => s < 2 ? "now" : s < 120 ? `${Math.round(s)} s ago` : s < 7200 ? `${Math.round(s / 60)} min ago`
    : s < 172800 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`;
  const tick = () => {
    for (const one of document.querySelectorAll("[data-since]")) {
      const text = ago(Math.max(0, seconds() - Number(one.dataset.since)));
      if (one.textContent !== text) one.textContent = text;
    }
    for (const one of document.querySelectorAll("[data-until]")) {
      const left = Math.max(0, Number(one.dataset.until) - seconds());
      const text = left < 120 ? `${Math.round(left)} s` : `${Math.round(left / 60)} min`;
      if (one.textContent !== text) one.textContent = text;
    }
  };
  tick();
  setInterval(tick, 1000);

  // --- the token in a login address comes after '#', which browsers send to nobody
  const token = document.getElementById("token");
  if (token && location.hash.length > 1) {
    token.value = decodeURIComponent(location.hash.slice(1));
    history.replaceState(null, "", location.pathname + location.search);
    token.form.submit();
  }

  // --- news
  if (!body.dataset.topic || !window.EventSource) return;
  const known = new Map();
  const replace = (old, fresh) => {
    const open = [...old.querySelectorAll("details[open][id]")].map((one) => one.id);
    const scrolls = [...old.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    const focus = old.contains(document.activeElement) && document.activeElement.getAttribute("href");
    old.replaceChildren(...fresh.childNodes);
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    [...old.querySelectorAll(".scroll")].forEach((one, at) => { one.scrollLeft = scrolls[at] || 0; });
    if (focus) [...old.querySelectorAll("a")].find((one) => one.getAttribute("href") === focus)?.focus();
  };
  const show = (text) => {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const old = document.getElementById(part.id), html = part.innerHTML;
      if (!old || known.get(part.id) === html) continue;
      if (old.contains(document.activeElement) && document.activeElement.matches("input, select, textarea")) continue;
      known.set(part.id, html);
      replace(old, part);
    }
    for (const figure of fresh.querySelectorAll("figure.chart")) {
      const old = document.getElementById(figure.id), data = figure.querySelector("script").textContent;
      if (!old || known.get(figure.id) === data) continue;
      const chart = JSON.parse(data), table = figure.querySelector("table");
      if (known.has(figure.id) || old.querySelector("script")?.textContent !== data) {
        const cells = (row) => [...row.children].map((cell) => cell.textContent);
        chart.table = { columns: cells(table.tHead.rows[0]), rows: [...table.tBodies[0].rows].map(cells) };
        window.headwaterCharts.update(figure.id, chart);
      }
      known.set(figure.id, data);
    }
    const charts = fresh.getElementById("charts"), now = document.getElementById("charts");
    if (charts && now && charts.children.length !== now.children.length) {
      now.replaceChildren(...charts.childNodes);
      window.headwaterCharts.draw(now);
    }
    tick();
  };
  let busy = false, again = false;
  const refresh = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (answer.ok) show(await answer.text());
    } catch { /* the stream reconnects, and says so */ }
    setTimeout(() => { busy = false; if (again) { again = false; refresh(); } }, 500);
  };
  const topic = encodeURIComponent(body.dataset.topic), seen = encodeURIComponent(body.dataset.seen);
  let source = null;
  const state = (name, text) => { if (sign) { sign.dataset.state = name; sign.textContent = text; } };
  const LOST_AFTER_MS = 3000; // a stream that ends after its hour is back within one second
  const banner = document.getElementById("lost");
  let waits = null;
  const lost = (at) => {
    body.dataset.lost = "";
    const note = document.createElement("p");
    note.className = "note bad";
    note.textContent = `The web view does not answer. What is shown here was so at ${at.toISOString().slice(0, 19).replace("T", " ")} UTC.`;
    banner.replaceChildren(note);
  };
  const back = () => {
    clearTimeout(waits);
    waits = null;
    if (!("lost" in body.dataset)) return;
    delete body.dataset.lost;
    banner.replaceChildren();
    refresh();
  };
  const listen = () => {
    source = new EventSource(`/events?topic=${topic}&seen=${seen}`);
    source.addEventListener("open", () => { state("on", "live"); back(); });
    source.addEventListener("news", refresh);
    source.addEventListener("error", () => {
      state("off", "reconnecting");
      const at = new Date();
      waits ??= setTimeout(() => lost(at), LOST_AFTER_MS);
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
    });
  };
  listen();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
})();
