// The page: selection and layout, and updates between its parts.

const HELP = [
  ["drag, wheel", "move, zoom; with shift tokens only, with alt rows only"],
  ["click, double click", "keep a segment or an op in the panel; zoom to the segment"],
  ["← →", "op before, next op; with shift ten"],
  ["Home End", "first and last op"],
  ["space", "play the schedule"],
  ["↑ ↓", "branch above, below; , and . its parent and first branch"],
  ["/", "search; Escape clears"],
  ["1 … 6", "colour by"],
  ["+ − 0", "zoom, show all"],
  ["d", "light or dark"],
];
const ABOUT =
  "To the right: depth in tokens. Downwards: sequences in lexicographic order. A segment is as wide as it has tokens " +
  "and as high as sequences share it, so the area is the batch without sharing. The thick line is the path whose " +
  "keys and values are on the stack at the current op. Drawn with D3 (licences at the top of this file).";
const PLAY_MILLISECONDS = 90;

const byId = (id) => document.getElementById(id);

class App {
  constructor(unpacked) {
    this.tree = new Tree(unpacked);
    if (this.tree.facts.device) units = DECIMAL;
    this.words = new Words(this.tree);
    this.schedule = new Schedule(this.tree);
    this.state = { selected: -1, hovered: -1, row: -1, hoveredOp: -1, related: [], matches: null, mode: null };
    this.theme = new Theme(() => this.restyle());
    this.modes = modesOf(this.tree, this.schedule, this.theme);
    for (const mode of this.modes) mode.uses = (state) => this.usesState(state);
    this.state.mode = this.modes[0];
    this.restyle();
    this.header();
    const { tree, words, schedule, theme, state } = this;
    this.treeView = new TreeView(byId("tree-stage"), tree, words, schedule, theme, state);
    this.timeline = new Timeline(byId("timeline-stage"), schedule, theme, state);
    this.details = new Details(byId("details"), tree, words, schedule, theme, state, {
      select: (node) => this.select(node, true),
      selectRow: (row) => this.selectRow(row),
      goTo: (op) => this.goTo(op),
      colourBy: (key) => this.modeButtons(this.modes.findIndex((mode) => mode.key === key)),
    });
    this.search = new Search(byId("search"), byId("results"), tree, words, {
      onMatches: (matches) => this.filter(matches),
      onChosen: (row) => this.selectRow(row),
    });
    this.controls();
    this.pointers();
    addEventListener("keydown", (event) => this.press(event));
    this.describe();
    if (!tree.rows) byId("tree-stage").append(element("div", { className: "empty" }, "No sequences: nothing to run."));
  }

