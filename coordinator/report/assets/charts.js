/* Draws the figures that coordinator/report/charts.py describes. Lines, bars and points by uPlot on a canvas; rows,
   matrices and timelines as HTML. Text goes into the page as text only, styles by properties only: a content security
   policy needs to allow neither inline scripts nor inline styles for it. */
"use strict";
(() => {
  const shown = new Map(); // figure -> what is drawn in it, and its reader's choices
  const LIVE_DELAY_MS = 250; // a screen reader says where the cursor rests, not each step on its way
  const SMOOTHING = 0.8;
  const LEAST_SMOOTHED = 15;

  const make = (tag, className = "", text = "") => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== "") element.textContent = text;
    return element;
  };
  const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const known = (value) => value !== null && value !== undefined;
  const unitOf = (axis) => (axis.share ? "%" : axis.unit);
  const axisText = (axis) => (unitOf(axis) ? `${axis.label} (${unitOf(axis)})` : axis.label);
  const digits = (value) => {
    if (!known(value)) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en").replaceAll(",", " ");
    const size = Math.abs(value);
    return size >= 1000 ? digits(Math.round(value)) : String(Number(value.toPrecision(size < 1 ? 3 : 4)));
  };
  const onTick = (value, axis) => digits(Number(((axis.share ? 100 : 1) * value).toPrecision(8)));
  const withUnit = (value, axis) => {
    if (!known(value)) return digits(value);
    if (axis.time) return new Date(1000 * value).toISOString().slice(0, 16).replace("T", " ");
    const shown = axis.share ? 100 * value : value, text = known(axis.digits) ? shown.toFixed(axis.digits) : digits(shown);
    return unitOf(axis) ? `${text} ${unitOf(axis)}` : text;
  };

  /* ---- controls and cursor ---- */

  function sign(role, shape) {
    const mark = make("i", `sign is-${role} ${shape}`);
    mark.setAttribute("aria-hidden", "true");
    return mark;
  }

  function toggle(name, isPressed, onClick, mark = null) {
    const item = make("li");
    const button = make("button", mark ? "key" : "key option");
    button.type = "button";
    button.setAttribute("aria-pressed", String(isPressed));
    if (mark) button.append(mark);
    button.append(name);
    button.addEventListener("click", () => {
      const isNow = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isNow));
      onClick(isNow);
    });
    item.append(button);
    return item;
  }

  function say(state, text) {
    clearTimeout(state.timer);
    state.timer = setTimeout(() => { state.live.textContent = text; }, LIVE_DELAY_MS);
  }

  /* ---- lines, bars, points ---- */

  function smoothed(values) {
    let last = 0, weight = 0; // an exponential moving mean without the bias of its beginning
    return values.map((value) => {
      if (!known(value)) return value;
      last = SMOOTHING * last + (1 - SMOOTHING) * value;
      weight = SMOOTHING * weight + (1 - SMOOTHING);
      return last / weight;
    });
  }

  /* Common x and one column for each series; undefined: the series has no point there. */
  function columns(chart, state) {
    const isLog = state.isLog;
    const xs = [...new Set(chart.series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, index) => [x, index]));
    const column = (one, values) => {
      const result = new Array(xs.length).fill(undefined);
      one.x.forEach((x, index) => {
        const value = values[index];
        result[place.get(x)] = known(value) && !(isLog && value <= 0) ? value : null;
      });
      return result;
    };
    const ys = chart.series.map((one) => column(one, state.isSmooth ? smoothed(one.y) : one.y));
    const bands = chart.series.map((one) => one.low && [column(one, one.high), column(one, one.low)]);
    return { xs, ys, bands };
  }

  function range(axis, chart, isLog) {
    return (plot, low, high) => {
      if (!known(low) || !known(high)) [low, high] = [0, 1];
      if (isLog) return uPlot.rangeLog(low, high, 10, false);
      const isBars = chart.kind === "bars";
      const room = low === high ? Math.abs(low) || 1 : high - low;
      const begin = known(axis.low) ? axis.low : isBars ? Math.min(0, low) : low - 0.06 * room;
      return [begin, known(axis.high) ? axis.high : high + (high > begin || !isBars ? 0.06 * room : 1)];
    };
  }

  function drawPlot(state, box) {
    const chart = state.chart;
    const isBars = chart.kind === "bars", isScatter = chart.kind === "scatter";
    const { xs, ys, bands } = isScatter ? clouds(chart) : columns(chart, state);
    const plotted = isBars && chart.stacked ? stack(ys, (index) => state.hidden.has(chart.series[index].name)) : ys;
    const data = [xs], series = [{ label: axisText(chart.x) }], joined = [];
    const order = chart.series.map((_, index) => index);
    if (isBars && chart.stacked) order.reverse(); // the highest sum first: the others stand before it
    const at = new Map();
    for (const index of order) {
      const one = chart.series[index], isHidden = state.hidden.has(one.name);
      if (bands && bands[index]) {
        joined.push({ series: [data.length, data.length + 1], fill: () => theme(one.role) + "26" });
        for (const edge of bands[index]) {
          data.push(edge);
          series.push({ show: !isHidden, width: 0, stroke: "transparent", points: { show: false }, spanGaps: true });
        }
      }
      at.set(index, data.length);
      data.push(plotted[index]);
      series.push({ label: one.name, show: !isHidden, ...look(chart, one, index, xs.length) });
    }
    const height = isScatter ? Math.min(420, Math.max(240, box.clientWidth)) : Math.round(Math.min(320, Math.max(220, box.clientWidth * 0.52)));
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = (one, more) => ({
      label: axisText(one), labelFont: font, font, labelSize: 22, labelGap: 2, gap: 4,
      stroke: () => theme("soft"), grid: { stroke: () => theme("rule"), width: 1 }, ticks: { show: false }, ...more,
    });
    const whole = !chart.x.time && xs.every(Number.isInteger);
    const times = chart.x.time ? { space: 95, values: (plot, splits) => {
      const isLong = splits[splits.length - 1] - splits[0] > 2 * 86400;
      return splits.map((at) => withUnit(at, chart.x)).map((text) => (isLong ? text.slice(0, 10) : text.slice(5)));
    } } : {};
    const bare = chart.bare ? { values: (plot, splits) => splits.map(() => "") } : {};
    const options = {
      ...(chart.x.time ? { tzDate: (at) => uPlot.tzDate(new Date(1000 * at), "Etc/UTC") } : {}),
      width: Math.max(200, box.clientWidth), height, legend: { show: false }, bands: joined, padding: [8, chart.x.time ? 40 : 12, 0, 0],
      scales: {
        x: { time: Boolean(chart.x.time), range: (plot, low, high) => state.zoom || xRange(chart, low, high) },
        y: { distr: state.isLog ? 3 : 1, range: range(chart.y, chart, state.isLog) },
      },
      axes: [
        axis(chart.x, { size: bare.values ? 6 : 24, incrs: whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6, 1e7, 1e9] : undefined, ...times, ...bare }),
        axis(chart.y, { ...(chart.y.share ? { values: (plot, splits) => splits.map((one) => onTick(one, chart.y)) } : {}), size: (plot, values) => 16 + 7 * Math.max(3, ...(values || []).map((one) => String(one ?? "").length)), ...bare }),
      ],
      series,
      cursor: {
        drag: { x: !isScatter, y: false }, y: isScatter, points: { show: !isBars && !isScatter },
        focus: { prox: 1e6 },
      },
      hooks: {
        draw: [(plot) => markCutBars(plot, chart, font)],
        setCursor: [(plot) => moved(state, plot, xs, ys)],
        setScale: [(plot, name) => {
          if (name === "x" && plot.status === 1) {
            const { min, max } = plot.scales.x, [low, high] = xRange(chart, xs[0], xs[xs.length - 1]);
            state.zoom = min > low || max < high ? [min, max] : null;
          }
        }],
      },
    };
    const plot = new uPlot(options, data, box);
    plot.root.setAttribute("aria-hidden", "true");
    state.plot = plot;
    state.columns = { xs, ys, at };
    plot.over.addEventListener("dblclick", () => { state.zoom = null; });
    plot.over.addEventListener("mouseleave", () => { state.tip.hidden = true; });
  }

  /* Breaks the bars that reach beyond the plot by two lines in the colour of the page, and writes how long they are. */
  function markCutBars(plot, chart, font) {
    if (!chart.cut) return;
    const { ctx, bbox } = plot, unit = devicePixelRatio;
    const step = bbox.width / Math.max(1, plot.scales.x.max - plot.scales.x.min);
    const half = 0.5 * Math.max(unit, Math.min(46 * unit, 0.78 * step)) + 2 * unit;
    ctx.save();
    ctx.font = font.replace("12px", `${12 * unit}px`);
    ctx.textBaseline = "top";
    for (const [x, height] of chart.cut) {
      if (x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const middle = plot.valToPos(x, "x", true);
      ctx.strokeStyle = theme("sheet");
      ctx.lineWidth = 2.5 * unit;
      for (const below of [22, 28]) {
        ctx.beginPath();
        ctx.moveTo(middle - half, bbox.top + (below + 4) * unit);
        ctx.lineTo(middle + half, bbox.top + (below - 4) * unit);
        ctx.stroke();
      }
      ctx.fillStyle = theme("ink");
      const isRight = middle + half + 60 * unit > bbox.left + bbox.width;
      ctx.textAlign = isRight ? "right" : "left";
      ctx.fillText(withUnit(height, chart.y), middle + (isRight ? -half : half) , bbox.top + 2 * unit);
    }
    ctx.restore();
  }

  function xRange(chart, low, high) {
    if (!known(low) || !known(high)) return [0, 1];
    if (chart.kind === "bars") return [low - 0.6, high + 0.6];
    const room = chart.kind === "scatter" ? 0.05 * (high - low || 1) : low === high ? 0.5 : 0;
    return [known(chart.x.low) ? chart.x.low : low - room, known(chart.x.high) ? chart.x.high : high + room];
  }

  function stack(ys, isHidden) {
    const sums = [];
    const names = ys.length;
    for (let index = 0; index < names; index += 1) {
      const below = sums[index - 1];
      sums.push(ys[index].map((value, x) => (below ? below[x] || 0 : 0) + (isHidden(index) ? 0 : value || 0)));
    }
    return sums;
  }

  /* Points of all series by x; two with the same x keep apart, so each has a column of its own place. */
  function clouds(chart) {
    const points = chart.series.flatMap((one, index) => one.x.map((x, at) => [x, one.y[at], index]));
    points.sort((a, b) => a[0] - b[0]);
    const ys = chart.series.map((_, index) => points.map((point) => (point[2] === index ? point[1] : undefined)));
    return { xs: points.map((point) => point[0]), ys };
  }

  const SHAPES = ["dot", "square", "diamond"];

  function look(chart, one, index, count) {
    const stroke = () => theme(one.role);
    if (chart.kind === "bars") {
      const groups = chart.stacked ? 1 : chart.series.length;
      const paths = (plot, number, from, to) => {
        const step = plot.bbox.width / devicePixelRatio / Math.max(1, plot.scales.x.max - plot.scales.x.min);
        const width = Math.max(1, Math.min(46, (0.78 * step) / groups));
        const shift = chart.stacked ? 0 : (index - (groups - 1) / 2) * width;
        const disp = { x0: { unit: 3, values: (u) => u.data[0].map((x) => x - (width / 2 - shift) / step) }, size: { unit: 3, values: (u) => u.data[0].map(() => width / step) } };
        return uPlot.paths.bars({ disp })(plot, number, from, to);
      };
      return { fill: stroke, stroke: "transparent", width: 0, points: { show: false }, paths };
    }
    if (chart.kind === "scatter") {
      return { stroke, paths: () => null, points: { show: true, paths: shapes(SHAPES[index % SHAPES.length]), stroke, fill: stroke, size: 6, width: 0 } };
    }
    return {
      stroke, width: one.dashed ? 1.6 : 2.2, dash: one.dashed ? [5, 4] : undefined, spanGaps: false,
      points: { show: count <= 40 && !one.dashed, size: 5.5, fill: stroke, stroke, width: 0 },
    };
  }

  const shapes = (shape) => (plot, number, from, to) => {
    const path = new Path2D(), size = 3.4 * devicePixelRatio;
    for (let index = from; index <= to; index += 1) {
      const value = plot.data[number][index];
      if (!known(value)) continue;
      const x = plot.valToPos(plot.data[0][index], "x", true), y = plot.valToPos(value, "y", true);
      if (shape === "dot") { path.moveTo(x + size, y); path.arc(x, y, size, 0, 2 * Math.PI); }
      else if (shape === "square") path.rect(x - 0.85 * size, y - 0.85 * size, 1.7 * size, 1.7 * size);
      else { path.moveTo(x, y - 1.2 * size); path.lineTo(x + 1.2 * size, y); path.lineTo(x, y + 1.2 * size); path.lineTo(x - 1.2 * size, y); path.closePath(); }
    }
    return { stroke: path, fill: path, clip: null, flags: 3 };
  };

  function moved(state, plot, xs, ys) {
    const { left, top } = plot.cursor, chart = state.chart;
    let { idx } = plot.cursor;
    if (!known(idx) || left < 0) { state.tip.hidden = true; return; }
    if (chart.kind === "scatter") idx = nearest(plot, xs, ys, left, top, state);
    if (!known(idx)) { state.tip.hidden = true; return; }
    state.index = idx;
    const lines = reading(state, idx);
    const heading = chart.bare ? [] : [make("p", "", `${chart.x.label} ${withUnit(xs[idx], chart.x)}`)];
    state.tip.replaceChildren(...heading, ...lines.map(([one, value]) => {
      const line = make("p");
      line.append(sign(one.role, shapeOf(chart, one)), make("span", "", one.name));
      if (!chart.bare) line.append(make("b", "", withUnit(value, chart.y)));
      return line;
    }));
    state.tip.hidden = lines.length === 0;
    const beside = plot.over.offsetLeft + plot.valToPos(xs[idx], "x");
    const room = state.tip.offsetWidth + 16;
    state.tip.style.left = `${beside + room > state.box.clientWidth ? Math.max(0, beside - room) : beside + 14}px`;
    state.tip.style.top = `${plot.over.offsetTop + 8}px`;
  }

  function nearest(plot, xs, ys, left, top, state) {
    if (state.byKey) return state.index;
    let best = null, distance = 24 ** 2;
    xs.forEach((x, index) => {
      const values = ys.find((one) => known(one[index]));
      if (!values) return;
      const far = (plot.valToPos(x, "x") - left) ** 2 + (plot.valToPos(values[index], "y") - top) ** 2;
      if (far < distance) [best, distance] = [index, far];
    });
    return best;
  }

  function reading(state, index) {
    const { ys } = state.columns;
    return state.chart.series
      .map((one, number) => [one, ys[number][index]])
      .filter(([one, value]) => known(value) && !state.hidden.has(one.name));
  }

  function shapeOf(chart, one) {
    if (chart.kind === "scatter") return SHAPES[chart.series.indexOf(one) % SHAPES.length];
    return chart.kind === "bars" ? "bar" : one.dashed ? "dashed" : "";
  }

  function pressed(state, event) {
    const { plot, columns: { xs, ys } } = state, last = xs.length - 1;
    const now = known(state.index) ? state.index : event.key === "ArrowLeft" || event.key === "PageUp" ? last + 1 : -1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") {
      state.zoom = null;
      state.index = null;
      plot.setData(plot.data);
      plot.setCursor({ left: -10, top: -10 });
      return;
    }
    if (!(event.key in steps) || last < 0) return;
    event.preventDefault();
    state.index = Math.min(last, Math.max(0, now + steps[event.key]));
    const lines = reading(state, state.index), { chart } = state;
    const top = lines.length ? plot.valToPos(lines[0][1], "y") : 1;
    state.byKey = true;
    plot.setCursor({ left: plot.valToPos(xs[state.index], "x"), top });
    state.byKey = false;
    say(state, `${chart.x.label} ${withUnit(xs[state.index], chart.x)}: ` +
      lines.map(([one, value]) => `${one.name} ${withUnit(value, chart.y)}`).join("; "));
  }

  function drawCurves(state) {
    const chart = state.chart, { box } = state;
    const canvas = make("div", "canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "group");
    canvas.setAttribute("aria-label", `${chart.title}: plot; arrow keys, Home and End read its values`);
    state.tip = make("div", "tip");
    state.tip.hidden = true;
    state.tip.setAttribute("aria-hidden", "true");
    state.live = make("p", "unseen");
    state.live.setAttribute("aria-live", "polite");
    const again = () => {
      if (state.plot) state.plot.destroy();
      drawPlot(state, canvas);
      canvas.append(state.tip);
    };
    const controls = make("ul", "controls");
    controls.setAttribute("aria-label", "Series and options");
    for (const one of chart.series) {
      controls.append(toggle(one.name, !state.hidden.has(one.name), (isShown) => {
        state.hidden[isShown ? "delete" : "add"](one.name);
        again();
      }, sign(one.role, shapeOf(chart, one))));
    }
    if (chart.y.can_log) controls.append(toggle("log", state.isLog, (isOn) => { state.isLog = isOn; again(); }));
    if (chart.kind === "lines" && chart.series.some((one) => one.x.length >= LEAST_SMOOTHED)) {
      controls.append(toggle("smooth", state.isSmooth, (isOn) => { state.isSmooth = isOn; again(); }));
    }
    box.append(canvas, controls, state.live);
    canvas.addEventListener("keydown", (event) => pressed(state, event));
    canvas.addEventListener("blur", () => { state.tip.hidden = true; });
    again();
    state.again = again;
    state.watch = new ResizeObserver(() => {
      if (canvas.clientWidth && Math.abs(canvas.clientWidth - state.plot.width) > 1) again();
    });
    state.watch.observe(canvas);
  }

  /* ---- rows of marks, bars or spans ---- */

  function ticks(low, high, wanted = 5) {
    const raw = (high - low || 1) / wanted, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9));
    const result = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + 1e-9 * step; number += 1) result.push(number * step);
    return result;
  }

  function extent(axis, values) {
    const all = values.filter(known);
    const low = known(axis.low) ? axis.low : Math.min(0, ...all);
    const high = known(axis.high) ? axis.high : Math.max(...all, low);
    return [low, high > low ? high : low + 1];
  }

  function piece(className, from, to = null) {
    const one = make("i", className);
    one.style.left = `${100 * from}%`;
    if (to !== null) one.style.width = `${Math.max(0, 100 * (to - from))}%`;
    return one;
  }

  function drawRows(state) {
    const chart = state.chart, isTimeline = chart.kind === "timeline", axis = isTimeline ? chart.x : chart.value;
    const values = chart.rows.flatMap((row) => isTimeline
      ? row.spans.flatMap((one) => [one.begin, one.end])
      : Object.values(row.marks).flat());
    const [low, high] = extent(axis, values);
    const at = (value) => Math.min(1, Math.max(0, (value - low) / (high - low)));
    const lines = ticks(low, high);
    const list = make("ul", "rows");
    const said = isTimeline ? [] : chart.keys.filter((key) => !key.quiet && chart.rows.some((row) => row.marks[key.name]));
    if (said.length > 1) { // what the numbers beside the marks are
      const head = make("li", "axis head");
      head.append(make("span"), make("span"), make("span", "values", said.map((key) => key.name).join(" → ")));
      list.append(head);
    }
    for (const row of chart.rows) {
      const item = make("li"), track = make("div", "track"), name = make("span", "name", row.name);
      name.title = row.name;
      track.setAttribute("aria-hidden", "true");
      track.append(...lines.map((tick) => piece("grid", at(tick))));
      const said = isTimeline ? spans(row, track, at, high, axis) : marks(chart, row, track, at);
      item.append(name, track, make("span", isTimeline ? "unseen" : "values", said));
      if (row.note) item.append(make("span", `note ${row.tone ? `is-${row.tone}` : ""}`, row.note));
      list.append(item);
    }
    const foot = make("li", "axis"), numbers = make("div", "ticks");
    foot.setAttribute("aria-hidden", "true");
    numbers.append(...lines.map((tick) => {
      const one = make("span", "", onTick(tick, axis));
      one.style.left = `${100 * at(tick)}%`;
      return one;
    }));
    foot.append(make("span"), numbers, make("span"));
    list.append(foot);
    state.box.append(list, make("div", "axis-label", axisText(axis)));
    const keys = isTimeline ? [] : chart.keys;
    if (keys.length > 1) {
      const legend = make("ul", "controls");
      legend.setAttribute("aria-label", "Legend");
      for (const key of keys) {
        const item = make("li", "key");
        item.append(sign(key.role, key.shape), key.name);
        legend.append(item);
      }
      state.box.append(legend);
    }
  }

  function marks(chart, row, track, at) {
    const present = chart.keys.filter((key) => row.marks[key.name]);
    const places = present.map((key) => at(row.marks[key.name][0]));
    if (chart.style === "bars") {
      const room = 26 / Math.max(1, present.length);
      present.forEach((key, index) => {
        const bar = piece(`bar is-${key.role}`, at(Math.min(0, row.marks[key.name][0])), places[index]);
        bar.style.top = `${room * (index + 0.5)}px`;
        bar.style.height = `${Math.min(15, 0.8 * room)}px`;
        track.append(bar);
      });
    } else {
      if (places.length > 1) track.append(piece("link", Math.min(...places), Math.max(...places)));
      present.forEach((key) => {
        const [, low, high] = row.marks[key.name];
        if (known(low) && known(high)) track.append(piece(`interval is-${key.role}`, at(low), at(high)));
      });
      present.forEach((key, index) => track.append(piece(`mark is-${key.role} ${key.shape}`, places[index])));
    }
    return present.filter((key) => !key.quiet).map((key) => withUnit(row.marks[key.name][0], chart.value)).join(" → ");
  }

  function spans(row, track, at, now, axis) {
    return row.spans.map((one) => {
      const isOpen = !known(one.end);
      const bar = piece(`span is-${one.role}${isOpen ? " open" : ""}`, at(one.begin), at(isOpen ? now : one.end));
      bar.title = `${one.text}: ${withUnit(one.begin, axis)} to ${isOpen ? "now" : withUnit(one.end, axis)}`;
      track.append(bar);
      return bar.title;
    }).join("; ");
  }

  /* ---- matrix ---- */

  function drawMatrix(state) {
    const chart = state.chart, isDense = chart.columns.length > 14;
    const scroll = make("div", "scroll"), table = make("table", isDense ? "matrix dense" : "matrix");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", chart.title);
    const heads = make("tr");
    heads.append(make("td", "empty"));
    const named = (className, name) => {
      const head = make("th", "", name);
      head.scope = className;
      head.title = name;
      return head;
    };
    heads.append(...chart.columns.map((name) => named("col", name)));
    const head = make("thead"), body = make("tbody");
    head.append(heads);
    chart.values.forEach((line, index) => {
      const row = make("tr");
      row.append(named("row", chart.rows[index]));
      line.forEach((value, column) => {
        const cell = make("td", known(value) ? "" : "empty", known(value) ? (chart.zero && value === 0 ? chart.zero : value.toFixed(chart.digits)) : "–");
        const share = known(value) ? Math.min(1, Math.max(0, (value - chart.low) / (chart.high - chart.low || 1))) : 0;
        cell.style.setProperty("--share", share.toFixed(3));
        cell.title = `${chart.row_label} ${chart.rows[index]}, ${chart.column_label} ${chart.columns[column]}: ${digits(value)}`;
        row.append(cell);
      });
      body.append(row);
    });
    table.append(head, body);
    scroll.append(table);
    state.box.append(scroll, make("div", "axis-label", `rows: ${chart.row_label}; columns: ${chart.column_label}`));
  }

  /* ---- figures ---- */

  const DRAWERS = { lines: drawCurves, bars: drawCurves, scatter: drawCurves, rows: drawRows, timeline: drawRows, matrix: drawMatrix };

  function redraw(figure, chart) {
    const box = figure.querySelector(":scope > .plot"), before = shown.get(figure);
    const hadFocus = before && before.box.contains(document.activeElement) && document.activeElement.className === "canvas";
    if (before && before.watch) before.watch.disconnect();
    if (before && before.plot) before.plot.destroy();
    box.replaceChildren();
    const choices = before || { hidden: new Set(), isLog: Boolean(chart.y && chart.y.log), isSmooth: false, zoom: null, index: null };
    const state = { chart, box, hidden: choices.hidden, isLog: choices.isLog, isSmooth: choices.isSmooth, zoom: choices.zoom, index: choices.index };
    shown.set(figure, state);
    (DRAWERS[chart.kind] || (() => {}))(state);
    if (hadFocus) box.querySelector(".canvas")?.focus({ preventScroll: true });
  }

  function fillTable(figure, table) {
    const target = figure.querySelector(":scope > details.data table");
    if (!target || !table) return;
    const head = make("thead"), heads = make("tr"), body = make("tbody");
    heads.append(...table.columns.map((name) => { const cell = make("th", "", name); cell.scope = "col"; return cell; }));
    head.append(heads);
    for (const values of table.rows) {
      const row = make("tr");
      row.append(...values.map((value) => make("td", "", value)));
      body.append(row);
    }
    target.replaceChildren(head, body);
  }

  function update(figureId, chart) {
    const figure = document.getElementById(figureId);
    if (!figure) return;
    figure.setAttribute("aria-label", chart.summary);
    const heading = figure.querySelector(":scope > h2, :scope > h3, :scope > h4"), caption = figure.querySelector(":scope > figcaption");
    if (heading) heading.textContent = chart.title;
    if (caption) caption.textContent = chart.caption;
    redraw(figure, chart);
    fillTable(figure, chart.table);
  }

  function draw(root = document) {
    for (const figure of root.querySelectorAll("figure.chart")) {
      const data = figure.querySelector(':scope > script[type="application/json"]');
      if (data && !shown.has(figure)) redraw(figure, JSON.parse(data.textContent));
    }
    for (const figure of shown.keys()) if (!figure.isConnected) shown.delete(figure);
  }

  function repaint() {
    for (const state of shown.values()) if (state.plot) state.plot.redraw(true, true);
  }

  window.headwaterCharts = { draw, update };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => draw());
  else draw();
})();
