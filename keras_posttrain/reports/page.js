"use strict";
// Draws the page from the data in it. All texts of a run are set as
// `textContent`; nothing is ever parsed as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const SVG = "http://www.w3.org/2000/svg";
const KEY = "report:" + location.pathname;
const state = Object.assign(
  { smooth: 0.6, x: "step", log: false, find: "", run: 0, view: "group",
    shade: "", order: "new", step: "", row: "", ended: "", advantage: "",
    low: "", high: "", item: "", paused: false, from: null, width: null,
    scroll: 0 },
  load(),
);

function load() {
  try { return JSON.parse(sessionStorage.getItem(KEY)) || {}; }
  catch { return {}; }
}
function save() {
  state.scroll = scrollY;
  try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch {}
}
addEventListener("pagehide", save);

function add(parent, ...children) {
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
  return parent;
}
function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.setAttribute("class", value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name in node && !(node instanceof SVGElement)) node[name] = value;
    else node.setAttribute(name, value);
  }
  return node;
}
const el = (tag, attributes = {}, ...children) =>
  add(set(document.createElement(tag), attributes), children);
const svg = (tag, attributes = {}, ...children) =>
  add(set(document.createElementNS(SVG, tag), attributes), children);

function num(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (typeof x !== "number") return String(x);
  const a = Math.abs(x);
  if (a && (a < 1e-3 || a >= 1e6)) return x.toExponential(2);
  if (Number.isInteger(x)) return x.toLocaleString("en");
  return String(Number(x.toPrecision(4)));
}
function time(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return Math.round(s * 1000) + " ms";
  if (s < 90) return Number(s.toPrecision(3)) + " s";
  const m = Math.floor(s / 60), h = Math.floor(m / 60);
  if (!h) return m + " min " + Math.round(s % 60) + " s";
  return h < 48 ? h + " h " + (m % 60) + " min"
    : Math.floor(h / 24) + " d " + (h % 24) + " h";
}
function bytes(n) {
  if (n === null || n === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < 4) { n /= 1024; i++; }
  return Number(n.toPrecision(3)) + " " + units[i];
}
const color = (i) => "var(--c" + (i % 8) + ")";
const NAMES = RUNS.map((run, i) => run.name || "run " + (i + 1));
const MANY = RUNS.length > 1;

// The tip beside the pointer.
const tip = el("div", { class: "tip" });
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 12, innerWidth - box.width - 6);
  const below = event.clientY + 16 + box.height < innerHeight;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (below ? event.clientY + 16
    : event.clientY - box.height - 10) + "px";
}
const hideTip = () => { tip.style.display = "none"; };

