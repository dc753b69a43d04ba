// The panel beside the pictures and the card at the pointer: details of an op, a segment, a sequence or the plan.

const CONTEXT = 12; // tokens shown on either side of a branching point
const MOST_BRANCHES = 12;
const LABEL_WIDTH = 10; // width of the labels in the printed summary, in columns
const MORE = 50; // segments that a click adds to the list
const MOST_WORDS = 400; // tokens of a segment that are written out, half of them from its end

function element(tag, properties = {}, ...children) {
  const { dataset, style, ...others } = properties;
  const made = Object.assign(document.createElement(tag), others);
  Object.assign(made.dataset, dataset);
  Object.assign(made.style, style);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function table(rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return element(
    "table",
    {},
    ...known.map(([key, value]) => element("tr", {}, element("td", {}, key), element("td", {}, value))),
  );
}

class Details {
  constructor(panel, tree, words, schedule, theme, state, actions) {
    Object.assign(this, { panel, tree, words, schedule, theme, state, actions, order: "tokens", most: MOST_BRANCHES });
  }

  render() {
    const { state, schedule } = this;
    const parts = [];
    if (state.selected >= 0) parts.push(...this.segment(state.selected));
    if (state.row >= 0) parts.push(...this.sequence(state.row));
    if (schedule.now >= 0) parts.push(...this.op(schedule.now));
    parts.push(...this.plan(parts.length === 0));
    this.panel.replaceChildren(...parts);
  }

  plan(isFirst) {
    const { facts } = this.tree;
    const parts = isFirst ? [...this.totals(), ...this.losses(), ...this.memory(), ...this.largest()] : [];
    parts.push(element("h2", {}, "Plan"));
    if (isFirst)
      parts.push(element("p", { className: "note" }, "Point at a segment or an op; click to keep it here. Keys: ?"));
    parts.push(this.summary(facts.summary));
    if (facts.ends !== null) {
      const kept = plural(facts.ends, "token");
      const text = `To keep this file small it has the first and last ${kept} of each segment only.`;
      parts.push(element("p", { className: "note", id: "cut-note" }, text));
    }
    if (!this.words.known) {
      parts.push(element("p", { className: "note" }, "Token ids were not given to this page (sequences=...)."));
    } else if (!facts.texts) {
      parts.push(
        element("p", { className: "note" }, "Tokens are shown as ids: no tokenizer was given (tokenizer=...)."),
      );
    }
    return parts;
  }

  // Tokens that are run, by role of their message if known, and how many are trained on.
  totals() {
    const { tree } = this;
    const total = tree.first[tree.nodes];
    if (!total) return [];
    const share = (count) => `${number(count)} (${short((100 * count) / total)} %)`;
    const roles = new Map();
    if (tree.roleStart) {
      tree.eachRun("role", 0, total, (role, from, to) => roles.set(role, (roles.get(role) ?? 0) + to - from));
    }
    let [trained, again] = [0, 0];
    if (tree.trainedStart) tree.eachRun("trained", 0, total, (times, from, to) => (trained += times ? to - from : 0));
    tree.eachRun("forwards", 0, total, (times, from, to) => (again += times > 1 ? to - from : 0));
    const byRole = [...roles].sort((a, b) => b[1] - a[1]).map(([role, count]) => [tree.facts.roles[role], share(count)]);
    return [
      element("h2", {}, `Where the ${plural(total, "token")} to run are`),
      table([
        ...byRole,
        ["trained on", tree.trainedStart ? share(trained) : null],
        ["run more than once", again ? share(again) : null],
      ]),
    ];
  }

  // The table of `dta why`: what keeps prefixes from being shared; a row colours the tree and goes to a place of it.
  losses() {
    const { losses } = this.tree.facts;
    if (!losses) return [];
    const title = element("h2", {}, "Run again because of");
    const nothing = "Nothing: where sequences part, contents do.";
    if (!losses.length) return [title, element("p", { className: "note" }, nothing)];
    const cells = (tag, values) => element("tr", {}, ...values.map((value) => element(tag, {}, value)));
    const rows = losses.map(({ name, places, gained, compression, advice, examples }) => {
      const act = () => {
        const [sequence, at] = examples[0];
        this.actions.colourBy("causes");
        this.actions.select(this.tree.at(this.tree.position[sequence], at));
      };
      const cause = advice ? element("button", { type: "button", title: advice, onclick: act }, name) : name;
      return cells("td", [cause, number(places), number(gained), compression.toFixed(2)]);
    });
    const head = cells("th", ["cause", "places", "tokens", "C without"]);
    return [title, element("table", { className: "losses" }, head, ...rows)];
  }

  memory() {
    const { device } = this.tree.facts;
    if (!device) return [];
    const most = (values) => amount(device.base + Math.max(0, bounds(values)[1]), "bytes");
    const rows = [
      ["model, sums of gradients, stack", amount(device.base, "bytes")],
      ["with kept graphs and KV", most(this.tree.keptBytes)],
      ["with the chunk at work", most(this.tree.peakBytes)],
      ["the device has", amount(device.memory, "bytes")],
    ];
    return [element("h2", {}, `Memory on ${device.name}`), table(rows)];
  }

  // The largest segments, by tokens or by tokens saved by sharing.
  largest() {
    const { tree } = this;
    const orders = {
      tokens: (node) => tree.size(node),
      sequences: (node) => tree.through(node),
      "tokens saved": (node) => tree.size(node) * (tree.through(node) - 1),
    };
    const value = orders[this.order];
    const nodes = Array.from({ length: tree.nodes }, (_, node) => node).sort((a, b) => value(b) - value(a));
    const choices = Object.keys(orders).map((order) => {
      const act = () => {
        this.order = order;
        this.render();
      };
      const button = element("button", { type: "button", onclick: act }, order);
      button.setAttribute("role", "radio");
      button.setAttribute("aria-checked", order === this.order);
      return button;
    });
    const sorts = element("div", { className: "switch", id: "sorts" }, ...choices);
    sorts.setAttribute("role", "radiogroup");
    sorts.setAttribute("aria-label", "Sort segments by");
    return [
      element("h3", {}, "Largest segments, by"),
      sorts,
      ...nodes
        .slice(0, this.most)
        .map((node) => this.link(this.label(node), number(value(node)), () => this.actions.select(node))),
      ...this.rest(nodes.length - this.most),
    ];
  }

  // A button for more segments, if there are.
  rest(count) {
    if (count <= 0) return [];
    const act = () => {
      this.most += MORE;
      this.render();
    };
    const text = `${number(Math.min(count, MORE))} more of ${number(count)}`;
    return [element("button", { type: "button", id: "more", onclick: act }, text)];
  }

  // A segment's name, as in the printed tree, and how it begins.
  label(node) {
    return `${this.range(node)} ${this.words.beginning(node, 18)}`.trim();
  }

  // The printed summary, with labels and texts side by side.
  summary(text) {
    const [title, ...lines] = text.split("\n");
    const rows = [["", title]];
    for (const line of lines) {
      const [, label, gap, rest] = line.match(/^ {2}([a-z-]+)( +)(.*)$/) ?? [];
      const isTitle = !line.startsWith(" ");
      if (isTitle) rows.push(line.split(/: (.*)/));
      else if (label && label.length + gap.length >= LABEL_WIDTH) rows.push([label, rest]);
      else rows.at(-1)[1] += line.startsWith("   ") ? ` ${line.trim()}` : `\n${line.trim()}`;
    }
    const made = table(rows.slice(1));
    made.className = "summary";
    return element("div", {}, element("p", {}, title), made);
  }

  op(op) {
    const { schedule, tree, theme } = this;
    const kind = schedule.kindOf(op);
    const attached = schedule.attachedBy(op).length;
    const bytes = schedule.inBytes ? amount(tree.keptBytes[op], "bytes") : null;
    return [
      element(
        "h2",
        {},
        `Op ${number(op + 1)} of ${number(schedule.length)} `,
        element("span", { className: "chip", style: { background: theme.kinds[kind] } }, kind),
      ),
      element("pre", { id: "op-text" }, schedule.lines[op]),
      table([
        ["tokens", schedule.tokensOf(op) ? number(schedule.tokensOf(op)) : null],
        ["sequences attached", attached ? number(attached) : null],
        ["stack after it", plural(tree.stack[op], "token")],
        ["live graphs after it", plural(tree.live[op], "token")],
        ["KV kept alone", tree.stored[op] ? plural(tree.stored[op], "token") : null],
        ["kept after it", bytes],
        ["most as it runs", schedule.inBytes ? amount(tree.peakBytes[op], "bytes") : null],
      ]),
    ];
  }

  facts(node) {
    const { tree } = this;
    const ends = tree.ends[node];
    const times = tree.average("forwards", node);
    return [
      ["sequences through it", number(tree.through(node))],
      ["of them end here", ends ? number(ends) : null],
      ["tokens saved", tree.through(node) > 1 ? number(tree.size(node) * (tree.through(node) - 1)) : null],
      ["run forward", times === 1 ? "once" : `${short(times)} times`],
      ["run by", tree.rankStart ? this.ranksOf(node) : null],
      [
        "trained on",
        tree.trainedStart ? `${short(100 * tree.average("trained", node, (n) => n > 0))} % of tokens` : null,
      ],
      [tree.through(node) > 1 ? "mean reward" : "reward", tree.reward ? short(tree.meanReward(node)) : null],
    ];
  }

  // The ranks that run a segment, in the order of its tokens.
  ranksOf(node) {
    const found = [];
    this.tree.eachRun("rank", this.tree.first[node], this.tree.first[node + 1], (rank) => found.push(rank));
    const more = found.length > MOST_RANKS ? `, and ${number(found.length - MOST_RANKS)} more pieces` : "";
    return `rank ${found.slice(0, MOST_RANKS).join(", ")}${more}`;
  }

  segment(node) {
    const { tree, words } = this;
    const parts = [
      element("h2", {}, "Segment"),
      element(
        "div",
        { className: "lead" },
        `[${number(tree.start[node])}:${number(tree.stop[node])}]  ${plural(tree.size(node), "token")}`,
      ),
      table(this.facts(node)),
    ];
    if (words.known) parts.push(element("h3", {}, "Tokens"), this.tokens(node, tree.start[node], tree.stop[node]));
    parts.push(...this.parting(node), ...this.branches(node), ...this.endings(node), ...this.runs(node));
    return parts;
  }

  // Tokens [from, to) of a node; if there are many, the middle is cut out.
  tokens(node, from, to, differs = -1) {
    const box = element("div", { className: "tokens" });
    let left = 0;
    const cut = () => {
      if (left) box.append(element("span", { className: "cut" }, `… ${plural(left, "token")} …`));
      left = 0;
    };
    for (let depth = from; depth < to; depth++) {
      const entry = this.words.entry(node, depth);
      const skipped = to - from > MOST_WORDS && depth >= from + MOST_WORDS / 2 && depth < to - MOST_WORDS / 2;
      if (entry < 0 || skipped) {
        left++;
        continue;
      }
      cut();
      box.append(this.token(entry, depth, depth === differs));
    }
    cut();
    return box;
  }

  token(entry, depth, differs) {
    const { texts } = this.words;
    const text = unhidden(this.words.text(entry).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t").replace(/\r/g, "␍"));
    const title = `token ${number(depth)}: id ${this.tree.vocabulary[entry]}`;
    const image = text.match(/^⟨image (\d+), /);
    const thumbnail = image && this.tree.facts.thumbnails[image[1]];
    if (thumbnail) return element("img", { src: thumbnail, alt: text, title: text });
    return element("span", { title, className: differs ? "differs" : "" }, texts ? text : `${text} `);
  }

  // Where a segment diverges from its neighbour: the last shared tokens, and the first different ones.
  parting(node) {
    const { tree, words } = this;
    const other = tree.previous[node] >= 0 ? tree.previous[node] : tree.next[node];
    if (other < 0) return [];
    const where = tree.start[node];
    const parts = [element("h3", {}, `Parts from its neighbour at token ${number(where)}`)];
    if (!words.known) {
      const [mine, its] = [words.firstId(node), words.firstId(other)];
      const text = !tree.facts.shared
        ? "The plan shares no prefixes."
        : mine === undefined
          ? ""
          : `${mine} here, ${its} there`;
      return text ? [...parts, element("p", { className: "note" }, text)] : [];
    }
    const parent = tree.parent[node];
    if (parent >= 0) parts.push(this.tokens(parent, Math.max(tree.start[parent], where - CONTEXT), where));
    for (const one of [node, other]) {
      parts.push(this.tokens(one, where, Math.min(tree.stop[one], where + CONTEXT), where));
    }
    const same = words.firstId(node) === words.firstId(other);
    const why = tree.facts.shared
      ? "The ids are equal: what differs is recorded with them, such as routes of experts."
      : "The plan shares no prefixes.";
    if (same) parts.push(element("p", { className: "note" }, why));
    return parts;
  }

  branches(node) {
    const { tree } = this;
    const found = tree.children(node).sort((a, b) => tree.through(b) - tree.through(a));
    if (!found.length) return [];
    return [
      element("h3", {}, `${plural(found.length, "branch").replace("branchs", "branches")} after it, by sequences`),
      ...found
        .slice(0, MOST_BRANCHES)
        .map((child) =>
          this.link(this.label(child), number(tree.through(child)), () => this.actions.select(child)),
        ),
      ...this.more(found.length - MOST_BRANCHES),
    ];
  }

  range(node) {
    return `[${number(this.tree.start[node])}:${number(this.tree.stop[node])}]`;
  }

  more(count) {
    return count > 0 ? [element("p", { className: "note" }, `and ${number(count)} more`)] : [];
  }

  link(text, value, act) {
    return element(
      "button",
      { className: "go", type: "button", onclick: act },
      element("code", {}, text),
      element("span", {}, value),
    );
  }

  endings(node) {
    const { tree } = this;
    const count = tree.ends[node];
    if (!count) return [];
    const rows = Array.from({ length: Math.min(count, MOST_BRANCHES) }, (_, i) => tree.lo[node] + i);
    return [
      element("h3", {}, "Sequences that end here"),
      ...rows.map((row) => this.link(tree.name(tree.order[row]), this.reward(row), () => this.actions.selectRow(row))),
      ...this.more(count - MOST_BRANCHES),
    ];
  }

  reward(row) {
    return this.tree.reward ? `reward ${short(this.tree.reward[this.tree.order[row]])}` : "";
  }

  runs(node) {
    const ops = this.state.related;
    if (!ops.length) return [];
    return [
      element("h3", {}, "Ops that run it"),
      ...ops
        .slice(0, MOST_BRANCHES)
        .map((op) => this.link(this.schedule.lines[op], number(op + 1), () => this.actions.goTo(op))),
      ...this.more(ops.length - MOST_BRANCHES),
    ];
  }

  sequence(row) {
    const { tree } = this;
    const sequence = tree.order[row];
    const path = [];
    for (let node = tree.endOfRow(row); node >= 0; node = tree.parent[node]) path.push(node);
    path.reverse();
    const own = path.length ? path.at(-1) : -1;
    const alone = path.filter((node) => tree.through(node) === 1).reduce((sum, node) => sum + tree.size(node), 0);
    return [
      element("h2", {}, `Sequence ${tree.name(sequence)}`),
      table([
        ["tokens", number(tree.lengthOfRow(row))],
        ["shared with others", number(tree.lengthOfRow(row) - alone)],
        ["reward", tree.reward ? short(tree.reward[sequence]) : null],
      ]),
      path.length ? element("h3", {}, `${plural(path.length, "segment")} of its path`) : null,
      ...path
        .slice(-MOST_BRANCHES)
        .map((node) =>
          this.link(
            this.label(node),
            `${number(tree.size(node))} × ${number(tree.through(node))}`,
            () => this.actions.select(node),
          ),
        ),
      ...this.more(path.length - MOST_BRANCHES),
      own < 0 ? element("p", { className: "note" }, "It has no tokens.") : null,
    ].filter(Boolean);
  }

  // The card at the pointer.
  card(node, row) {
    const { tree, words } = this;
    const known = this.facts(node).filter(([, value]) => value !== null && value !== "");
    return [
      element(
        "div",
        {},
        element(
          "b",
          {},
          `[${number(tree.start[node])}:${number(tree.stop[node])}]  ${plural(tree.size(node), "token")}`,
        ),
      ),
      ...known.map(([key, value]) => element("div", { className: "row" }, `${key}: ${value}`)),
      row >= 0 ? element("div", { className: "row" }, `row ${number(row)}: ${tree.name(tree.order[row])}`) : null,
      words.beginning(node) ? element("code", {}, words.beginning(node, 120)) : null,
    ].filter(Boolean);
  }

  opCard(op) {
    const line = this.schedule.lines[op];
    return [
      element("b", {}, `Op ${number(op + 1)} `),
      element("code", {}, line.length > 260 ? `${line.slice(0, 260)} …` : line),
      element(
        "div",
        { className: "row" },
        `${plural(this.tree.stack[op], "token")} on the stack, ${number(this.tree.live[op])} with live graphs after it`,
      ),
    ];
  }
}
