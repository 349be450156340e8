"use strict";
// The board of a run: asks once a second what has changed, and shows it. Nothing here comes from elsewhere, and what
// comes from the run is only ever set as text.

const EACH_MS = 1000, PATIENCE_MS = 15_000, PICTURES_MS = 10_000;
const MOST = { lines: 500, marks: 200, scores: 2000, recoveries: 50 };
const MODES = {
  member: ["computes", ""], recovering: ["recovers", "↻ "], lost: ["lost", "✕ "], arriving: ["waits to be let in", "… "],
  entering: ["is given its state", "↓ "], absent: ["not there", ""],
};
const PARTS = { find: "found", agree: "agreed", rebuild: "connected", resume: "next step" };
const STEPS = Array.from({ length: 10 }, (_, n) => [1, 2, 5].map((each) => each * 10 ** n)).flat();
const SERIES = { loss: "--member", rate: "--coming", score: ["--recovering", "--coming", "--absent", "--text"] };

const at = (id) => document.getElementById(id);
let run = 0, tick = 0, job = { name: "" }, token = "";
let workers, curve, marks, scores, recoveries, holding, chosen, away = false, charts = {}, picturesAt = -Infinity;

function reset() {
  workers = new Map(); curve = { steps: [], losses: [], rates: [] }; marks = []; scores = new Map();
  recoveries = new Map(); holding = null; chosen = null;
  for (const id of ["workers", "layers", "lines", "survives", "modes"]) at(id).replaceChildren();
  say("about", "Arrow keys go from worker to worker.");
  at("survives").className = "";
  forgetCharts();
  showRecoveries();
  picturesAt = -Infinity;
}

function forgetCharts() {
  for (const { plot } of Object.values(charts)) plot.destroy();
  charts = {};
}