// Head: what the run is, and how it goes.
function status(run) {
  const about = run.about;
  const silent = Date.now() / 1000 - about.written;
  if (about.status === "running" && silent > 4 * about.every + 60) {
    return ["stale", "no news for " + time(silent)];
  }
  return [about.status, about.status];
}
function last(run, name) {
  const at = run.curves.names.indexOf(name), rows = run.curves.rows;
  for (let i = rows.length - 1; i >= 0 && at >= 0; i--) {
    const value = rows[i][at + 2];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}
const FIGURES = ["reward", "loss", "rewards/accuracies", "accuracy",
  "divergence", "mean_token_accuracy", "kl", "entropy",
  "completions/mean_length", "grad_norm", "learning_rate"];
function head(run, i) {
  const about = run.about, what = (run.environment || {}).run || {};
  const [kind, text] = status(run);
  const title = [what.task, what.preset || what.model].filter(Boolean);
  const rows = run.curves.rows, left = remaining(run);
  const figures = [["step", num(about.step ?? 0) +
    (about.last ? " of " + num(about.last) : "")],
    ["time", time(about.elapsed)], left ? ["left, about", time(left)] : null];
  for (const name of FIGURES) {
    const value = last(run, name);
    if (value !== null && figures.length < 10) figures.push([
      name.replace("completions/", "").replaceAll("_", " "), num(value)]);
  }
  const name = MANY ? NAMES[i] : title.join(" · ") || NAMES[i];
  return el("section", { class: "card", style: { marginTop: "12px" } },
    el("div", { class: "row" },
      MANY && el("i", { style: { background: color(i), width: "14px",
        height: "4px", display: "inline-block" } }),
      el("h1", {}, name), el("span", { class: "pill " + kind }, text),
      about.activity && el("span", { class: "soft" }, about.activity)),
    el("div", { class: "soft small" },
      MANY && title.length ? title.join(" · ") + " · " : "",
      "begun ", new Date(about.started * 1000).toLocaleString(),
      ", written ", new Date(about.written * 1000).toLocaleString(),
      about.resumed && about.resumed.length
        ? ", resumed after step " + about.resumed.join(", ") : ""),
    about.last ? el("div", { class: "bar" }, el("div", { style: {
      width: Math.min(100, 100 * (about.step || 0) / about.last) + "%",
    } })) : null,
    about.error && el("p", { class: "error-text" }, about.error),
    el("div", { class: "figures" }, figures.filter(Boolean).map(([k, v]) =>
      el("div", {}, el("span", { class: "soft small" }, k), el("b", {}, v)))),
    rows.length ? null : el("p", { class: "soft" },
      "No step is done yet; the first one compiles."));
}
function remaining(run) {
  const { step, last: end, status: now } = run.about, rows = run.curves.rows;
  if (!end || now !== "running" || rows.length < 3 || step >= end) return null;
  const b = rows[rows.length - 1];
  const a = rows[Math.max(1, Math.floor(rows.length / 2))];
  return b[0] > a[0] ? (end - step) * (b[1] - a[1]) / (b[0] - a[0]) : null;
}

// Diagnoses.
function findings() {
  const all = RUNS.flatMap((run, i) =>
    (run.diagnoses || []).map((d) => [d, i]));
  if (!all.length) {
    return el("p", { class: "soft" },
      "No rule has found anything. Rules look at metrics alone: read samples.");
  }
  return all.map(([d, i]) => el("div", { class: "finding " + d.level },
    el("p", {}, el("b", {}, MANY ? NAMES[i] + ": " + d.name : d.name), " ",
      d.last === 0 ? null : el("span", { class: "soft small" },
        d.first === d.last ? "step " + num(d.last) : "steps " + num(d.first) + " to " +
        num(d.last))),
    el("p", {}, d.text), el("p", {}, el("b", {}, "Try: "), d.advice)));
}

// Curves.
const std = (name) => name.replace(/mean$/, "std");
const PANELS = [
  ["Reward", ["reward"], () => "reward_std"],
  ["Rewards by function", /^rewards\/.+\/mean$/, std],
  ["Right answers", ["pass@1"]],
  ["Loss", ["loss", "policy_loss", "hard_loss", "nll_loss"]],
  ["Perplexity", ["perplexity"]],
  ["Accuracy", ["rewards/accuracies", "accuracy", "mean_token_accuracy"]],
  ["Margin", ["rewards/margins", "margin"]],
  ["Rewards of the pair", ["rewards/chosen", "rewards/rejected"]],
  ["Log-probabilities of the pair", ["logps/chosen", "logps/rejected"]],
  ["Divergence from the teacher", ["divergence", "reverse_kl"]],
  ["Agreement with the teacher", ["agreement"]],
  ["KL divergence from the reference", ["kl"]],
  ["Entropy", ["entropy"]],
  ["Length of completions", ["completions/mean_length",
    "completions/min_length", "completions/max_length"]],
  ["Cut off at the limit", ["completions/clipped_ratio"]],
  ["Groups with equal rewards", ["frac_reward_zero_std"]],
  ["Gradient norm", ["grad_norm"]],
  ["Learning rate", ["learning_rate"]],
  ["Clipped ratios", /^clip_ratio\/(low|high|region)_mean$/],
  ["Engine against trainer", ["sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max"]],
  ["Ratio of trainer to engine", /^sampling\/importance_sampling_ratio\//],
  ["Staleness", ["staleness/mean", "staleness/max"]],
  ["Turns", ["episodes/turns"]],
  ["Tool calls", ["tools/calls", "tools/unreadable", "tools/errors"]],
  ["Seconds", /^(time|tools)\/(rollout|reward|train|sync|wait|seconds)$/],
  ["Tokens of a step", ["num_tokens"]],
  ["Skipped steps", ["skipped"]],
];
function panels() {
  const names = new Set(RUNS.flatMap((r) => r.curves.names.concat(
    r.validation.names.map((n) => n.replace(/^val_/, "")))));
  const found = [], used = new Set();
  for (const [title, match, band] of PANELS) {
    const own = Array.isArray(match) ? match.filter((n) => names.has(n))
      : [...names].filter((n) => match.test(n) && !used.has(n)).sort();
    own.forEach((n) => { used.add(n); if (band) used.add(band(n)); });
    if (own.length) found.push({ title, names: own, band });
  }
  const rest = {};
  for (const name of [...names].filter((n) => !used.has(n)).sort()) {
    const group = name.includes("/") ? name.replace(/\/[^/]*$/, "") : name;
    (rest[group] = rest[group] || []).push(name);
  }
  for (const [title, own] of Object.entries(rest)) {
    if (own.length > 4) own.forEach((n) => found.push({ title: n,
      names: [n] }));
    else found.push({ title: own.length > 1 ? title : own[0], names: own });
  }
  return found;
}
function column(table, name) {
  const at = table.names.indexOf(name);
  if (at < 0) return null;
  return table.rows.map((row) => row[at + 2] ?? null);
}
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = state.smooth * sum + (1 - state.smooth) * v;
    weight = state.smooth * weight + (1 - state.smooth);
    return sum / weight;
  });
}
function series(panel) {
  const found = [];
  RUNS.forEach((run, r) => panel.names.forEach((name, n) => {
    const base = MANY && panel.names.length === 1 ? r : n;
    const dash = MANY && panel.names.length > 1 && r ? "6 " + 2 * r : "";
    const label = (MANY ? NAMES[r] + ": " : "") + name;
    const at = state.x === "step" ? 0 : 1;
    const raw = column(run.curves, name);
    if (raw && raw.some((v) => v !== null)) {
      const spread = panel.band && column(run.curves, panel.band(name));
      found.push({ label, raw, y: smoothed(raw), dash, color: color(base),
        x: run.curves.rows.map((row) => row[at]),
        spread: spread && smoothed(spread) });
    }
    // Of a mean alone, not of its limits.
    const held = /\/(min|max)_|\/std$/.test(name) ? null
      : column(run.validation, "val_" + name);
    if (held && held.some((v) => v !== null)) {
      found.push({ label: label + ", held out", raw: held, y: held, dots: true,
        color: color(base + (MANY ? 0 : 4)), dash: "2 3",
        x: run.validation.rows.map((row) => row[at]) });
    }
  }));
  return found;
}
function ticks(low, high, count) {
  const span = high - low || 1, raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step / 1e6; t += step)
    found.push(Math.abs(t) < step / 1e6 ? 0 : t);
  return found;
}
function draw(box, panel) {
  const all = series(panel), width = Math.max(box.clientWidth, 200);
  const height = 170, left = 46, right = 10, top = 8, bottom = 20;
  const isLog = state.log && all.every((s) =>
    s.raw.every((v) => v === null || v > 0));
  const f = isLog ? Math.log10 : (v) => v;
  let low = Infinity, high = -Infinity, x0 = Infinity, x1 = -Infinity;
  for (const s of all) {
    s.x.forEach((x) => { x0 = Math.min(x0, x); x1 = Math.max(x1, x); });
    const known = s.raw.filter((v) => v !== null).map(f).sort((a, b) => a - b);
    // A few spikes do not flatten the rest; they leave the panel at its edge.
    const cut = known.length > 100 ? Math.floor(known.length / 200) : 0;
    low = Math.min(low, known[cut]);
    high = Math.max(high, known[known.length - 1 - cut]);
    if (s.spread && !isLog) s.y.forEach((v, i) => {
      if (v === null || s.spread[i] === null) return;
      low = Math.min(low, v - s.spread[i]);
      high = Math.max(high, v + s.spread[i]);
    });
  }
  if (!(high > low)) { const d = Math.abs(low) / 10 || 1; low -= d; high += d; }
  const pad = (high - low) * 0.06;
  low -= pad; high += pad;
  if (!(x1 > x0)) { x0 -= 1; x1 += 1; }
  const X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = (v) => top + (1 - (Math.min(Math.max(f(v), low), high) - low) /
    (high - low)) * (height - top - bottom);
  const path = (xs, ys) => {
    let d = "", pen = "M";
    ys.forEach((v, i) => {
      if (v === null) { pen = "M"; return; }
      d += pen + X(xs[i]).toFixed(1) + " " + Y(v).toFixed(1);
      pen = "L";
    });
    return d;
  };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`,
    role: "img", "aria-label": panel.title });
  for (const t of ticks(low, high, 4)) {
    const y = top + (1 - (t - low) / (high - low)) * (height - top - bottom);
    add(picture, svg("line", { x1: left, x2: width - right, y1: y, y2: y,
      stroke: "var(--line)" }), svg("text", { x: left - 6, y: y + 3,
      "text-anchor": "end" }, num(Number((isLog ? 10 ** t : t)
      .toPrecision(3)))));
  }
  for (const t of ticks(x0, x1, Math.max(2, Math.floor(width / 110)))) {
    add(picture, svg("text", { x: X(t), y: height - 5,
      "text-anchor": "middle" }, state.x === "step" ? num(t) : time(t)));
  }
  for (const s of all) {
    if (s.spread && !isLog) {
      const known = s.y.map((v, i) => i).filter((i) =>
        s.y[i] !== null && s.spread[i] !== null);
      const edge = (sign) => known.map((i) => X(s.x[i]).toFixed(1) + " " +
        Y(s.y[i] + sign * s.spread[i]).toFixed(1));
      add(picture, svg("path", { fill: s.color, opacity: 0.14,
        d: "M" + edge(1).concat(edge(-1).reverse()).join("L") + "Z" }));
    }
    if (state.smooth > 0 && !s.dots) add(picture, svg("path", { fill: "none",
      stroke: s.color, opacity: 0.25, d: path(s.x, s.raw) }));
    add(picture, svg("path", { fill: "none", stroke: s.color,
      "stroke-width": 1.8, "stroke-dasharray": s.dash,
      "stroke-linejoin": "round", d: path(s.x, s.y) }));
    const only = s.y.filter((v) => v !== null).length === 1;
    if (s.dots || only) s.y.forEach((v, i) => v !== null && add(picture,
      svg("circle", { cx: X(s.x[i]), cy: Y(v), r: 2.5, fill: s.color })));
  }
  const ruler = svg("line", { y1: top, y2: height - bottom,
    stroke: "var(--soft)", visibility: "hidden" });
  const legend = el("div", { class: "legend" });
  const describe = (at) => {
    legend.replaceChildren(...all.map((s) => {
      let i = s.y.length - 1;
      if (at !== null) while (i > 0 && s.x[i] > at) i--;
      else while (i > 0 && s.y[i] === null) i--;
      const spread = s.spread && s.spread[i] !== null
        ? " ± " + num(s.spread[i]) : "";
      return el("span", {}, el("i", { style: { background: s.color } }),
        s.label + " ", num(s.raw[i]) + spread);
    }), at === null ? "" : el("span", {}, state.x === "step"
      ? "step " + num(at) : "at " + time(at)));
  };
  picture.addEventListener("pointermove", (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    let best = null;
    for (const s of all) for (const x of s.x)
      if (best === null || Math.abs(X(x) - at) < Math.abs(X(best) - at))
        best = x;
    if (best === null) return;
    set(ruler, { x1: X(best), x2: X(best), visibility: "visible" });
    describe(best);
  });
  picture.addEventListener("pointerleave", () => {
    set(ruler, { visibility: "hidden" });
    describe(null);
  });
  add(picture, ruler);
  describe(null);
  box.replaceChildren(el("h3", {}, panel.title), picture, legend);
}
function curves() {
  const every = panels(), grid = el("div", { class: "grid" });
  const note = el("p", { class: "soft small" });
  let boxes = [];
  const redraw = () => boxes.forEach(([box, panel]) => draw(box, panel));
  const build = () => {
    boxes = every.filter((p) => !state.find || [p.title, ...p.names].some(
      (n) => n.toLowerCase().includes(state.find.toLowerCase())))
      .map((panel) => [el("div", { class: "card chart" }), panel]);
    grid.replaceChildren(...boxes.map(([box]) => box));
    redraw();
  };
  const stride = Math.max(...RUNS.map((r) => r.curves.stride));
  note.textContent = stride > 1 ? "Every " + stride + "th step is shown, and " +
    "the last; diagnoses saw all of them." : "";
  let wide = 0;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (grid.clientWidth && grid.clientWidth !== wide) {
      wide = grid.clientWidth;
      boxes.length ? redraw() : build();
    }
  })).observe(grid);
  return [el("div", { class: "controls" },
    el("label", {}, "smoothing", el("input", { type: "range", min: 0,
      max: 0.98, step: 0.02, value: state.smooth, oninput: (e) => {
        state.smooth = Number(e.target.value); redraw();
      } })),
    choice("by", [["step", "step"], ["time", "time"]], "x", redraw),
    el("label", {}, el("input", { type: "checkbox", checked: state.log,
      onchange: (e) => { state.log = e.target.checked; redraw(); } }),
      "logarithmic"),
    el("label", {}, "find", el("input", { value: state.find,
      placeholder: "metric", style: { width: "110px" }, oninput: (e) => {
        state.find = e.target.value; build();
      } }))), grid, note];
}
function choice(label, options, key, changed) {
  return el("label", {}, label, el("select", { onchange: (e) => {
    state[key] = e.target.value; changed();
  } }, options.map(([value, text]) => el("option", { value,
    selected: String(state[key]) === String(value) }, text))));
}

// Samples.
const each = (values, i) => Array.isArray(values) ? values[i] : values;
// The tokens of a segment: id, text and what is known of each.
function tokens(run, group, segment) {
  const words = run.samples.words, found = [], fields = ["turn", "mask",
    "version", "logp", "old", "ref", "advantage", "value"];
  if (segment.same) {
    const first = group.items.find((x) => x.segments && x.segments.length);
    found.push(...tokens(run, group, first.segments[0])
      .slice(0, segment.same));
  }
  const whole = {};
  for (const [at, size, text] of segment.whole || []) {
    for (let i = 0; i < size; i++) whole[at + i] = i ? "" : text;
  }
  segment.ids.forEach((id, i) => {
    if (segment.cut && i === segment.head) found.push({ cut: segment.cut });
    const token = { id, text: whole[i] ?? words[id] ?? "⟨" + id + "⟩" };
    for (const f of fields) {
      const value = each(segment[f], i);
      if (value !== undefined && value !== null)
        token[f] = ["turn", "version"].includes(f) ? value : value / 1000;
    }
    found.push(token);
  });
  return found;
}
function writer(token, before) {
  if (token.turn === undefined) return token.mask ? "trained on" : "context";
  if (token.turn >= 0) return "policy, turn " + (token.turn + 1);
  return before ? "prompt" : "between turns: user, tools or template";
}
const trainers = (t) => t.old ?? t.logp;
const SHADES = {
  writer: ["who wrote it", (t) => t.turn !== undefined],
  mask: ["weight in the loss", (t) => t.mask !== undefined],
  logp: ["log-probability by the engine", (t) => t.logp !== undefined],
  ratio: ["ratio of trainer to engine", (t) => t.old !== undefined &&
    t.logp !== undefined],
  ref: ["ratio to the reference", (t) => t.ref !== undefined &&
    trainers(t) !== undefined],
  refp: ["log-probability by the reference", (t) => t.ref !== undefined &&
    trainers(t) === undefined],
  advantage: ["advantage", (t) => t.advantage !== undefined && t.mask],
  value: ["value", (t) => t.value !== undefined],
  version: ["version of the weights", (t) => t.version >= 0],
};
const warm = (a) => `rgba(230, 90, 30, ${Math.min(Math.max(a, 0), 1) * 0.75})`;
const cool = (a) => `rgba(40, 120, 230, ${Math.min(Math.max(a, 0), 1) * 0.7})`;
const both = (v) => v >= 0 ? cool(v) : warm(-v);
function shade(name, t, before, scale) {
  switch (name) {
    case "writer": return t.turn >= 0 ? cool(0.35)
      : before ? "" : "rgba(190, 150, 30, 0.25)";
    case "mask": return t.mask ? cool(0.4 * Math.abs(t.mask)) : "";
    case "logp": return t.logp === undefined ? "" : warm(1 - Math.exp(t.logp));
    case "refp": return t.ref === undefined ? "" : warm(1 - Math.exp(t.ref));
    case "ratio": return SHADES.ratio[1](t) ? both((t.old - t.logp) * 2) : "";
    case "ref": return SHADES.ref[1](t) ? both((trainers(t) - t.ref) / 2) : "";
    case "advantage": return SHADES.advantage[1](t)
      ? both(t.advantage / scale) : "";
    case "value": return t.value === undefined ? "" : both(t.value / scale);
    case "version": return t.version >= 0
      ? `hsla(${(t.version * 67) % 360}, 70%, 50%, 0.3)` : "";
  }
  return "";
}
function explain(t, before) {
  if (t.cut) return t.cut + " tokens are not kept";
  const lines = ["token " + t.id + " " + JSON.stringify(t.text),
    writer(t, before)];
  const say = (name, v) => v !== undefined && lines.push(name + " " + num(v));
  if (t.logp !== undefined) lines.push("log-probability " + num(t.logp) +
    " (" + num(100 * Math.exp(t.logp)) + " %)");
  say("by the trainer", t.old);
  say("by the reference", t.ref);
  if (SHADES.ratio[1](t)) say("trainer / engine", Math.exp(t.old - t.logp));
  if (t.mask !== undefined && t.mask) say("advantage", t.advantage);
  say("value", t.value);
  say("weight in the loss", t.mask);
  if (t.version >= 0) say("version of the weights", t.version);
  return lines.join("\n");
}
function sampleCard(run, entry, group, item, isChosen) {
  const lists = (item.segments || []).map((s) => tokens(run, group, s));
  for (const t of lists.flat()) {
    if (t.advantage === undefined && t.mask && item.advantage !== undefined &&
        item.advantage !== null) t.advantage = item.advantage;
  }
  const all = lists.flat();
  const scale = Math.max(1e-9, ...all.map((t) => Math.abs(
    state.shade === "value" ? t.value || 0 : t.mask && t.advantage || 0)));
  const texts = lists.map((list, s) => {
    let before = true;
    const box = el("div", { class: "text" }, s ? el("div", {
      class: "soft small" }, "segment " + (s + 1)) : null);
    const shown = list.map((t) => {
      if (t.turn >= 0) before = false;
      const isContext = t.turn === undefined ? !t.mask : t.turn < 0;
      const span = el("span", { class: isContext ? "context" : "" },
        t.cut ? " … " + t.cut + " tokens … " : t.text);
      span.style.background = t.cut ? "" : shade(state.shade, t, before,
        scale);
      span.about = [t, before];
      return span;
    });
    // A long prompt is folded: what was written is of more interest.
    const first = list.findIndex((t) => t.turn === undefined ? t.mask
      : t.turn >= 0);
    const hidden = first > 60 ? first - 24 : 0;
    if (hidden) {
      const fold = el("button", { class: "small", onclick: () =>
        fold.replaceWith(...shown.slice(0, hidden)) },
        num(hidden) + " tokens before: show");
      add(box, fold, " ");
    }
    add(box, shown.slice(hidden));
    box.addEventListener("pointermove", (e) => e.target.about
      ? showTip(e, explain(...e.target.about)) : hideTip());
    box.addEventListener("pointerleave", hideTip);
    return box;
  });
  if (item.text !== undefined) texts.push(el("div", { class: "text" },
    plainText(item.text)));
  const facts = [["reward", item.reward], ["advantage", item.advantage],
    ["ended", item.ended], ["tokens", item.length],
    item.turns > 1 ? ["turns", item.turns] : null,
    item.player ? ["player", item.player] : null];
  return el("div", { class: "card sample", style: isChosen
    ? { borderColor: "var(--c0)" } : {} },
    el("div", { class: "row small" },
      item.side && el("span", { class: "pill" }, item.side),
      state.view === "steps" ? el("b", {}, "step " + num(entry.step)) : null,
      facts.filter((x) => x && x[1] !== undefined && x[1] !== null).map(
        ([k, v]) => el("span", {}, el("span", { class: "soft" }, k + " "),
          el("b", {}, num(v))))),
    item.rewards && el("div", { class: "row small soft" },
      Object.entries(item.rewards).filter(([, v]) => v !== null).map(
        ([k, v]) => el("span", {}, k + " " + num(v)))),
    item.error && el("p", { class: "error-text" }, item.error), texts);
}
function plainText(value) {
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.every((m) => m && m.role)) {
    return value.map((m) => m.role + ": " + (typeof m.content === "string"
      ? m.content : JSON.stringify(m.content))).join("\n");
  }
  return JSON.stringify(value);
}
function preview(run, group, item) {
  if (item.text !== undefined) return plainText(item.text).slice(0, 90);
  const list = (item.segments || []).flatMap((s) => tokens(run, group, s));
  const own = list.filter((t) => t.turn === undefined ? t.mask : t.turn >= 0);
  return own.slice(0, 40).map((t) => t.text || "").join("").trim()
    .slice(0, 90) || "(nothing)";
}
function samples() {
  const box = el("div", {});
  const list = el("div", { class: "card list" });
  const beside = el("div", { class: "beside" });
  const shades = el("span", { class: "row" });
  const controls = el("div", { class: "controls" });
  const run = () => RUNS[Math.min(state.run, RUNS.length - 1)];
  const items = () => run().samples.kept.flatMap((entry) =>
    entry.groups.flatMap((group, g) => group.items.map((item, i) => ({
      entry, group, item, key: [entry.step, entry.kind, g, i].join("/") }))));
  const matches = ({ entry, group, item }) =>
    (!state.step || String(entry.step) === state.step) &&
    (!state.row || String(group.row) === state.row) &&
    (!state.ended || item.ended === state.ended) &&
    (state.low === "" || item.reward >= Number(state.low)) &&
    (state.high === "" || item.reward <= Number(state.high)) &&
    (!state.advantage || (state.advantage === "+" ? item.advantage > 0
      : state.advantage === "-" ? item.advantage < 0
      : item.advantage === 0));
  const orders = {
    new: (a, b) => b.entry.step - a.entry.step,
    old: (a, b) => a.entry.step - b.entry.step,
    best: (a, b) => (b.item.reward ?? -1e9) - (a.item.reward ?? -1e9),
    worst: (a, b) => (a.item.reward ?? 1e9) - (b.item.reward ?? 1e9),
    long: (a, b) => (b.item.length ?? 0) - (a.item.length ?? 0),
  };
  const show = () => {
    const found = items().filter(matches).sort(orders[state.order]);
    const chosen = found.find((x) => x.key === state.item) || found[0];
    list.replaceChildren(...found.slice(0, 400).map((x) => el("button", {
      class: chosen && x.key === chosen.key ? "on" : "",
      onclick: () => { state.item = x.key; show(); },
    }, el("div", { class: "row small soft" },
      el("span", {}, "step " + num(x.entry.step)),
      el("span", {}, "row " + x.group.row),
      x.item.side && el("span", {}, x.item.side),
      x.item.reward === undefined ? null
        : el("b", {}, "reward " + num(x.item.reward)),
      x.item.ended && el("span", {}, x.item.ended)),
      el("div", { class: "line" }, preview(run(), x.group, x.item)))),
      found.length ? "" : el("p", { class: "soft",
        style: { padding: "0 12px" } }, "None fits the filters."));
    if (!chosen) { beside.replaceChildren(); return; }
    let shown = [chosen];
    if (state.view === "group") shown = [chosen, ...items().filter((x) =>
      x.group === chosen.group && x.key !== chosen.key)];
    if (state.view === "steps") {
      const seen = new Set();
      shown = items().filter((x) => String(x.group.row) ===
        String(chosen.group.row) && !seen.has(x.entry.step) &&
        seen.add(x.entry.step)).sort(orders.old);
    }
    const all = shown.flatMap((x) => (x.item.segments || []).flatMap((s) =>
      tokens(run(), x.group, s)).concat(x.item.advantage !== undefined &&
      x.item.advantage !== null ? [{ advantage: 1, mask: 1 }] : []));
    const known = Object.entries(SHADES).filter(([, [, has]]) =>
      all.some(has));
    if (!known.some(([k]) => k === state.shade) && state.shade !== "none")
      state.shade = known.some(([k]) => k === "logp") ? "logp" : "mask";
    shades.replaceChildren(choice("shade", [["none", "nothing"], ...known.map(
      ([k, [text]]) => [k, text])], "shade", show), ...ramp(state.shade));
    beside.replaceChildren(...shown.map((x) => sampleCard(run(), x.entry,
      x.group, x.item, x.key === chosen.key)));
  };
  const options = (values) => [["", "all"], ...[...new Set(values)].filter(
    (v) => v !== undefined && v !== null && v !== "").map((v) => [v, v])];
  const build = () => {
    const all = items(), kept = run().samples;
    const has = (f) => all.some((x) => x.item[f] !== undefined &&
      x.item[f] !== null);
    controls.replaceChildren(...[
      MANY && choice("run", NAMES.map((n, i) => [i, n]), "run", () => {
        state.run = Number(state.run); state.row = state.step = ""; build();
      }),
      choice("step", options(all.map((x) => x.entry.step)), "step", show),
      choice("row", options(all.map((x) => x.group.row).sort(
        (a, b) => a - b)), "row", show),
      has("reward") && el("label", {}, "reward from", ["low", "high"].map(
        (k) => [k === "high" ? "to" : "", el("input", { class: "narrow",
          type: "number", step: "any", value: state[k], oninput: (e) => {
            state[k] = e.target.value; show();
          } })])),
      has("advantage") && choice("advantage", [["", "all"], ["+", "above 0"],
        ["-", "below 0"], ["0", "0"]], "advantage", show),
      has("ended") && choice("ended", options(all.map((x) => x.item.ended)),
        "ended", show),
      choice("order", [["new", "newest"], ["old", "oldest"],
        ...(has("reward") ? [["best", "best"], ["worst", "worst"]] : []),
        ["long", "longest"]], "order", show),
      choice("show", [["group", "the group side by side"],
        ["steps", "this row over steps"], ["one", "this one"]], "view", show),
      shades,
    ].filter(Boolean));
    const many = kept.kept.length;
    box.replaceChildren(...(all.length ? [controls,
      el("div", { class: "pick" }, list, beside),
      el("p", { class: "soft small" }, kept.kept[0].kind === "rows"
        ? "Rows of " + num(many) + " batches that were trained on, of " +
          num(kept.seen) + " that were looked at."
        : "Kept are " + num(many) + " of " + num(kept.seen) +
          " rollouts, some groups of each" + (kept.skipped ? " (" +
          num(kept.skipped) + " were left out to save time)" : "") + ".")]
      : [el("p", { class: "soft" }, "No sample is kept yet.")]));
    show();
  };
  build();
  return box;
}
function ramp(name) {
  const bar = (low, high, colors) => el("span", {
    class: "ramp small soft" }, low, el("i", { style: {
      background: `linear-gradient(90deg, ${colors.join(",")})` } }), high);
  switch (name) {
    case "logp": case "refp":
      return [bar("certain", "improbable", [warm(0), warm(1)])];
    case "ratio": case "ref": case "advantage": case "value":
      return [bar(name.startsWith("r") ? "below 1" : "negative",
        name.startsWith("r") ? "above 1" : "positive",
        [warm(1), warm(0), cool(1)])];
    default: return [];
  }
}

// Where the time went.
const LANES = { rollout: "rollout", tool: "tools", reward: "rewards",
  wait: "waiting for samples", batches: "building batches",
  "log-probs": "log-probabilities", data: "waiting for data",
  train: "training step", device: "waiting for the device",
  sync: "sending weights", validation: "validation",
  checkpoint: "checkpoint", compile: "compiling" };
const lane = (name) => LANES[name] || name;
function laneColor(name) {
  const at = Object.keys(LANES).indexOf(name);
  return color([2, 4, 6, 7, 3, 5, 7, 0, 7, 1, 5, 4, 3][at] ?? 7);
}
function timeline(run) {
  const t = run.timeline;
  if (!t || !t.spans.length) {
    return el("p", { class: "soft" }, "No span is known yet.");
  }
  const box = el("div", { class: "card timeline" });
  const first = t.spans.reduce((a, s) => Math.min(a, s[1]), Infinity);
  const span = () => Math.max(state.width || Math.min(t.until - first,
    20 * stepTime(run)), 1);
  const begin = () => Math.max(first, Math.min(state.from ?? t.until,
    t.until - span()));
  const redraw = () => {
    const from = begin(), to = from + span(), width = box.clientWidth - 28;
    if (width <= 0) return;
    const left = width < 500 ? 124 : 150, high = 20;
    const lanes = Object.keys(LANES).filter((n) => t.names.includes(n))
      .concat(t.names.filter((n) => !(n in LANES)));
    const X = (ms) => left + (ms - from) / (to - from) * (width - left - 4);
    const height = (lanes.length + 1) * high + 22;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`,
      height: height, role: "img", "aria-label": "timeline" });
    lanes.concat([null]).forEach((name, i) => add(picture, svg("text", {
      x: left - 8, y: i * high + 14, "text-anchor": "end" },
      name === null ? "not named" : lane(name))));
    for (const row of run.curves.rows) {
      const at = 1000 * (row[1] - (t.offset || 0));
      if (at >= from && at <= to) add(picture, svg("line", { x1: X(at),
        x2: X(at), y1: 0, y2: height - 20, stroke: "var(--line)" }));
    }
    const bar = (a, b, i, fill, about, opacity = 0.85) => {
      const x = Math.max(X(a), left), end = Math.min(X(b), width - 4);
      if (end < left || x > width - 4) return;
      const rect = svg("rect", { x, y: i * high + 3, rx: 2, fill, opacity,
        width: Math.max(end - x, 0.8), height: high - 6 });
      rect.addEventListener("pointermove", (e) => showTip(e, about));
      rect.addEventListener("pointerleave", hideTip);
      add(picture, rect);
    };
    const own = [];
    for (const [n, start, long, label, other] of t.spans) {
      if (start + long < from || start > to) continue;
      const name = t.names[n];
      bar(start, start + long, lanes.indexOf(name), laneColor(name),
        lane(name) + (label ? " " + label : "") + "\n" + time(long / 1000) +
        ", from " + time(start / 1000) + (other ? "\nin another thread" : ""));
      if (!other && name !== "tool") own.push([start, start + long,
        lane(name)]);
    }
    const gaps = [];
    own.sort((a, b) => a[0] - b[0]);
    let end = null, after = "";
    for (const [a, b, name] of own) {
      if (end !== null && a - end > 0.002 * (to - from))
        gaps.push([end, a, "after “" + after + "”, before “" + name + "”"]);
      if (end === null || b > end) { end = b; after = name; }
    }
    for (const [a, b, what] of gaps) bar(a, b, lanes.length, "var(--c7)",
      "not named: " + time((b - a) / 1000) + "\n" + what +
      "\ncallbacks, Python, Keras", 0.55);
    for (const tick of ticks(from / 1000, to / 1000, Math.max(2, Math.floor(
      width / 130)))) {
      if (X(1000 * tick) < left) continue;
      add(picture, svg("text", { x: X(1000 * tick), y: height - 4,
        "text-anchor": "middle" }, num(Number(tick.toPrecision(6))) + " s"));
    }
    const large = gaps.sort((a, b) => b[1] - b[0] - a[1] + a[0]).slice(0, 3);
    const move = (f) => () => { f(); save(); redraw(); };
    const step = span();
    box.replaceChildren(el("div", { class: "controls" },
      el("button", { title: "earlier", onclick: move(() => {
        state.from = begin() - 0.7 * step; }) }, "←"),
      el("button", { title: "later", onclick: move(() => {
        state.from = begin() + 0.7 * step; }) }, "→"),
      el("button", { title: "closer", onclick: move(() => {
        state.from = begin() + step / 4; state.width = step / 2; }) }, "+"),
      el("button", { title: "farther", onclick: move(() => {
        state.from = begin() - step / 2; state.width = 2 * step; }) }, "−"),
      el("button", { onclick: move(() => {
        state.from = state.width = null; }) }, "newest"),
      el("span", { class: "soft small" }, time(step / 1000) +
        " are shown; kept are the newest " + num(t.spans.length) + " of " +
        num(t.count) + " spans")), picture,
      large.length ? el("p", { class: "soft small" }, "Largest gaps here: ",
        large.map(([a, b, what]) => time((b - a) / 1000) + " " + what)
          .join("; ") + ".") : null);
  };
  let wide = 0;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (box.clientWidth !== wide) { wide = box.clientWidth; redraw(); }
  })).observe(box);
  return box;
}
function stepTime(run) {
  const rows = run.curves.rows;
  if (rows.length < 3) return 1000;
  const a = rows[Math.max(0, rows.length - 10)], b = rows[rows.length - 1];
  return 1000 * (b[1] - a[1]) / Math.max(1, b[0] - a[0]);
}
const cells = (names, rows, numbers = []) => el("div", { class: "scroll" },
  el("table", {}, el("thead", {}, el("tr", {}, names.map((n, i) =>
    el("th", { class: numbers.includes(i) ? "n" : "" }, n)))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((x, i) =>
    el("td", { class: numbers.includes(i) ? "n" : "" }, x)))))));