  header() {
    const { stats, schedule } = this.tree.facts;
    byId("subtitle").textContent =
      `${schedule.strategy}, ${schedule.order}, ${schedule.mode}, chunks of ${number(schedule.chunk_size)}`;
    const figures = [
      ["sequences", number(stats.sequences)],
      ["tokens", number(stats.tokens)],
      ["to run", number(stats.tree_tokens)],
      ["compression C", `${stats.compression.toFixed(2)}×`],
      ["ops", number(stats.ops)],
      ["run again", number(stats.tokens_forwarded_twice)],
      ["peak stack", number(stats.peak_stack_tokens)],
    ];
    byId("figures").append(
      ...figures.map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, value))),
    );
  }

  restyle() {
    for (const mode of this.modes ?? []) mode.refresh();
    if (this.state.mode) drawLegend(byId("legend"), this.state.mode);
    this.treeView?.viewport.drawNow();
    this.timeline?.viewport.drawNow();
    this.details?.render();
  }

  usesState(state) {
    return state === PENDING || this.tree.state.includes(state);
  }

  controls() {
    this.modeButtons = this.radios(
      "modes",
      this.modes.map((mode) => [mode.label, mode.hint]),
      (i) => this.colourBy(i),
    );
    this.radios(
      "widths",
      [
        ["by op", "ops of one width"],
        ["by tokens", "ops as wide as the tokens that they run"],
      ],
      (i) => this.timeline.setWidths(i ? "tokens" : "even"),
    );
    const clicks = {
      theme: () => this.theme.toggle(),
      keys: () => this.help(),
      fit: () => this.showAll(),
      play: () => this.play(),
      first: () => this.goTo(0),
      last: () => this.goTo(this.schedule.length - 1),
      back: () => this.goTo(this.schedule.now - 1),
      next: () => this.goTo(this.schedule.now + 1),
    };
    for (const [id, act] of Object.entries(clicks)) byId(id).addEventListener("click", act);
    drawLegend(byId("legend"), this.state.mode);
  }

  // Make a row of buttons, one of which is pressed; return the function that presses one.
  radios(id, labels, act) {
    const buttons = labels.map(([label, hint], i) => {
      const button = element("button", { type: "button", title: hint, onclick: () => choose(i) }, label);
      button.setAttribute("role", "radio");
      return button;
    });
    const mark = (chosen) => buttons.forEach((button, i) => button.setAttribute("aria-checked", i === chosen));
    const choose = (i) => {
      mark(i);
      act(i);
    };
    byId(id).append(...buttons);
    mark(0);
    return choose;
  }

  colourBy(i) {
    this.state.mode = this.modes[i];
    drawLegend(byId("legend"), this.state.mode);
    this.describe();
    this.treeView.viewport.invalidate();
  }

  describe() {
    byId("view-note").textContent = this.state.mode.hint;
    const { now, length, lines } = this.schedule;
    const place = element("b", {}, now < 0 ? `${plural(length, "op")}` : `${number(now + 1)} / ${number(length)}`);
    const text = now < 0 ? (length ? "  step with ← →" : "") : `  ${lines[now].slice(0, 300)}`;
    byId("op-line").replaceChildren(place, text);
    this.details.render();
  }

  pointers() {
    const follow = (stage, move) => {
      stage.addEventListener("pointermove", (event) => move(event));
      stage.addEventListener("pointerleave", () => this.hover(-1, -1, -1));
    };
    follow(byId("tree-stage"), (event) => {
      const { node, row } = this.treeView.hit(event);
      this.hover(node, -1, row, event);
    });
    follow(byId("timeline-stage"), (event) => this.hover(-1, this.timeline.opAt(event), -1, event));
    byId("tree-stage").addEventListener("click", (event) => {
      const { node } = this.treeView.hit(event);
      this.state.row = -1;
      this.select(node);
    });
    byId("timeline-stage").addEventListener("click", (event) => {
      const op = this.timeline.opAt(event);
      if (op >= 0) this.goTo(op);
    });
  }

  hover(node, op, row, event) {
    const { state } = this;
    const tooltip = byId("tooltip");
    const pressed = event?.buttons > 0;
    tooltip.hidden = pressed || (node < 0 && op < 0);
    byId("tree-stage").classList.toggle("over", node >= 0);
    if (node !== state.hovered || op !== state.hoveredOp || row !== this.hoveredRow) {
      this.hoveredRow = row;
      Object.assign(state, { hovered: node, hoveredOp: op });
      if (node >= 0) tooltip.replaceChildren(...this.details.card(node, row));
      if (op >= 0) tooltip.replaceChildren(...this.details.opCard(op));
      this.treeView.viewport.invalidateOverlay();
      this.timeline.viewport.invalidateOverlay();
    }
    if (!tooltip.hidden) this.place(tooltip, event);
  }

  place(tooltip, event) {
    const { width, height } = tooltip.getBoundingClientRect();
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
    Object.assign(tooltip.style, { left: `${Math.max(4, left)}px`, top: `${Math.max(4, top)}px` });
  }

  select(node, reveals = false) {
    this.state.selected = node;
    this.state.related = node < 0 ? [] : this.schedule.opsOver(this.tree.first[node], this.tree.first[node + 1], 400);
    if (node >= 0 && reveals) this.reveal(node);
    this.refresh();
  }

  // Zoom to a segment if it is off screen or too small.
  reveal(node) {
    const { tree, treeView } = this;
    const [left, right] = treeView.viewport.x.domain;
    const [top, bottom] = treeView.viewport.y.domain;
    const seen = tree.start[node] < right && tree.stop[node] > left && tree.lo[node] < bottom && tree.hi[node] > top;
    const [, , wide, high] = treeView.box(node);
    if (!seen || wide < 6 || high < 6) treeView.showNode(node);
  }

  selectRow(row) {
    this.state.row = row;
    this.select(this.tree.endOfRow(row));
    this.treeView.showRow(row);
  }

  filter(matches) {
    this.state.matches = matches;
    this.treeView.forgetBins();
    this.treeView.viewport.invalidate();
  }

  goTo(op) {
    if (!this.schedule.length) return;
    const next = Math.max(0, Math.min(this.schedule.length - 1, op));
    this.schedule.moveTo(next);
    this.timeline.reveal(next);
    this.refresh();
  }

  refresh() {
    this.describe();
    this.timeline.viewport.invalidate();
    if (this.state.mode instanceof StateMode) this.treeView.viewport.invalidate();
    else this.treeView.viewport.invalidateOverlay();
  }

  play() {
    if (this.playing) {
      clearInterval(this.playing);
      this.playing = null;
    } else {
      if (this.schedule.now >= this.schedule.length - 1) this.goTo(0);
      this.playing = setInterval(() => {
        this.goTo(this.schedule.now + 1);
        if (this.schedule.now >= this.schedule.length - 1) this.play();
      }, PLAY_MILLISECONDS);
    }
    byId("play")
      .querySelector("path")
      .setAttribute("d", this.playing ? "M2 1h3v10H2zM7 1h3v10H7z" : "M2 0v12l9-6z");
    byId("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }

  showAll() {
    this.treeView.viewport.showAll();
    this.timeline.viewport.showAll();
  }

  clear() {
    this.search.clear();
    this.state.row = -1;
    this.select(-1);
  }

  neighbour(key) {
    const { tree, state } = this;
    const links = { ArrowUp: tree.previous, ArrowDown: tree.next, ",": tree.parent, ".": tree.child };
    const to = state.selected < 0 ? (tree.nodes ? 0 : -1) : links[key][state.selected];
    if (to >= 0) this.select(to, true);
  }

  press(event) {
    if (event.target.closest("input, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1;
    const { now, length } = this.schedule;
    const acts = {
      ArrowRight: () => this.goTo(now + far),
      ArrowLeft: () => this.goTo(now - far),
      Home: () => this.goTo(0),
      End: () => this.goTo(length - 1),
      " ": () => this.play(),
      "/": () => byId("search").focus(),
      Escape: () => this.clear(),
      d: () => this.theme.toggle(),
      0: () => this.showAll(),
      "?": () => this.help(),
      "+": () => this.treeView.viewport.zoomBy(1.5),
      "-": () => this.treeView.viewport.zoomBy(1 / 1.5),
    };
    for (const key of ["ArrowUp", "ArrowDown", ",", "."]) acts[key] = () => this.neighbour(key);
    this.modes.forEach((_, i) => (acts[i + 1] = () => this.modeButtons(i)));
    acts["="] = acts["+"];
    if (!acts[event.key] || (event.key === " " && event.target.closest("button"))) return;
    event.preventDefault();
    acts[event.key]();
  }

  help() {
    const rows = HELP.map(([keys, text]) =>
      element("tr", {}, element("td", {}, element("kbd", {}, keys)), element("td", {}, text)),
    );
    byId("help").replaceChildren(element("h2", {}, "Keys"), element("table", {}, ...rows), element("p", {}, ABOUT));
    byId("help").showModal();
  }
}

async function start() {
  try {
    globalThis.dta = new App(await unpack(byId("data").textContent));
    performance.mark("drawn");
    document.body.dataset.ready = "yes";
  } catch (error) {
    byId("tree-stage").replaceChildren(
      element("div", { className: "empty", role: "alert" }, String(error.message ?? error)),
    );
    document.body.dataset.ready = "failed";
    throw error;
  }
}

start();
