// Data of the page: facts and columns as packed by Python (views/page.py), and values derived from them.

async function unpack(text) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot unpack the page (no DecompressionStream): use one of 2023 or later.");
  }
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const facts = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const base = (4 + size + 7) & ~7;
  const columns = {};
  for (const { name, type, steps, offset, length } of facts.columns) {
    const numbers = new globalThis[type](buffer, base + offset, length);
    columns[name] = steps ? summed(numbers) : numbers;
  }
  return { facts, columns };
}

// Decode a delta-encoded column.
function summed(steps) {
  const found = new Float64Array(steps.length);
  let sum = 0;
  for (let i = 0; i < steps.length; i++) found[i] = sum += steps[i];
  return found;
}

// Return the index of the last of ascending values that is at most `value`; -1 if there is none.
function lastAtMost(values, value, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// The tree. A segment ("node") has depths [start, stop) and the rows [lo, hi) of the picture: the sequences through it,
// of which the first `ends` end with it. Row r is sequence order[r]. Tokens of the tree are numbered node by node.
class Tree {
  constructor({ facts, columns }) {
    Object.assign(this, { facts, ...columns });
    const { parent, stop, sequence, order, endNode } = columns;
    const nodes = (this.nodes = stop.length);
    this.rows = order.length;
    this.position = new Int32Array(this.rows);
    order.forEach((one, row) => (this.position[one] = row));
    this.start = new Float64Array(nodes);
    this.first = new Float64Array(nodes + 1); // number of the node's first token in the tree
    this.lo = new Int32Array(nodes);
    this.hi = new Int32Array(nodes);
    this.ends = new Int32Array(nodes);
    this.deepest = Float64Array.from(stop);
    for (const node of endNode) if (node >= 0) this.ends[node]++;
    for (let n = 0; n < nodes; n++) {
      this.start[n] = parent[n] < 0 ? 0 : stop[parent[n]];
      this.first[n + 1] = this.first[n] + stop[n] - this.start[n];
      this.lo[n] = this.position[sequence[n]];
    }
    const through = Int32Array.from(this.ends);
    for (let n = nodes - 1; n >= 0; n--) {
      this.hi[n] = this.lo[n] + through[n];
      if (parent[n] < 0) continue;
      through[parent[n]] += through[n];
      this.deepest[parent[n]] = Math.max(this.deepest[parent[n]], this.deepest[n]);
    }
    this.depth = this.deepest.reduce((most, one) => Math.max(most, one), 0);
    this.maxThrough = through.reduce((most, one) => Math.max(most, one), 1);
    this.linkSiblings();
    if (this.reward) this.sumRewards();
  }

  linkSiblings() {
    this.next = new Int32Array(this.nodes).fill(-1); // the next sibling
    this.previous = new Int32Array(this.nodes).fill(-1);
    this.child = new Int32Array(this.nodes).fill(-1); // the first child
    const last = new Int32Array(this.nodes + 1).fill(-1); // last child so far, by parent; the last entry is for roots
    for (let n = 0; n < this.nodes; n++) {
      const parent = this.parent[n] < 0 ? this.nodes : this.parent[n];
      if (last[parent] >= 0) {
        this.next[last[parent]] = n;
        this.previous[n] = last[parent];
      } else if (parent < this.nodes) this.child[parent] = n;
      last[parent] = n;
    }
  }

  sumRewards() {
    this.rewardSum = new Float64Array(this.rows + 1);
    for (let row = 0; row < this.rows; row++) {
      this.rewardSum[row + 1] = this.rewardSum[row] + this.reward[this.order[row]];
    }
    this.rewardRange = [Math.min(...bounds(this.reward)), Math.max(...bounds(this.reward))];
  }

  meanReward(node) {
    return (this.rewardSum[this.hi[node]] - this.rewardSum[this.lo[node]]) / (this.hi[node] - this.lo[node]);
  }

  size(node) {
    return this.stop[node] - this.start[node];
  }

  through(node) {
    return this.hi[node] - this.lo[node];
  }

  name(sequence) {
    return this.facts.names ? `s${sequence} · ${this.facts.names[sequence]}` : `s${sequence}`;
  }

  endOfRow(row) {
    return this.endNode[this.order[row]];
  }

  lengthOfRow(row) {
    const node = this.endOfRow(row);
    return node < 0 ? 0 : this.stop[node];
  }

  // Return the segment at a depth of a row; -1 past its end.
  at(row, depth) {
    if (row < 0 || row >= this.rows || depth < 0) return -1;
    let node = this.endOfRow(row);
    if (node < 0 || depth >= this.stop[node]) return -1;
    while (depth < this.start[node]) node = this.parent[node];
    return node;
  }

  children(node) {
    const found = [];
    for (let child = this.child[node]; child >= 0; child = this.next[child]) found.push(child);
    return found;
  }

  // Return the node that contains token `number` of the tree.
  nodeOf(number) {
    return lastAtMost(this.first, number, 0, this.nodes);
  }

  // Call visit(node, start depth, stop depth) for every node that contains some of the tokens [from, to) of the tree.
  eachPart(from, to, visit) {
    for (let n = this.nodeOf(from); n < this.nodes && this.first[n] < to; n++) {
      const shift = this.start[n] - this.first[n];
      visit(n, Math.max(from, this.first[n]) + shift, Math.min(to, this.first[n + 1]) + shift);
    }
  }

  // Call visit(value, from, to) for the runs of a column that overlap tokens [from, to) of the tree.
  eachRun(name, from, to, visit) {
    const starts = this[`${name}Start`];
    const values = this[`${name}Value`];
    for (let i = lastAtMost(starts, from); i < starts.length && starts[i] < to; i++) {
      visit(values[i], Math.max(from, starts[i]), i + 1 < starts.length ? Math.min(to, starts[i + 1]) : to);
    }
  }

  // Return the mean of `value(run value)` over a node's tokens.
  average(name, node, value = (one) => one) {
    let sum = 0;
    this.eachRun(name, this.first[node], this.first[node + 1], (one, from, to) => (sum += value(one) * (to - from)));
    return sum / this.size(node);
  }
}

function bounds(values) {
  return values.reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [Infinity, -Infinity]);
}