const pairs = (about) => el("table", {}, el("tbody", {},
  Object.entries(about || {}).filter(([, v]) => v !== null && v !== undefined)
    .map(([k, v]) => el("tr", {}, el("td", { class: "key" }, k),
      el("td", {}, typeof v === "object" ? JSON.stringify(v) : num(v))))));
function totals(run) {
  const t = run.timeline;
  if (!t || !t.totals) return null;
  const all = t.until / 1000;
  const share = (s) => (100 * s / all).toFixed(1) + " %";
  const rows = Object.entries(t.totals).sort((a, b) => b[1][0] - a[1][0])
    .map(([name, [s, n]]) => [lane(name), time(s), share(s), num(n)]);
  const rest = Math.max(0, all - (t.own || 0));
  rows.push(["not named: start, callbacks, Python", time(rest), share(rest),
    ""]);
  if (run.about.seconds !== undefined) rows.push(["of it this report",
    time(run.about.seconds), share(run.about.seconds), ""]);
  return el("div", { class: "card" }, el("h3", {}, "Shares of the run"),
    cells(["", "time", "share", "times"], rows, [1, 2, 3]),
    el("p", { class: "soft small" }, "Spans may lie in each other, and run " +
      "beside each other in threads."));
}
function compiled(run) {
  const found = (run.timeline || {}).compiled || [];
  return el("div", { class: "card" }, el("h3", {}, "Compiled programs"),
    found.length ? cells(["program", "time", "times"], found.slice(0, 12).map(
      ([name, s, n]) => [name || "(without a name)", time(s), num(n)]),
      [1, 2]) : el("p", { class: "soft" }, "None."),
    el("p", { class: "soft small" }, "Compiled, or read from the cache. A " +
      "program that is compiled again and again has inputs of many shapes."));
}
function memory(run) {
  const m = run.memory;
  if (!m) return el("p", { class: "soft" }, "Not known.");
  const kinds = Object.entries(m.kinds).filter(([, n]) => n > 0);
  const sum = kinds.reduce((a, [, n]) => a + n, 0) || 1;
  return [el("div", { class: "stack" }, kinds.map(([k, n], i) => el("div", {
    title: k, style: { width: 100 * n / sum + "%", background: color(i) } }))),
  cells(["", "kind", "bytes", "share"], kinds.map(([k, n], i) => [
    el("i", { style: { background: color(i), width: "10px", height: "10px",
      display: "inline-block" } }), k, bytes(n),
    (100 * n / sum).toFixed(1) + " %"]), [2, 3]),
  m.devices.length ? cells(["device", "in use", "peak", "limit"],
    m.devices.map(([name, ...n]) => [name, ...n.map(bytes)]), [1, 2, 3])
    : null,
  el("p", { class: "soft small" }, "Arrays on all devices together. The " +
    "host's process: " + bytes(m.host[0]) + ", at its peak " +
    bytes(m.host[1]) + ". Temporaries of a running step are in the peak of " +
    "a device alone.")];
}
function data(run) {
  if (!run.data) return el("p", { class: "soft" }, "Not known.");
  const { text, ...rest } = run.data, shown = {};
  for (const [k, v] of Object.entries(rest)) {
    if (v && typeof v === "object") {
      for (const [name, n] of Object.entries(v)) shown[k + ": " + name] = n;
    } else shown[k] = v;
  }
  return [el("p", {}, text), pairs(shown)];
}
function about(run) {
  const e = run.environment || {}, known = ["run", "versions", "command"];
  const command = (e.command || {})["to resume"];
  return [el("div", { class: "two" },
    el("div", { class: "card" }, el("h3", {}, "Run"), pairs(e.run)),
    el("div", { class: "card" }, el("h3", {}, "Versions"),
      pairs(e.versions), Object.entries(e).filter(([k]) =>
        !known.includes(k)).map(([k, v]) => [el("h3", {}, k), pairs(v)]))),
  command ? el("div", { class: "card", style: { marginTop: "12px" } },
    el("h3", {}, "To resume"), el("pre", {}, "cd " + e.command.directory +
      "\n" + command), el("p", { class: "soft small" }, "A run with " +
      "kpt.callbacks.Checkpoint resumes where it stopped.")) : null];
}

