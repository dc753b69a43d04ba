// Tokens as words: text if there was a tokenizer, else ids; and marks where the file leaves tokens out.

const number = d3.format(",");

function plural(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}

class Words {
  constructor(tree) {
    this.tree = tree;
    this.known = tree.token !== undefined;
    this.texts = tree.facts.texts;
    this.ends = tree.facts.ends === null ? Infinity : tree.facts.ends;
    if (!this.known) return;
    this.offset = new Float64Array(tree.nodes + 1); // offset of a node's first kept token
    for (let n = 0; n < tree.nodes; n++) this.offset[n + 1] = this.offset[n] + Math.min(tree.size(n), 2 * this.ends);
  }

  // Return the entry of the token at a depth of a node; -1 if the file leaves it out.
  entry(node, depth) {
    const inside = depth - this.tree.start[node];
    const size = this.tree.size(node);
    if (size <= 2 * this.ends || inside < this.ends) return this.tree.token[this.offset[node] + inside];
    const fromEnd = size - inside;
    return fromEnd <= this.ends ? this.tree.token[this.offset[node + 1] - fromEnd] : -1;
  }

  text(entry) {
    if (entry < 0) return "…";
    const id = String(this.tree.vocabulary[entry]);
    if (!this.texts) return id;
    return this.texts[entry] || (this.isPartOfCharacter(entry) ? "" : `⟨${id}⟩`);
  }

  // A character of several tokens is written with its first token; the others are empty, with entries of their own.
  isPartOfCharacter(entry) {
    return entry > 0 && this.texts[entry] === "" && entry >= (this.distinct ??= this.countDistinct());
  }

  countDistinct() {
    const seen = new Set();
    let count = 0;
    while (count < this.tree.vocabulary.length && !seen.has(this.tree.vocabulary[count])) {
      seen.add(this.tree.vocabulary[count++]);
    }
    return count;
  }

  // On one line, for labels.
  line(node, from, most) {
    const parts = [];
    let size = 0;
    for (let depth = Math.ceil(from); depth < this.tree.stop[node] && size < most; depth++) {
      const entry = this.entry(node, depth);
      const text = visible(this.text(entry));
      parts.push(text);
      size += text.length + (this.texts ? 0 : 1);
      if (entry < 0) break;
    }
    return parts.join(this.texts ? "" : " ").slice(0, most);
  }

  // Return the id of a node's first token, which may be known from the branching alone; undefined if unknown.
  firstId(node) {
    const { tree } = this;
    if (this.known) return tree.vocabulary[this.entry(node, tree.start[node])];
    if (!tree.fork) return undefined;
    const [lo, hi, start] = [tree.lo[node], tree.hi[node], tree.start[node]];
    if (lo > 0 && tree.common[lo] === start && tree.previous[node] >= 0) return tree.fork[2 * lo + 1];
    if (tree.next[node] >= 0 && tree.common[hi] === start) return tree.fork[2 * hi];
    return undefined;
  }

  // Return the beginning of a node: a few words, or the id of its first token.
  beginning(node, most = 60) {
    if (this.known) return this.line(node, this.tree.start[node], most);
    const id = this.firstId(node);
    return id === undefined ? "" : `${id} …`;
  }
}

// Show line ends and tabs as symbols, so that the text stays on one line.
function visible(text) {
  return unhidden(text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍"));
}

// Show invisible characters, and those that change text direction, by their code point.
function unhidden(text) {
  const hidden =
    /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
  return text.replace(hidden, (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}
