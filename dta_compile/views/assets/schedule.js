// The schedule: tokens that each op runs and holds, and the state of every chunk at the current op.

const [PENDING, RUN] = [0, 1]; // then: graph live, KV kept, done

class Schedule {
  constructor(tree) {
    this.tree = tree;
    this.lines = tree.facts.ops;
    this.length = this.lines.length;
    this.kinds = tree.facts.kinds;
    this.inBytes = tree.keptBytes !== undefined;
    this.now = -1; // the current op; the page shows the state after it
    this.states = new Uint8Array(tree.partTokens.length);
  }

  kindOf(op) {
    return this.kinds[this.tree.kind[op]];
  }

  tokensOf(op) {
    return this.tree.part[op] < 0 ? 0 : this.tree.partTokens[this.tree.part[op]];
  }

  runs(op) {
    return this.tree.state[op] > PENDING;
  }

  moveTo(op) {
    if (op < this.now) {
      this.states.fill(PENDING);
      this.now = -1;
    }
    while (this.now < op) this.step(++this.now);
  }

  step(op) {
    const { part, state } = this.tree;
    if (state[op] > RUN || this.states[part[op]] === PENDING) this.states[part[op]] = state[op];
  }

  // Call visit(from, to) for the tokens of the tree that an op runs, restores or pops.
  eachRange(op, visit) {
    const { part, partFirst, rangeStart, rangeStop } = this.tree;
    if (part[op] < 0) return;
    for (let i = partFirst[part[op]]; i < partFirst[part[op] + 1]; i++) visit(rangeStart[i], rangeStop[i]);
  }

  attachedBy(op) {
    return this.tree.attached.subarray(this.tree.attachFirst[op], this.tree.attachFirst[op + 1]);
  }

  // Return up to `most` ops that run a chunk with some of the tokens [from, to) of the tree.
  opsOver(from, to, most) {
    const { part, partFirst, rangeStart, rangeStop } = this.tree;
    const touches = new Uint8Array(this.states.length);
    for (let p = 0; p < touches.length; p++) {
      for (let i = partFirst[p]; i < partFirst[p + 1] && !touches[p]; i++) {
        touches[p] = rangeStart[i] < to && rangeStop[i] > from;
      }
    }
    const found = [];
    for (let op = 0; op < this.length && found.length < most; op++) {
      if (part[op] >= 0 && touches[part[op]] && this.runs(op)) found.push(op);
    }
    return found;
  }
}