// The page.
const SECTIONS = [
  ["diagnoses", "Diagnoses", () => findings()],
  ["curves", "Curves", () => curves()],
  ["samples", "Samples", () => samples()],
  ["time", "Time", (run) => [timeline(run), el("div", { class: "two",
    style: { marginTop: "12px" } }, totals(run), compiled(run))]],
  ["memory", "Memory", (run) => el("div", { class: "card" }, memory(run))],
  ["rows", "Data", (run) => el("div", { class: "card" }, data(run))],
  ["about", "About", (run) => about(run)],
];
const OF_ONE = ["time", "memory", "rows", "about"];
function page() {
  document.title = (MANY ? RUNS.length + " runs" : [status(RUNS[0])[1],
    "step " + (RUNS[0].about.step ?? 0), NAMES[0]].join(" · "));
  const lives = !MANY && RUNS[0].about.status === "running";
  const every = RUNS[0].about.every || 30;
  const pause = el("button", { class: "small", onclick: () => {
    state.paused = !state.paused; pauseText(); save();
  } });
  const pauseText = () => { pause.textContent = state.paused
    ? "reload again" : "reloads every " + num(every) + " s: pause"; };
  pauseText();
  add(document.body, el("header", {}, RUNS.map(head)), el("nav", {},
    el("div", {}, SECTIONS.map(([id, title]) => el("a", { href: "#" + id },
      title)), lives ? pause : null)));
  const main = el("main", {});
  document.body.append(main, tip);
  for (const [id, title, make] of SECTIONS) {
    const section = el("section", { id }, el("h2", {}, title));
    main.append(section);
    const runs = OF_ONE.includes(id) ? RUNS : [RUNS[0]];
    runs.forEach((run, i) => {
      if (MANY && runs.length > 1) section.append(el("h3", { style: {
        margin: "12px 0 6px" } }, NAMES[i]));
      try { add(section, make(run)); }
      catch (error) {
        section.append(el("p", { class: "error-text" },
          "This part cannot be shown: " + error));
      }
    });
  }
  scrollTo(0, state.scroll);
  if (lives) setInterval(() => {
    if (!state.paused && !document.hidden) { save(); location.reload(); }
  }, 1000 * every);
}
page();
