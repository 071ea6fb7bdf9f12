// The page of `lrl view`. All that a run has written is untrusted text: it becomes text nodes, never HTML.
"use strict";

const ROW = 60;            // pixels of a row of the list, as in view.css
const PAGE = 200;          // rows of one request, as `MOST_ROWS` of the server
const POLL_MS = 2000;
const CHUNK = 3000;        // tokens of a response that are shown at once
const COLOURS = ["none", "version", "log-prob", "ratio", "advantage", "mask"];
const $ = (id) => document.getElementById(id);

// ---- the token, and what is shown: both in the address behind #

const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) sessionStorage.setItem("token", fragment.get("token"));
const view = { step: fragment.get("step"), index: fragment.get("index"), colour: fragment.get("colour") || "log-prob" };

function remember() {
  const shown = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) if (value !== null) shown.set(name, value);
  history.replaceState(null, "", `#${shown}`);
}

async function ask(route, words = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token")}` };
  const response = await fetch(`api/${route}?${new URLSearchParams(words)}`, { headers });
  if (response.status === 401) throw new Error("Open the address that lrl view has printed, with its token.");
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// ---- making elements

function element(tag, classes, ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Characters that hide themselves, or turn the text around them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g;
const visible = (text) => text.replace(HIDDEN, (one) => `⟦${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟧`);
const number = (value, digits = 3) => (value === null ? "none" : String(+value.toFixed(digits)));

// ---- the list: of thousands of rows only those in sight are elements

const list = { pages: new Map(), total: 0, revision: -1, generation: 0, rows: [] };
let run = null;

function wanted() {
  const words = Object.fromEntries(new FormData($("filters")));
  const [kind, value] = words.end.split("=");
  delete words.end;
  return kind ? { ...words, [kind]: value } : words;
}

async function page(number, generation) {
  const found = await ask("groups", { ...wanted(), offset: number * PAGE });
  if (generation !== list.generation) return;
  list.pages.set(number, found.rows);
  list.total = found.total;
  draw();
}

async function reload() {
  const generation = ++list.generation;
  const first = Math.floor($("list").scrollTop / ROW / PAGE);
  const found = await ask("groups", { ...wanted(), offset: first * PAGE });
  if (generation !== list.generation) return;
  list.pages = new Map([[first, found.rows]]);
  list.total = found.total;
  draw();
}

function draw() {
  const box = $("list");
  $("rows").style.height = `${list.total * ROW}px`;
  $("total").textContent = `${list.total.toLocaleString("en")} groups`;
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 5);
  const last = Math.min(list.total, first + Math.ceil(box.clientHeight / ROW) + 10);
  for (const at of [first - PAGE / 2, first, last, last + PAGE / 2]) {
    const part = Math.floor(at / PAGE);
    if (at < 0 || at >= list.total || list.pages.has(part)) continue;
    list.pages.set(part, []);
    page(part, list.generation).catch((error) => { list.pages.delete(part); say(error); });
  }
  const rows = [];
  for (let at = first; at < last; at++) {
    const group = list.pages.get(Math.floor(at / PAGE))?.[at % PAGE];
    if (group) rows.push(row(group, at));
  }
  $("rows").replaceChildren(...rows);
}

function row(group, at) {
  const lags = group.responses.map((one) => one.lag ?? 0);
  const bars = element("span", "bars", ...group.responses.slice(0, 24).map(bar));
  const line = element("span", "line", `step ${group.step} · row ${group.prompt_id} · lag ${Math.max(0, ...lags)}`, bars);
  const made = element("div", "row", line, element("div", "prompt", visible(group.prompt)));
  made.style.top = `${at * ROW}px`;
  made.setAttribute("role", "option");
  made.classList.toggle("chosen", isShown(group));
  made.onclick = () => open(group).catch(cannotShow);
  made.dataset.at = at;
  return made;
}

function bar(response) {
  const made = element("i", response.reward === null ? "failed" : "");
  const span = run.most_reward - run.least_reward || 1;
  if (response.reward !== null) made.style.height = `${3 + (11 * (response.reward - run.least_reward)) / span}px`;
  return made;
}

const isShown = (group) => String(group.step) === view.step && String(group.index) === view.index;

// ---- a group

let shown = null;

async function open(group, inFront = true) {
  [view.step, view.index] = [String(group.step), String(group.index)];
  remember();
  document.body.classList.toggle("open", inFront);  // a narrow page shows the list or the group
  draw();
  const found = await ask("group", { step: view.step, index: view.index });
  if (!isShown(found)) return;  // another one was chosen meanwhile
  shown = found;
  shown.responses.forEach(spread);
  drawGroup();
}

// Of [value, count] pairs the value of each token.
const spelled = (runs) => runs.flatMap(([value, count]) => Array(count).fill(value));

function spread(response) {
  response.versions = spelled(response.versions);
  response.trained = spelled(response.trained);
  response.advantages = response.advantages && spelled(response.advantages);
  let next = 0;
  response.ratios = response.trained.map((one) => (one && response.log_ratios ? response.log_ratios[next++] : null));
}

function back() {
  const made = element("button", "back", "← list");
  made.onclick = () => document.body.classList.remove("open");
  return made;
}

function drawGroup() {
  const choice = element("select", "", ...COLOURS.map((name) => new Option(name, name, false, name === view.colour)));
  choice.onchange = () => { view.colour = choice.value; remember(); drawGroup(); };
  const title = element("h2", "", `step ${shown.step} · row ${shown.prompt_id} · ${shown.responses.length} responses`);
  const head = element("div", "head", back(), title, element("label", "", "colour tokens by", choice), legend());
  const columns = element("div", "responses", ...shown.responses.map(responseCard));
  $("group").replaceChildren(head, promptCard(shown.prompt), columns);
}

function promptCard(prompt) {
  const parts = (prompt.messages || [{ role: "prompt", content: prompt.text }]).flatMap((one) => [
    element("div", "role", visible(one.role)), element("pre", "", visible(one.content))]);
  const tokens = element("div", "tokens", ...prompt.texts.map((text, at) => {
    const made = element("b", "", ...(text ? [visible(text)] : []));
    made.dataset.tip = `token ${prompt.token_ids[at]}\n${JSON.stringify(text)}`;
    return made;
  }));
  const whole = element("details", "", element("summary", "", `tokens of the prompt: ${prompt.token_ids.length}`), tokens);
  const answer = prompt.answer ? [element("div", "role", "reference"), element("pre", "", visible(prompt.answer))] : [];
  return element("div", "card prompt-card", ...parts, ...answer, whole);
}

function responseCard(response, at) {
  const parts = Object.entries(response.parts).map(([name, value]) => `${visible(name)} ${number(value)}`);
  const own = response.versions.filter((version) => version !== null);
  const lags = own.length ? `lag ${shown.step - Math.min(...new Set(own))}` : "no token";
  const advantage = response.advantages && `advantage ${[...new Set(response.advantages)].slice(0, 3).map((one) => number(one)).join(", ")}`;
  const facts = [`${own.length} token${own.length === 1 ? "" : "s"}`, lags, response.finish_reason, advantage || "not trained"];
  const head = element("header", "",
    element("div", response.reward === null ? "reward bad" : "reward", response.reward === null ? "no reward" : number(response.reward)),
    parts.length ? element("div", "facts", parts.join(" · ")) : null,
    element("div", "facts", facts.join(" · ")),
    response.failure ? element("div", "bad", visible(response.failure)) : null);
  const body = element("div", "");
  const show = (from, to) => {
    body.querySelector(".more")?.remove();
    body.append(...segments(response, at, from, Math.min(to, response.texts.length)));
    if (to >= response.texts.length) return;
    const more = element("button", "more", `${response.texts.length - to} more tokens`);
    more.onclick = () => show(to, to + CHUNK);
    body.append(more);
  };
  show(0, CHUNK);
  const jump = (turn) => {
    const find = () => body.querySelector(`[data-turn="${turn}"]`);
    while (!find() && body.querySelector(".more")) body.querySelector(".more").click();
    body.querySelector(".aimed")?.classList.remove("aimed");
    find()?.classList.add("aimed");
    find()?.scrollIntoView({ block: "center" });
  };
  return element("div", "card response", head, response.forks.length ? tree(response, jump) : null, body);
}

// Turns of the policy, and between them what the environment wrote.
function segments(response, at, from, to) {
  const found = [];
  let block = null, own = null;
  for (let place = from; place < to; place++) {
    const policys = response.versions[place] !== null;
    const turn = response.turn_ends.findIndex((end) => place < end);
    const fork = response.forks.find(([start]) => start === place);
    if (fork) found.push(element("div", "part branch", branchName(response, fork[1])));
    if (block === null || fork || policys !== own || response.turn_ends.includes(place)) {
      own = policys;
      block = element("div", policys ? "tokens" : "tokens observation");
      if (policys) block.dataset.turn = turn + 1;
      const reward = response.turn_rewards[turn];
      const name = policys ? `turn ${turn + 1}` + (reward ? ` · reward ${number(reward)}` : "") : "environment";
      if (response.turn_ends.length) found.push(element("div", "part role", name));
      found.push(block);
    }
    block.append(token(response, at, place));
  }
  return found;
}

// ---- branches: an agent has changed its history, and a turn does not follow the one before

// The turn that a place behind `after` tokens follows: 0 is the prompt.
function followed(response, after) {
  if (!after) return 0;
  const turn = response.turn_ends.findIndex((end) => after <= end) + 1;
  return response.versions[after - 1] !== null ? turn : parent(response, turn);
}

function parent(response, turn) {
  const begin = turn > 1 ? response.turn_ends[turn - 2] : 0;
  const fork = response.forks.find(([start]) => begin <= start && start < response.turn_ends[turn - 1]);
  return fork ? followed(response, fork[1]) : turn - 1;
}

function branchName(response, after) {
  const turn = followed(response, after);
  const behind = turn ? `turn ${turn}` : "the prompt";
  const policys = !after || response.versions[after - 1] !== null;
  return policys ? `branch, after ${behind}` : `branch, after what the environment wrote behind ${behind}`;
}

const SPACE = 24;          // pixels between two turns of the tree
const vector = (tag, attributes) => {
  const made = document.createElementNS($("drawing").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

// What a turn follows is to its left. A turn's first continuation stays in its row.
function tree(response, jump) {
  const parents = response.turn_ends.map((_, at) => parent(response, at + 1));
  const children = [[], ...parents.map(() => [])];
  parents.forEach((one, at) => children[one].push(at + 1));
  const places = [];
  let rows = 0;
  const place = (turn, column) => {
    const line = [];
    const row = rows++;
    for (let one = turn; one !== undefined; one = children[one][0]) line.push(one);
    line.forEach((one, at) => { places[one] = [(column + at + 0.5) * SPACE, (row + 0.5) * SPACE]; });
    // The last one first: so no line crosses another.
    line.forEach((_, at) => {
      const from = line.length - 1 - at;
      children[line[from]].slice(1).forEach((one) => place(one, column + from + 1));
    });
  };
  place(0, 0);
  const width = Math.max(...places.map(([x]) => x)) + SPACE / 2;
  const made = vector("svg", { width, height: rows * SPACE, role: "img", "aria-label": "tree of the turns" });
  parents.forEach((one, at) => made.append(vector("path", { d: edge(places[one], places[at + 1]) })));
  places.forEach((where, turn) => made.append(...node(response, where, turn, jump)));
  return element("div", "tree", made);
}

function edge([fromX, fromY], [x, y]) {
  return fromY === y ? `M${fromX} ${y}H${x}` : `M${fromX} ${fromY}V${y - 8}q0 8 8 8H${x}`;
}

function node(response, [x, y], turn, jump) {
  if (!turn) return [vector("circle", { cx: x, cy: y, r: 4, class: "root" })];
  const trained = response.trained.slice(turn > 1 ? response.turn_ends[turn - 2] : 0, response.turn_ends[turn - 1]);
  const tokens = trained.filter(Boolean).length;
  const dot = vector("circle", { cx: x, cy: y, r: 9, class: tokens ? "trained" : "" });
  const reward = response.turn_rewards[turn - 1];
  dot.dataset.tip = `turn ${turn}\n${tokens} trained tokens` + (reward ? `\nreward ${number(reward)}` : "");
  dot.onclick = () => jump(turn);
  const name = vector("text", { x, y: y + 3.5 });
  name.textContent = turn;
  return [dot, name];
}

function token(response, at, place) {
  const text = response.texts[place];
  const made = element("b", "", ...(text ? [visible(text).replace(/\n/g, "↵\n")] : []));
  made.dataset.token = `${at} ${place}`;
  const colour = colourOf(response, place);
  if (colour) made.style.background = colour;
  return made;
}

// ---- colours: strength grows with what is unusual

const mixed = (colour, share) => `color-mix(in srgb, ${colour} ${Math.round(100 * Math.min(1, share))}%, transparent)`;
const HUES = [205, 35, 145, 285, 75, 345, 175, 15];
const hue = (lag) => `hsl(${HUES[lag % HUES.length]} 70% 55% / .38)`;
const unlikely = (nats) => mixed("#c2557f", Math.min(0.7, -nats / 8));
const twoSided = (value, whole) => mixed(value < 0 ? "#d9822b" : "#2f86c5", (0.75 * Math.abs(value)) / whole);

function largest(name) {
  const all = shown.responses.flatMap((one) => one[name] || []).map((one) => Math.abs(one ?? 0));
  return all.reduce((most, one) => Math.max(most, one), 0) || 1;
}

function colourOf(response, place) {
  const version = response.versions[place];
  if (version === null || view.colour === "none") return "";
  if (view.colour === "version") return hue(shown.step - version);
  if (view.colour === "log-prob") return unlikely(response.logprobs[place] ?? -6);
  if (view.colour === "ratio") return response.ratios[place] === null ? "" : twoSided(response.ratios[place], 0.7);
  if (view.colour === "mask") return response.trained[place] ? mixed("#3f9f6b", 0.3) : "";
  const advantage = response.advantages?.[place];
  return advantage && response.trained[place] ? twoSided(advantage, 1.5 * (shown.most ??= largest("advantages"))) : "";
}

function legend() {
  const made = element("span", "legend");
  const add = (text, colour) => { const one = element("b", "", text); one.style.background = colour; made.append(one); };
  const versions = new Set(shown.responses.flatMap((one) => one.versions.filter((version) => version !== null)));
  if (view.colour === "version") {
    for (const one of [...versions].sort((a, b) => b - a).slice(0, 12)) add(`${one} (lag ${shown.step - one})`, hue(shown.step - one));
  }
  if (view.colour === "log-prob") for (const nats of [0, -2, -4, -6]) add(`${nats} nats`, unlikely(nats));
  if (view.colour === "ratio") for (const ratio of [0.5, 0.8, 1, 1.25, 2]) add(`π/μ ${ratio}`, twoSided(Math.log(ratio), 0.7));
  if (view.colour === "advantage") { add("below the group", twoSided(-1, 1.5)); add("above", twoSided(1, 1.5)); }
  if (view.colour === "mask") { add("trained", mixed("#3f9f6b", 0.3)); add("only context", "transparent"); }
  return made;
}

// ---- the token under the pointer

document.addEventListener("mouseover", (event) => {
  const { token: place, tip } = event.target.dataset ?? {};
  $("tip").hidden = !(place || tip);
  if ($("tip").hidden) return;
  $("tip").textContent = visible(tip || facts(...place.split(" ").map(Number))).replace(/⟦000A⟧/g, "\n");
  const box = event.target.getBoundingClientRect();
  $("tip").style.left = `${Math.max(4, Math.min(box.left, innerWidth - 250))}px`;
  $("tip").style.top = `${box.bottom + 130 > innerHeight ? box.top - $("tip").offsetHeight - 6 : box.bottom + 6}px`;
});

function facts(at, place) {
  const response = shown.responses[at];
  const version = response.versions[place];
  const lines = [`token ${response.token_ids[place]}  ${JSON.stringify(response.texts[place])}`];
  if (version === null) return [...lines, "written by the environment"].join("\n");
  lines.push(`version ${version}, lag ${shown.step - version}`);
  lines.push(`log-prob ${number(response.logprobs[place], 4)} (${number(100 * Math.exp(response.logprobs[place]), 1)} %)`);
  const ratio = response.ratios[place];
  if (ratio !== null) lines.push(`ratio π/μ ${number(Math.exp(ratio), 3)}`);
  if (response.advantages) lines.push(`advantage ${number(response.advantages[place])}`);
  lines.push(response.trained[place] ? "trained" : "not trained");
  return lines.join("\n");
}

// ---- the head: counts, the curve of rewards, and news of a live run

function drawHead() {
  $("name").textContent = visible(run.name);
  document.title = `${run.name} · lrl view`;
  $("counts").textContent = `${run.responses.toLocaleString("en")} rollouts of ${run.steps.length.toLocaleString("en")} steps`;
  const ends = $("filters").elements.end;
  const options = [["", "any way"]];
  for (const [kind, count] of Object.entries(run.failures)) options.push([`failure=${kind}`, `failed: ${kind} (${count})`]);
  for (const [reason, count] of Object.entries(run.finish_reasons)) options.push([`finish_reason=${reason}`, `${reason} (${count})`]);
  ends.replaceChildren(...options.map(([value, text]) => new Option(visible(text), value, false, value === ends.value)));
  drawCurve();
}

function drawCurve() {
  const canvas = $("curve"), scale = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const pen = canvas.getContext("2d");
  const span = run.most_reward - run.least_reward || 1;
  const above = 8 * scale, below = canvas.height - 16 * scale;
  const style = getComputedStyle(document.body);
  pen.strokeStyle = style.getPropertyValue("--accent");
  pen.lineWidth = 1.5 * scale;
  run.steps.forEach(([step, reward], at) => {
    if (reward === null) return;
    const x = ((at + 0.5) / run.steps.length) * canvas.width;
    pen.lineTo(x, below - ((reward - run.least_reward) / span) * (below - above));
  });
  pen.stroke();
  if (!run.steps.length) return;
  pen.fillStyle = style.color;
  pen.font = `${10 * scale}px ${style.fontFamily}`;
  pen.fillText(number(run.most_reward), 4 * scale, above + 2 * scale);
  pen.fillText(number(run.least_reward), 4 * scale, below + 2 * scale);
  pen.fillText(`step ${run.steps[0][0]}`, 4 * scale, canvas.height - 2 * scale);
  pen.textAlign = "right";
  pen.fillText(`step ${run.steps.at(-1)[0]}`, canvas.width - 4 * scale, canvas.height - 2 * scale);
}

$("curve").onclick = (event) => {
  const at = Math.floor((event.offsetX / $("curve").clientWidth) * run.steps.length);
  const fields = $("filters").elements;
  fields.first_step.value = fields.last_step.value = run.steps[at]?.[0] ?? "";
  changed();
};

function say(error) { $("state").textContent = error.message; }

function cannotShow(error) {
  $("group").replaceChildren(back(), element("p", "bad empty", visible(error.message)));
}

async function poll() {
  try {
    const news = await ask("run", run ? { revision: run.revision } : {});
    if (news.revision !== run?.revision) {
      run = news;
      drawHead();
      await reload();
      document.documentElement.dataset.drawnMs = Math.round(performance.now());
    }
    $("state").textContent = "";
  } catch (error) { say(error); }
  setTimeout(poll, POLL_MS);
}

let typing = 0;
function changed() {
  clearTimeout(typing);
  typing = setTimeout(() => { $("list").scrollTop = 0; reload().catch(say); }, 150);
}

$("filters").oninput = changed;
$("filters").onreset = changed;
$("filters").onsubmit = (event) => event.preventDefault();
$("list").onscroll = () => requestAnimationFrame(draw);
addEventListener("resize", () => { if (run) { drawCurve(); draw(); } });
addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || !"jk".includes(event.key)) return;
  const at = Number(document.querySelector(".row.chosen")?.dataset.at ?? -1) + (event.key === "j" ? 1 : -1);
  const group = list.pages.get(Math.floor(at / PAGE))?.[at % PAGE];
  if (!group) return;
  const box = $("list");
  if (at * ROW < box.scrollTop) box.scrollTop = at * ROW;
  if ((at + 1) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (at + 1) * ROW - box.clientHeight;
  open(group).catch(cannotShow);
});

remember();
poll().then(() => {
  const newest = list.pages.get(0)?.[0];
  if (view.step !== null) open(view).catch(cannotShow);
  else if (newest) open(newest, false).catch(cannotShow);
});
