// The page: asks, takes answers by key or touch, never loses one. No libraries, nothing from elsewhere.

const NONE = -1, UNSURE = -2;
const HOLD = 4;                  // questions, so that the next images are there before they are needed
const STEADY = 350;              // ms in which keys are not taken after the question changed by itself
const TINY = 32;                 // pixels; smaller images, digits perhaps, are scaled up with hard edges, photos smoothly
const REFRESH = 3000;            // ms between two looks at what the model does
const ROWS = 24;                 // images of a cluster shown at first

const PROMPTS = { pair: "Are these two of the same kind?", which: "Which is of the same kind?", triplet: "Which of the two is nearer in kind?" };

const by = (id) => document.getElementById(id);
const page = {
  annotator: "", database: "", current: null, shownAt: 0, queue: [], outbox: [], answered: new Set(), sending: false, failed: 0, busy: false,
  loading: false, steadyAt: 0, clash: false, order: "typical", state: null,
};

// Talking to the server

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function call(method, path, body) {
  const controller = new AbortController();
  const timer = setTimeout(() => controller.abort(), 15000);
  try {
    const options = { method, signal: controller.signal };
    if (body !== undefined) Object.assign(options, { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
    const response = await fetch(path, options);
    if (!response.ok) throw new Refused(response.status, await reason(response));
    return await response.json();
  } finally {
    clearTimeout(timer);
  }
}

async function reason(response) {
  try {
    const { detail } = await response.json();
    return typeof detail === "string" ? detail : detail.map((part) => part.msg).join("; ");
  } catch {
    return `the server answered ${response.status}`;
  }
}

const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// Memory of this browser: the annotator's name, and answers that the server has not confirmed yet

function recall(key) {
  try { return localStorage.getItem(key); } catch { return null; }
}

function remember(key, value) {
  try { value === null ? localStorage.removeItem(key) : localStorage.setItem(key, value); } catch { /* a private window: the page itself still holds it */ }
}

const entryKey = (entry) => `constraintmatch:${page.database}:${entry.question}`;

function unconfirmed() {
  const found = [];
  try {
    for (let at = 0; at < localStorage.length; at++) {
      const key = localStorage.key(at);
      if (key.startsWith(`constraintmatch:${page.database}:`)) found.push(JSON.parse(localStorage.getItem(key)));
    }
  } catch { /* nothing kept */ }
  return found.sort((one, other) => one.at - other.at);
}

// Counts and the line that says whether all is saved

function showState(state) {
  if (!state) return;
  const isNewer = page.state !== null && page.state.model !== state.model;
  page.state = state;
  const { counts } = state;
  const number = (value) => Math.round(value).toLocaleString("en");
  by("answered").textContent = number(counts.answered);
  by("wanted").textContent = state.wanted === null ? "" : ` of ${number(state.wanted)}`;
  by("same").textContent = number(counts.same);
  by("different").textContent = number(counts.different);
  by("nearer").textContent = number(counts.nearer);
  by("nearer").parentElement.hidden = by("export-triplets").hidden = !counts.nearer;
  by("unsure").textContent = number(counts.unsure);
  by("per-minute").textContent = counts.per_minute && counts.per_minute < 10 ? counts.per_minute.toFixed(1) : number(counts.per_minute);
  by("certain").textContent = `${(100 * state.certain).toFixed(state.certain && state.certain < 0.1 ? 1 : 0)} %`;
  by("contradictions").textContent = number(state.contradictions);
  by("contradictions").disabled = state.contradictions === 0;
  by("activity").textContent = state.activity ? `The model: ${state.activity}.` : "";
  by("activity").hidden = !state.activity;
  // a new model: its clusters are shown, unless somebody is about to name one
  if (isNewer && !by("view-clusters").hidden && !document.activeElement.matches("#galleries input")) showClusters();
  by("folder").textContent = `· ${number(state.images)} images of ${state.source}${state.model ? `, model ${state.model}` : ", no model"}`;
}

function showSaved() {
  const line = by("saved"), waiting = page.outbox.length;
  line.className = `saved ${waiting === 0 ? "" : page.failed ? "unsaved" : "saving"}`;
  const text = waiting === 0 ? "Saved" : page.failed ? `Not saved: ${waiting} – trying again` : "Saving";
  if (line.textContent !== text) line.textContent = text;
}

function notice(text) {
  by("notice").textContent = text;
  by("notice").hidden = !text;
}

const say = (text) => { by("heard").textContent = text; };

// Answers go out one after the other, and again until the server has them

async function send() {
  if (page.sending) return;
  page.sending = true;
  while (page.outbox.length) {
    const entry = page.outbox[0];
    try {
      const { at, ...body } = entry;
      confirmed(entry, await call("POST", "/api/answers", { ...body, hold: hold() - 1 }));
    } catch (error) {
      if (error instanceof Refused && error.status < 500 && ![401, 408, 429].includes(error.status)) {
        forget(entry);
        notice(`An answer was not taken: ${error.message}.`);
        continue;
      }
      page.failed += 1;
      if (error instanceof Refused && error.status === 401) notice(error.message);
      else if (error instanceof Refused) notice(`The server cannot save: ${error.message}.`);
      showSaved();
      await wait(Math.min(500 * 2 ** Math.min(page.failed, 4), 5000));
    }
  }
  page.sending = false;
  showSaved();
}

function forget(entry) {
  page.outbox.shift();
  remember(entryKey(entry), null);
}

function confirmed(entry, reply) {
  forget(entry);
  page.answered.add(entry.question);  // a reply that crossed this one may still offer it
  if (page.failed) notice("");
  page.failed = 0;
  showState(reply.state);
  showSaved();
  take(reply.held);
  if (reply.contradictions.length) showClash(reply.contradictions[0], reply.answer);
}

// While the server is away nothing can be taken back: what was answered may or may not have arrived
function unsaved() {
  if (!page.failed || !page.outbox.length) return false;
  notice("The server does not answer; this works again when your answers are saved.");
  return true;
}

async function saved() {
  while (page.outbox.length || page.sending) await wait(50);
}

// Asking

// How many questions to hold: those in the outbox are held until they are saved
const hold = () => Math.min(HOLD + page.outbox.length, 50);

async function fill() {
  if (page.loading) return;
  page.loading = true;
  let pause = 300;
  while (!page.current || page.queue.length === 0) {
    try {
      const reply = await call("POST", "/api/questions", { annotator: page.annotator, hold: hold() });
      if (!page.failed) notice(reply.problem ?? "");
      take(reply);
      if (page.current) break;
      reply.done ? finished() : waiting();
      pause = reply.done ? 3000 : 300;  // an undo elsewhere, or a better model, may bring more
    } catch (error) {
      notice(error instanceof Refused ? error.message : "The server does not answer. Is it still running? Trying again …");
      pause = Math.min(2 * pause, 5000);
    }
    await wait(pause);
  }
  page.loading = false;
}

// What the server says this annotator holds is the queue; what answers have settled meanwhile is no longer in it
function take(reply) {
  const sent = new Set(page.outbox.map((entry) => entry.question));
  const held = reply.questions.filter((question) => !sent.has(question.id) && !page.answered.has(question.id));
  held.forEach(preload);
  const current = page.current && held.find((question) => question.id === page.current.id);
  page.queue = held.filter((question) => question !== current);
  if (page.current && !current) {
    page.steadyAt = performance.now() + STEADY;
    page.current = null;
  }
  if (!page.current) next();
}

const preloaded = new Map();
function preload(question) {
  for (const { row } of [question.image, ...question.shown]) {
    if (preloaded.has(row)) continue;
    const image = new Image();
    image.src = `/api/images/${row}?v=${page.database}`;
    preloaded.set(row, image);
    if (preloaded.size > 100) preloaded.delete(preloaded.keys().next().value);
  }
}

function next() {
  page.current = page.queue.shift() ?? null;
  if (page.current) show(page.current);
  else waiting();
  if (!page.current || page.queue.length === 0) fill();
}

function waiting() {
  by("prompt").textContent = "Looking for the next question …";
  by("stage").hidden = true;
  setKeys(null);
}

function finished() {
  const { counts, wanted } = page.state ?? { counts: { answered: 0 } };
  const all = wanted && counts.answered >= wanted;
  by("prompt").textContent = all ? `All ${wanted.toLocaleString("en")} questions are answered. Thank you.` : counts.answered ? "Nothing is left to ask. Thank you." : "There is nothing to ask.";
  by("stage").hidden = true;
  setKeys(null);
  say(by("prompt").textContent);
}

function show(question) {
  const pair = question.kind === "pair";
  by("prompt").textContent = PROMPTS[question.kind];
  const stage = by("stage");
  stage.className = `stage ${pair ? "pair" : "which"}`;
  stage.hidden = false;
  void stage.offsetWidth;  // so that the animation starts anew
  stage.classList.add("fresh");
  setImage(by("image").querySelector("img"), question.image, "The image in question");
  by("image").querySelector("figcaption").textContent = question.image.name;
  by("shown").replaceChildren(...question.shown.map((image, at) => (pair ? companion(image) : option(image, at))));
  setKeys(question.kind);
  page.shownAt = performance.now();
  const place = page.state ? ` ${page.state.counts.answered + page.outbox.length + 1}` : "";
  say(`Question${place}: ${question.image.name}. ${by("prompt").textContent} ${question.shown.map((image, at) => (pair ? image.name : `${at + 1}: ${image.name}`)).join(", ")}`);
}

function setImage(element, image, alt) {
  element.classList.remove("tiny");
  element.onload = () => element.classList.toggle("tiny", Math.max(element.naturalWidth, element.naturalHeight) < TINY);
  element.src = `/api/images/${image.row}?v=${page.database}`;
  element.alt = `${alt}: ${image.name}`;
  if (element.complete && element.naturalWidth) element.onload();
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function companion(image) {
  const picture = make("img");
  setImage(picture, image, "Held against");
  return make("figure", { className: "frame" }, picture, make("figcaption", {}, image.name));
}

function option(image, at) {
  const picture = make("img");
  setImage(picture, image, `Choice ${at + 1}`);
  const label = image.cluster ? `${image.cluster} · ${image.name}` : image.name;
  const button = make("button", { className: image.cluster ? "tile named" : "tile", type: "button", title: label }, make("kbd", {}, String(at + 1)), picture, make("span", {}, image.cluster ?? image.name));
  button.setAttribute("aria-keyshortcuts", String(at + 1));
  button.addEventListener("click", () => answer(at));
  return button;
}

function setKeys(kind) {
  by("keys").hidden = kind === null && !page.state?.counts.answered;
  by("key-same").hidden = by("key-different").hidden = kind !== "pair";
  by("key-none").hidden = kind !== "which";
  by("key-unsure").hidden = kind === null;
}

function answer(choice) {
  const question = page.current;
  if (!question || page.busy || choice >= question.shown.length || performance.now() < page.steadyAt) return;
  const milliseconds = Math.min(Math.round(performance.now() - page.shownAt), 86400000);
  const entry = { question: question.id, choice, annotator: page.annotator, milliseconds, at: Date.now() };
  remember(entryKey(entry), JSON.stringify(entry));
  page.outbox.push(entry);
  showSaved();
  next();
  send();
}

async function undo() {
  if (page.busy || unsaved()) return;
  page.busy = true;
  try {
    await saved();
    const reply = await call("POST", "/api/undo", { annotator: page.annotator, hold: hold() });
    showState(reply.state);
    if (reply.question) takeBack(reply.question, reply.held);
    else say("There is nothing of yours to take back.");
  } catch (error) {
    notice(error instanceof Refused ? error.message : "The undo did not arrive; look at the counts, then try again.");
  }
  page.busy = false;
}

function takeBack(question, held) {
  page.answered.delete(question.id);
  page.current = question;
  hideClash();
  show(question);
  take({ questions: [question, ...held.questions.filter((one) => one.id !== question.id)] });
  say("Taken back. " + by("heard").textContent);
}

// Contradictions

function showClash(clash, newest = null) {
  showAnswers("These answers cannot all be right", clash.text, clash.answers, newest);
}

function lookAtClash() {
  by("clash-title").focus();
  by("clash").scrollIntoView({ block: "nearest" });
  say("First settle the contradiction, or press Escape to decide later.");
}

// An image that answers have placed already: a person who sees it in the wrong place takes one of them back
function showSaid(image, said) {
  const text = said.length ? "If it is in the wrong place, one of these answers is wrong." : "There is nothing to hold it against yet.";
  showAnswers(`Answers have placed ${image.name} already`, text, said, null);
}

function showAnswers(title, text, answers, newest) {
  page.clash = true;
  by("clash-title").textContent = title;
  by("clash-text").textContent = text;
  by("clash-answers").replaceChildren(...answers.map((said) => clashItem(said, newest)));
  by("clash").hidden = false;
  document.body.classList.add("clashing");
  by("clash-title").focus({ preventScroll: true });
  by("clash").scrollIntoView({ block: "nearest" });
  say(`${title}. ${text}`);
  notice("");
}

function hideClash() {
  page.clash = false;
  by("clash").hidden = true;
  document.body.classList.remove("clashing");
}

function clashItem(said, newest) {
  const word = said.link ? "same" : "different";
  const pictures = [said.left, said.right].map((image) => {
    const picture = make("img");
    setImage(picture, image, "Image");
    return make("figure", { className: "frame" }, picture, make("figcaption", { title: image.name }, image.name));
  });
  const couple = make("div", { className: "couple" }, pictures[0], make("b", { "aria-hidden": "true" }, said.link ? "=" : "≠"), pictures[1]);
  const who = said.annotator === page.annotator ? "You" : said.annotator || "Somebody";
  const text = make("p", { className: "said" }, make("strong", {}, `${who}: ${word}`), ` · ${said.answer === newest ? "just now" : when(said.time)}`);
  const does = make("div", { className: "does" });
  const what = `${said.left.name} and ${said.right.name}`;
  does.append(settleButton(said, said.change_to, `Change to ${changed(said)}`, what));
  does.append(settleButton(said, null, "Take back", what));
  return make("li", { className: said.answer === newest ? "newest" : "" }, couple, text, does);
}

const changed = (said) => (said.kind === "pair" ? (said.link ? "different" : "same") : said.link ? "none of these" : "same");

function settleButton(said, choice, text, what) {
  const button = make("button", { type: "button" }, text);
  button.setAttribute("aria-label", `${text}: ${what}`);
  button.addEventListener("click", () => settle(said.answer, choice));
  return button;
}

async function settle(answerId, choice) {
  if (page.busy || unsaved()) return;
  page.busy = true;
  try {
    await saved();
    const reply = await call("POST", "/api/settle", { answer: answerId, choice, annotator: page.annotator });
    showState(reply.state);
    hideClash();
    if (reply.contradictions.length) showClash(reply.contradictions[0]);
    else { say("Settled."); by("prompt").focus({ preventScroll: true }); }
  } catch (error) {
    notice(error instanceof Refused ? error.message : "That did not arrive; try again.");
  }
  page.busy = false;
  if (!by("view-clusters").hidden) showClusters();
  if (!page.current) fill();
}

async function openClashes() {
  try {
    const reply = await call("GET", "/api/contradictions");
    showState(reply.state);
    if (reply.contradictions.length) showClash(reply.contradictions[0]);
  } catch (error) {
    notice(error instanceof Refused ? error.message : "The server does not answer.");
  }
}

function when(time) {
  const minutes = (Date.now() - new Date(time).getTime()) / 60000;
  if (!(minutes >= 0)) return time;
  if (minutes < 1) return "less than a minute ago";
  if (minutes < 90) return `${Math.round(minutes)} min ago`;
  return new Date(time).toLocaleString();
}

// Clusters

async function showClusters() {
  try {
    const reply = await call("GET", `/api/clusters?order=${page.order}&n=${ROWS}`);
    by("clusters-title").textContent = reply.model ? "What the model believes" : "What the answers say so far";
    by("order").hidden = !reply.model;
    by("clusters-text").textContent = reply.clusters.length
      ? "An image that is in the wrong place? Choose it, and it becomes the next question."
      : reply.model ? "The model puts no image anywhere." : "No two images are linked yet: answer some questions first.";
    by("galleries").replaceChildren(...reply.clusters.map((cluster) => gallery(cluster, reply.model)));
  } catch (error) {
    notice(error instanceof Refused ? error.message : "The server does not answer.");
  }
}

function gallery(cluster, model) {
  const grid = make("div", { className: "grid" }, ...cluster.images.map(tile));
  const head = make("div", { className: "head" }, model ? nameField(cluster) : make("h2", {}, cluster.name));
  const share = cluster.confidence === null ? "" : `, ${Math.round(100 * cluster.confidence)} % sure on average`;
  head.append(make("span", { className: "quiet" }, `${cluster.size.toLocaleString("en")} images${share}`));
  const section = make("section", { className: "gallery", "aria-label": cluster.name }, head, grid);
  section.setAttribute("aria-label", cluster.name);
  if (cluster.images.length < cluster.size) section.append(moreButton(cluster, grid));
  return section;
}

function moreButton(cluster, grid) {
  const button = make("button", { className: "more", type: "button" }, "Show more");
  button.addEventListener("click", async () => {
    try {
      const offset = grid.children.length;
      const reply = await call("GET", `/api/clusters/${cluster.cluster}?order=${page.order}&offset=${offset}&n=${4 * ROWS}`);
      grid.append(...reply.images.map(tile));
      if (grid.children.length >= reply.size || !reply.images.length) button.remove();
    } catch (error) {
      notice(error instanceof Refused ? error.message : "The server does not answer.");
    }
  });
  return button;
}

function nameField(cluster) {
  const field = make("input", { value: cluster.name, maxLength: 80, spellcheck: false });
  field.setAttribute("aria-label", `Name of cluster ${cluster.cluster}`);
  const rename = async () => {
    const name = field.value.trim();
    if (name === cluster.name) return;
    try {
      const reply = await call("PUT", `/api/clusters/${cluster.cluster}/name`, { name });
      field.value = cluster.name = reply.name;
      say(`Cluster ${cluster.cluster} is now called ${reply.name}.`);
      notice("");
    } catch (error) {
      notice(error instanceof Refused ? `The name was not saved: ${error.message}` : "The name was not saved: the server does not answer.");
    }
  };
  field.addEventListener("change", rename);
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") field.blur(); });
  return field;
}

function tile(image) {
  const picture = make("img", { loading: "lazy", alt: "" });
  picture.addEventListener("load", () => picture.classList.toggle("tiny", picture.naturalWidth < TINY));
  picture.src = `/api/images/${image.row}/small?v=${page.database}`;
  const share = image.confidence === null ? "" : `${Math.round(100 * image.confidence)} %`;
  const doubtful = image.confidence !== null && image.confidence < 0.95;
  const button = make("button", { className: `tile${doubtful ? " doubtful" : ""}`, type: "button", title: image.name }, picture, make("span", {}, share || image.name));
  button.setAttribute("aria-label", `Ask about ${image.name}${share && `, ${share} sure`}`);
  button.addEventListener("click", () => ask(image));
  return button;
}

async function ask(image) {
  try {
    const reply = await call("POST", "/api/ask", { image: image.row, annotator: page.annotator, hold: hold() });
    if (!reply.question) return showSaid(image, reply.said);
    location.hash = "#questions";
    takeBack(reply.question, reply.held);
    say(`A question about ${image.name}. ` + by("prompt").textContent);
    by("prompt").focus({ preventScroll: true });
  } catch (error) {
    notice(error instanceof Refused ? error.message : "The server does not answer.");
  }
}

// Views and keys

function route() {
  const clusters = location.hash === "#clusters";
  by("view-questions").hidden = clusters;
  by("view-clusters").hidden = !clusters;
  by(clusters ? "to-clusters" : "to-questions").setAttribute("aria-current", "page");
  by(clusters ? "to-questions" : "to-clusters").removeAttribute("aria-current");
  document.title = `${clusters ? "Clusters" : "Questions"} – constraintmatch`;
  window.scrollTo(0, 0);
  hideClash();
  if (clusters) showClusters();
  else page.shownAt = performance.now();
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.key === "Escape" && page.clash) return hideClash();
  if (event.target.matches("input") || by("view-questions").hidden || event.repeat) return;
  const pair = page.current?.kind === "pair", which = page.current?.kind === "which", triplet = page.current?.kind === "triplet";
  const pressed = event.key.toLowerCase();
  if (pressed === "z") undo();
  else if (page.clash && /^[sdu0-5]$/.test(pressed)) lookAtClash();  // the question may be out of sight
  else if (pressed === "u") answer(UNSURE);
  else if (pair && pressed === "s") answer(0);
  else if (pair && pressed === "d") answer(NONE);
  else if (which && pressed === "0") answer(NONE);
  else if ((which || triplet) && /^[1-5]$/.test(pressed)) answer(Number(pressed) - 1);
  else return;
  event.preventDefault();
}

function setAnnotator() {
  const name = by("annotator").value.trim().replace(/\s+/g, " ");
  if (!name) { by("annotator").value = page.annotator; return; }
  page.annotator = by("annotator").value = name;
  remember("constraintmatch:annotator", name);
}

function setOrder(order) {
  page.order = order;
  for (const one of ["typical", "doubtful"]) by(`order-${one}`).setAttribute("aria-pressed", String(one === order));
  showClusters();
}

function listen() {
  document.addEventListener("keydown", key);
  window.addEventListener("hashchange", route);
  window.addEventListener("beforeunload", (event) => { if (page.outbox.length && page.failed) event.preventDefault(); });
  window.addEventListener("online", () => send());
  by("key-same").addEventListener("click", () => answer(0));
  by("key-different").addEventListener("click", () => answer(NONE));
  by("key-none").addEventListener("click", () => answer(NONE));
  by("key-unsure").addEventListener("click", () => answer(UNSURE));
  by("key-undo").addEventListener("click", undo);
  by("clash-later").addEventListener("click", hideClash);
  by("contradictions").addEventListener("click", openClashes);
  by("annotator").addEventListener("change", setAnnotator);
  by("annotator").addEventListener("keydown", (event) => { if (event.key === "Enter") event.target.blur(); });
  by("order-typical").addEventListener("click", () => setOrder("typical"));
  by("order-doubtful").addEventListener("click", () => setOrder("doubtful"));
}

function ownName() {
  const known = recall("constraintmatch:annotator");
  if (known) return known;
  const name = `guest-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36).slice(0, 5)}`;
  remember("constraintmatch:annotator", name);
  return name;
}

async function refresh() {
  for (;;) {
    await wait(REFRESH);
    if (document.hidden || page.outbox.length) continue;
    try { showState((await call("GET", "/api/state"))); } catch { /* the next answer will tell */ }
  }
}

async function start() {
  history.replaceState(null, "", location.pathname + location.hash);  // the token is in the cookie now
  page.annotator = by("annotator").value = ownName();
  listen();
  for (;;) {
    try {
      const state = await call("GET", "/api/state");
      page.database = state.database;
      showState(state);
      break;
    } catch (error) {
      notice(error instanceof Refused ? error.message : "The server does not answer. Is it still running? Trying again …");
      await wait(1500);
    }
  }
  page.outbox = unconfirmed();
  send();
  route();
  refresh();
  await fill();
}

start();
