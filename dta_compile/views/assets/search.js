// Search by number (12 or s12), name, text of tokens or a run of ids. Rows that do not match are dimmed.

const MOST_RESULTS = 100;

// Matching rows, ascending.
class Matches {
  constructor(rows, count) {
    this.rows = rows;
    this.sums = new Int32Array(count + 1);
    for (const row of rows) this.sums[row + 1] = 1;
    for (let i = 0; i < count; i++) this.sums[i + 1] += this.sums[i];
  }

  between(low, high) {
    return this.sums[high] > this.sums[low];
  }

  has(row) {
    return this.between(row, row + 1);
  }
}

class Search {
  constructor(input, results, tree, words, { onMatches, onChosen }) {
    Object.assign(this, { input, results, tree, words, onMatches, onChosen });
    this.chosen = 0;
    const tokens = words.texts ? " or text" : words.known ? " or token ids" : "";
    input.title = `Sequence${tree.facts.names ? ", name" : ""}${tokens}`;
    input.addEventListener("input", () => {
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => this.run(), 120);
    });
    input.addEventListener("keydown", (event) => this.press(event));
    input.addEventListener("focus", () => (results.hidden = !input.value.trim()));
    document.addEventListener("pointerdown", (event) => {
      if (!event.target.closest(".search")) results.hidden = true;
    });
  }

  clear() {
    this.input.value = "";
    this.run();
  }

  run() {
    const query = this.input.value.trim();
    this.matches = query ? new Matches(this.find(query), this.tree.rows) : null;
    this.chosen = 0;
    this.onMatches(this.matches);
    this.render();
  }

  // Return the rows of the sequences that match a query.
  find(query) {
    const { tree } = this;
    const byNumber = query.match(/^s?(\d+)$/i);
    if (byNumber && Number(byNumber[1]) < tree.rows) return [tree.position[Number(byNumber[1])]];
    const lower = query.toLowerCase();
    const rows = new Set();
    if (tree.facts.names) {
      tree.facts.names.forEach(
        (name, sequence) => name.toLowerCase().includes(lower) && rows.add(tree.position[sequence]),
      );
    }
    if (this.words.known && query.length > 1) {
      for (let node = 0; node < tree.nodes; node++) {
        if (!this.contains(node, lower)) continue;
        for (let row = tree.lo[node]; row < tree.hi[node]; row++) rows.add(row);
      }
    }
    return [...rows].sort((a, b) => a - b);
  }

  contains(node, lower) {
    this.lines ??= new Array(this.tree.nodes);
    this.lines[node] ??= this.lineOf(node);
    return this.lines[node].includes(this.words.texts ? lower : ` ${lower} `);
  }

  lineOf(node) {
    const { words } = this;
    const entries = words.tree.token.subarray(words.offset[node], words.offset[node + 1]);
    if (words.texts)
      return Array.from(entries, (entry) => words.texts[entry])
        .join("")
        .toLowerCase();
    return ` ${Array.from(entries, (entry) => words.tree.vocabulary[entry]).join(" ")} `;
  }

  render() {
    const { results, matches, tree } = this;
    results.hidden = !matches;
    if (!matches) return;
    const cut = tree.facts.ends === null ? "" : " (in the tokens that this file has)";
    const found = matches.rows.length
      ? `${plural(matches.rows.length, "sequence")}${cut}; ↑ ↓ and Enter to go there`
      : `nothing found${cut}`;
    const buttons = matches.rows.slice(0, MOST_RESULTS).map((row, i) => {
      const button = element("button", { type: "button", onclick: () => this.choose(i) });
      button.setAttribute("aria-selected", i === this.chosen);
      button.append(
        element("span", {}, tree.name(tree.order[row])),
        element("span", {}, plural(tree.lengthOfRow(row), "token")),
      );
      return button;
    });
    results.replaceChildren(element("p", {}, found), ...buttons);
    results.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
  }

  press(event) {
    const count = Math.min(this.matches?.rows.length ?? 0, MOST_RESULTS);
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by && count) {
      this.chosen = (this.chosen + by + count) % count;
      this.render();
    } else if (event.key === "Enter") {
      clearTimeout(this.waiting);
      const before = this.chosen;
      if (!this.matches) this.run();
      this.choose(before);
    } else if (event.key === "Escape") {
      this.clear();
      this.input.blur();
    } else return;
    event.preventDefault();
  }

  choose(index) {
    const row = this.matches?.rows[index];
    if (row === undefined) return;
    this.chosen = index;
    this.results.hidden = true;
    this.input.blur(); // so that keys control the pictures again
    this.onChosen(row);
  }
}