// What is read aloud when it changes is set only then.
function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function make(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

// ---- what is asked for, and how often

async function ask(path) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (answer.status === 401) throw new Unknown();
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

class Unknown extends Error {}

async function look() {
  let news = null, trouble = "";
  try {
    news = await ask(`news?run=${run}&since=${tick}`);
  } catch (error) {
    if (error instanceof Unknown) { askForToken(); return; }
    trouble = `The board cannot be reached: what is shown is old. It is asked again each second. (${error.message})`;
  }
  away = !news;
  try {
    if (news) { show(news); trouble = job.trouble || ""; } else showJob();
  } catch (error) {
    run = tick = 0;  // all is asked for again
    trouble = `What the board says cannot be shown: ${error.message}`;
    console.error(error);
  }
  at("trouble").hidden = !trouble;
  say("trouble", trouble);
  if (news) showPictures();
  setTimeout(look, EACH_MS);
}

function askForToken() {
  away = true;
  showJob();
  at("login").hidden = at("trouble").hidden = false;
  say("trouble", token ? "That is not the token." : "The token of this board is needed, which is in the file of its --token-file.");
}

// ---- what has changed

function show(news) {
  if (news.run !== run) { run = news.run; reset(); }
  tick = news.tick;
  const before = job;
  job = { ...news.job, trouble: news.trouble, reading: news.reading };
  for (const [name, worker] of Object.entries(news.workers || {})) workers.set(name, worker);
  if (news.curve) {
    for (const key of ["steps", "losses", "rates"]) curve[key] = [...curve[key].slice(0, news.curve.first), ...news.curve[key]];
  }
  marks = [...marks, ...(news.marks || [])].slice(-MOST.marks);
  for (const score of news.scores || []) scores.set(score.step, score);
  for (const recovery of news.recoveries || []) recoveries.set(recovery.number, recovery);
  for (const [known, most] of [[scores, MOST.scores], [recoveries, MOST.recoveries]]) {
    while (known.size > most) known.delete(known.keys().next().value);
  }
  if (news.holding) holding = news.holding;
  showJob();
  if (news.workers || news.holding || job.recovering !== before.recovering) showWorkers();
  if (news.holding || news.workers) showLayers();
  if (news.recoveries) showRecoveries();
  if (news.lines) showLines(news.lines);
  if (news.curve || news.marks || news.scores) showCharts();
}

function number(value, digits = 3) {
  return value === undefined || value === null ? "–" : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

function duration(seconds) {
  if (seconds === undefined || seconds === null) return "–";
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const days = Math.floor(whole / 86400), clock = `${Math.floor(whole / 3600) % 24}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  return days ? `${days} d ${clock}` : clock;
}

const milliseconds = (seconds) => seconds >= 10 ? `${seconds.toFixed(1)} s` : `${Math.round(1000 * seconds)} ms`;

function state() {
  if (away) return ["bad", "no word"];
  if (job.reading && !job.name) return ["waiting", "reading"];
  if (!job.name) return ["waiting", "The run is yet to begin."];
  if (job.outcome) return [job.outcome === "done" ? "done" : "bad", job.outcome === "done" ? "done" : `ended: ${job.outcome}`];
  if (job.trouble) return ["bad", "no word"];
  return job.recovering ? ["recovering", "recovering"] : ["running", job.done ? "running" : "starting"];
}

function showJob() {
  const [kind, text] = state(), done = job.done || 0, steps = job.steps || 0;
  at("name").textContent = job.name || "Holdfast";
  document.title = job.name ? `${job.name} · ${done}/${steps} · ${text}` : "Holdfast";
  say("state", text);
  at("state").className = kind;
  at("done").style.width = steps ? `${100 * done / steps}%` : "0";
  const began = job.began ? new Date(1000 * job.began).toLocaleString() : "";
  const left = job.left_s === undefined ? "" : `, ${duration(job.left_s)} left`;
  const idle = (job.idle_s || 0) >= 10 ? `, the last one ${duration(job.idle_s)} ago` : "";
  at("how-far").textContent = job.name ? `${done} of ${steps} steps done${idle}${left}; began ${began}, ${duration(job.elapsed_s || 0)} ago` : "";
  if (job.outcome) at("how-far").textContent = `${done} of ${steps} steps done in ${duration(job.elapsed_s || 0)}; began ${began}`;
  const missing = (job.workers || 0) - (job.present || 0);
  const best = [...scores.values()].filter((score) => score.best && score.step <= done).sort((one, two) => one.step - two.step).at(-1);
  const figures = [
    ["workers", `${job.present || 0} of ${job.workers || 0}`, missing > 0 && !job.outcome],
    ["may be lost now", lose(), !job.outcome && holding && !holding.why && holding.any < 1],
    ["loss", number(job.loss, 5)],
    ...(best ? [["best state", `before step ${best.step}`]] : []),
    ["samples per second", number(job.samples_per_s)],
    ["workers lost so far", String(job.failures || 0)],
    ["goodput", job.goodput === undefined ? "–" : `${(100 * job.goodput).toFixed(1)} %`],
    ["newest checkpoint", job.checkpoint === undefined ? "none" : `step ${job.checkpoint}, ${duration(job.checkpoint_age_s || 0)} ago`],
  ];
  at("figures").replaceChildren(make("dl", {}, ...figures.map(([name, value, bad]) =>
    make("div", bad ? { class: "bad" } : {}, make("dt", {}, name), make("dd", {}, value)))));
}

function lose() {
  const known = holding && !holding.why, any = known ? holding.any : job.owners === undefined ? null : job.owners - 1;
  if (any === null || job.outcome) return "–";
  if (any < 1) return known && holding.most > 0 && any === 0 ? `not any; up to ${holding.most}` : "none";
  return `any ${any}${known ? `, up to ${holding.most}` : ""}`;
}

// ---- workers

const modeOf = (worker) => worker.mode === "member" && job.recovering ? "recovering" : worker.mode;
const place = (name) => /^\d+\.\d+$/.test(name) ? name.split(".").map(Number) : [Infinity, Infinity];

function showWorkers() {
  const grid = at("workers"), rows = new Map();
  grid.classList.toggle("many", workers.size > 100);
  grid.parentElement.classList.toggle("wide", workers.size > 100);
  const names = [...workers.keys()].sort((one, two) => {
    const [a, b] = place(one), [c, d] = place(two);
    return a === c ? (b === d ? one.localeCompare(two) : b - d) : a - c;
  });
  const wide = names.some((name) => place(name)[1] > 0 && place(name)[1] < Infinity);
  for (const name of names) {
    const row = wide ? place(name)[0] : 0;
    if (!rows.has(row)) rows.set(row, []);
    rows.get(row).push(name);
  }
  const known = new Map([...grid.querySelectorAll("button")].map((button) => [button.dataset.worker, button]));
  if (known.size !== names.length || names.some((name) => !known.has(name))) {
    const focused = document.activeElement?.dataset?.worker;
    grid.replaceChildren(...[...rows.values()].map((each) => make("div", { class: "row", role: "row" },
      ...each.map((name) => {
        const button = known.get(name) || make("button", { type: "button", role: "gridcell", tabindex: "-1", "data-worker": name });
        known.set(name, button);
        return button;
      }))));
    if (focused) known.get(focused)?.focus();
  }
  for (const name of names) {
    const button = known.get(name), mode = modeOf(workers.get(name)), text = `${MODES[mode][1]}${name}`;
    if (button.className !== mode || button.textContent !== text) { button.className = mode; button.textContent = text; }
    const about = aboutWorker(name);
    if (button.getAttribute("aria-label") !== about) button.setAttribute("aria-label", about);
  }
  const first = known.get(chosen) || known.get(names[0]);
  for (const button of known.values()) button.tabIndex = button === first ? 0 : -1;
  if (chosen) say("about", aboutWorker(chosen));
  const counted = {};
  for (const worker of workers.values()) counted[modeOf(worker)] = (counted[modeOf(worker)] || 0) + 1;
  at("modes").textContent = Object.entries(counted).map(([mode, n]) => `${MODES[mode][1]}${MODES[mode][0]}: ${n}`).join(" · ");
}

function layersOf(ranges) {
  return ranges.map(([start, stop]) => stop - start > 1 ? `${start}–${stop - 1}` : `${start}`).join(", ");
}

function aboutWorker(name) {
  const worker = workers.get(name);
  if (!worker) return "";
  const held = holding?.held[name], node = worker.node ? `, on ${worker.node}` : "";
  const layers = held && !["lost", "absent"].includes(worker.mode) ? `, holds layer${held.length > 1 || held[0][1] - held[0][0] > 1 ? "s" : ""} ${layersOf(held)}` : "";
  return `Worker ${name}: ${MODES[modeOf(worker)][0]}${node}${layers}`;
}

function choose(button) {
  for (const other of at("workers").querySelectorAll("button[tabindex='0']")) other.tabIndex = -1;
  button.tabIndex = 0;
  chosen = button.dataset.worker;
  say("about", aboutWorker(chosen));
}

at("workers").addEventListener("focusin", (event) => event.target.dataset.worker && choose(event.target));
at("workers").addEventListener("click", (event) => event.target.dataset?.worker && event.target.focus());
at("workers").addEventListener("keydown", (event) => {
  const rows = [...at("workers").children].map((row) => [...row.children]);
  const y = rows.findIndex((row) => row.includes(event.target)), x = y < 0 ? -1 : rows[y].indexOf(event.target);
  if (x < 0) return;
  const next = { ArrowLeft: rows[y][x - 1], ArrowRight: rows[y][x + 1], Home: rows[y][0], End: rows[y].at(-1),
    ArrowUp: rows[y - 1]?.[Math.min(x, rows[y - 1].length - 1)], ArrowDown: rows[y + 1]?.[Math.min(x, rows[y + 1].length - 1)] }[event.key];
  if (next) { event.preventDefault(); next.focus(); }
});

// ---- layers, recoveries, lines

function showLayers() {
  if (!holding) return;
  if (holding.why) { at("survives").textContent = holding.why; at("layers").replaceChildren(); return; }
  const owners = Array.from({ length: holding.layers }, () => []);
  for (const [name, ranges] of Object.entries(holding.held)) {
    if (["lost", "absent"].includes(workers.get(name)?.mode)) continue;
    for (const [start, stop] of ranges) for (let layer = start; layer < stop; layer += 1) owners[layer].push(name);
  }
  const counts = owners.map((each) => each.length), fewest = Math.min(...counts), uneven = Math.max(...counts) > fewest;
  const nodes = holding.nodes > 0 ? `, or any ${holding.nodes} node${holding.nodes === 1 ? "" : "s"}` : "";
  const which = uneven ? "Some layers have" : "Every layer has";
  const others = holding.most > 0 ? ` Up to ${holding.most} other${holding.most > 1 ? "s" : ""} may be lost.` : "";
  const told = holding.any > 0 ? `Survives now: any ${holding.any} worker${holding.any > 1 ? "s" : ""}, up to ${holding.most}${nodes}.`
    : fewest === 0 ? `${which} no owner now.`
      : `${which} one owner: to lose it costs steps, from logs or a checkpoint, or ends the job.${others}`;
  say("survives", told + (uneven ? " The weakest layers have a frame." : ""));
  at("survives").className = holding.any > 0 ? "" : "bad-text";
  at("layers").replaceChildren(...owners.map((each, layer) => make("div", {
    role: "listitem", class: each.length === 0 ? "gone" : uneven && each.length === fewest ? "weak" : "", title: `layer ${layer}: ${each.join(", ") || "nobody"}`,
  }, make("small", {}, `${layer}`), `${each.length}`)));
}

function showRecoveries() {
  const box = at("recoveries"), shown = [...recoveries.values()].sort((one, two) => two.number - one.number);
  if (!shown.length) { box.replaceChildren(make("p", { class: "none" }, "none so far")); return; }
  const open = new Set([...box.querySelectorAll("details[open]")].map((each) => each.dataset.number));
  const seen = new Set([...box.querySelectorAll("details")].map((each) => each.dataset.number));
  box.replaceChildren(...shown.map((each, place) => {
    const parts = Object.entries(each.parts), total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
    const who = each.lost.map(([name]) => name).join(", ");
    const over = each.over ? `${milliseconds(total)} to the next step` : job.outcome ? "not recovered from" : "under way";
    const details = make("details", { "data-number": each.number }, make("summary", {}, `${who} lost in step ${each.step}: ${over}`));
    let before = 0;
    for (const [name, seconds] of parts) {
      const bar = make("i", { class: name });
      bar.style.left = `${total ? 100 * before / total : 0}%`; bar.style.width = `${total ? 100 * seconds / total : 0}%`;
      details.append(make("div", { class: "part" }, make("span", {}, PARTS[name] || name), make("div", { class: "bar" }, bar), make("span", {}, milliseconds(seconds))));
      before += seconds;
    }
    details.append(make("p", { class: "none" }, `${each.redone} (layer, micro-batch) pairs run again${each.strategy ? `, by ${each.strategy}` : ""}`));
    for (const [name, how] of each.lost) details.append(make("p", { class: "none" }, `${name}: ${how}`));
    details.open = open.has(String(each.number)) || (place === 0 && !seen.has(String(each.number)));
    return details;
  }));
}

function showLines(lines) {
  const list = at("lines");
  list.prepend(...lines.map((line) => make("li", line.kind ? { class: line.kind } : {},
    make("time", {}, `${line.at.toFixed(3)} s`), make("span", {}, line.text))).reverse());
  while (list.children.length > MOST.lines) list.lastChild.remove();
}

at("only-trouble").addEventListener("change", (event) => at("lines").classList.toggle("only", event.target.checked));

// ---- curves

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawMarks(chart) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.lineWidth = devicePixelRatio; ctx.setLineDash([4, 3]);
  for (const mark of marks) {
    const x = chart.valToPos(mark.step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = colour({ lost: "--lost", left: "--absent", came: "--coming" }[mark.kind]);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  }
  ctx.restore();
}

function chart(id, names, data) {
  const box = at(id), key = names.join("\n");
  if (charts[id]?.key === key) {
    const { plot } = charts[id], { min, max } = plot.scales.x, [steps] = plot.data;
    const zoomed = steps.length > 0 && (min > steps[0] || max < steps.at(-1));
    plot.setData(data, !zoomed);
    if (zoomed) plot.redraw();
    return;
  }
  charts[id]?.plot.destroy();
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const strokes = [SERIES[id], ...SERIES.score];
  const plot = new uPlot({
    width: box.clientWidth, height: box.clientHeight - 36,
    scales: { x: { time: false } }, axes: [{ ...axis, incrs: STEPS }, { ...axis, size: 64 }],
    series: [{ label: "step" }, ...names.map((label, n) => ({
      label, stroke: colour(strokes[n % strokes.length]), width: 1.5, spanGaps: true, points: { show: n > 0 }, value: (_, value) => number(value, 5),
    }))],
    hooks: { draw: [drawMarks] },
  }, data, box);
  charts[id] = { key, plot };
}

function showCharts() {
  const evaluated = [...scores.values()].sort((one, two) => one.step - two.step);
  const names = [...new Set(evaluated.flatMap((each) => Object.keys(each.scores)))].filter((name) => name === "loss");
  const data = [[curve.steps, curve.losses]];
  if (names.length) data.push([evaluated.map((each) => each.step), ...names.map((name) => evaluated.map((each) => each.scores[name] ?? null))]);
  chart("loss", ["loss", ...names.map((name) => `evaluated ${name}`)], data.length > 1 ? uPlot.join(data) : data[0]);
  chart("rate", ["samples per second"], [curve.steps, curve.rates]);
}

new ResizeObserver(() => {
  for (const [id, { plot }] of Object.entries(charts)) plot.setSize({ width: at(id).clientWidth, height: at(id).clientHeight - 36 });
}).observe(at("loss"));

// ---- schedules

async function showPictures(now = false) {
  if (!at("schedule").open || (!now && performance.now() - picturesAt < PICTURES_MS)) return;
  const mine = picturesAt = performance.now();
  let found;
  try {
    found = await ask(`schedules?which=${at("which").value}`);
  } catch (error) {
    say("measured-about", `The schedules cannot be had now: ${error.message}`);
    return;
  }
  if (mine !== picturesAt) return;  // another one was asked for meanwhile
  for (const name of ["measured", "planned"]) {
    const { svg, about, idle } = found[name], image = at(name);
    say(`${name}-about`, `${name === "planned" ? "Planned" : "Measured"}: ${about}${idle === null ? "" : `; workers wait ${(100 * idle).toFixed(1)} % of its time`}`);
    if (image.src) URL.revokeObjectURL(image.src);
    image.hidden = !svg;
    if (svg) image.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" })); else image.removeAttribute("src");
  }
}

at("schedule").addEventListener("toggle", () => showPictures(true));
at("which").addEventListener("change", () => showPictures(true));

// ---- light and dark, the token, the beginning

function dress(theme) {
  document.documentElement.dataset.theme = theme;
  forgetCharts();
  if (curve.steps.length) showCharts();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = kept("localStorage", "holdfast-theme");
const wanted = () => theme || (dark.matches ? "dark" : "light");
dark.addEventListener("change", () => dress(wanted()));
at("theme").addEventListener("click", () => {
  theme = wanted() === "dark" ? "light" : "dark";
  keep("localStorage", "holdfast-theme", theme);
  dress(theme);
});

// Where a browser keeps nothing, it is kept as long as the page.
function kept(where, name) {
  try { return window[where].getItem(name) || ""; } catch { return ""; }
}

function keep(where, name, value) {
  try { window[where].setItem(name, value); } catch { /* see above */ }
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value.trim();
  if (!/^[\w-]+$/.test(token)) { askForToken(); return; }
  keep("sessionStorage", "holdfast-token", token);
  at("login").hidden = true;
  look();
});

reset();
dress(wanted());
token = kept("sessionStorage", "holdfast-token");
look();
