// The tree as an icicle: depth in tokens to the right, a row per sequence in lexicographic order. The area is the batch
// without sharing, and the height of a segment is the number of sequences that share it.
//
// Where rows are thinner than a pixel, 2^k of them form a bin, and the longest is drawn for all. Bins
// begin at multiples of 2^k, so that the picture does not flicker while panning.

const [LEAST_TEXT_HEIGHT, LEAST_TEXT_WIDTH, LETTER, LEAST_TOKEN_WIDTH] = [12, 26, 6.62, 26];
const [LINE, MOST_LINES] = [15, 8]; // line height in pixels and most lines of text in a segment
const TEXT_FONT = '11px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

class TreeView {
  constructor(stage, tree, words, schedule, theme, state) {
    Object.assign(this, { stage, tree, words, schedule, theme, state });
    this.levels = [];
    this.drawn = 0; // number of rectangles drawn last
    this.viewport = new Viewport(stage, {
      extent: [tree.depth, tree.rows],
      deepest: [Math.max(1, tree.depth / 8), Math.max(1, tree.rows / 6)],
      margin: { left: 66, right: 14, top: 24, bottom: 6 },
      draw: () => this.draw(),
      drawOverlay: () => this.drawOverlay(),
    });
    this.viewport.open();
    stage.addEventListener("dblclick", (event) => {
      const found = this.hit(event);
      if (found.node >= 0) this.showNode(found.node);
    });
  }

  // Return the representative of each bin of 2^level rows: its longest sequence, preferring search results.
  bins(level) {
    if (!this.levels.length) this.levels.push(Int32Array.from({ length: this.tree.rows }, (_, row) => row));
    while (this.levels.length <= level) {
      const below = this.levels.at(-1);
      const above = new Int32Array((below.length + 1) >> 1);
      for (let i = 0; i < above.length; i++) {
        const [one, other] = [below[2 * i], below[Math.min(2 * i + 1, below.length - 1)]];
        above[i] = this.weight(other) > this.weight(one) ? other : one;
      }
      this.levels.push(above);
    }
    return this.levels[level];
  }

  weight(row) {
    const length = this.tree.lengthOfRow(row);
    return this.state.matches?.has(row) ? length + 1e12 : length;
  }

  forgetBins() {
    this.levels = [];
  }

  get level() {
    const [low, high] = this.viewport.y.domain;
    return Math.max(0, Math.ceil(Math.log2((high - low) / this.viewport.height) - 1e-9));
  }

  // Return the row and the segment at an event (-1 where there is none), and the depth.
  hit(event) {
    const [left, top] = this.viewport.place(event);
    if (left < 0 || top < 0 || top > this.viewport.height) return { row: -1, node: -1, depth: -1 };
    const depth = this.viewport.x.scale.invert(left);
    const row = this.bins(this.level)[Math.floor(this.viewport.y.scale.invert(top)) >> this.level] ?? -1;
    return { row, depth, node: this.tree.at(row, depth) };
  }

  // Call visit(node, top, bottom), in pixels, for the nodes of the visible bins.
  eachVisible(visit) {
    const { tree, viewport, level } = this;
    const bins = this.bins(level);
    const size = 2 ** level;
    const [y, [left, right]] = [viewport.y.scale, viewport.x.domain];
    const [top, bottom] = y.domain();
    const first = Math.max(0, Math.floor(top / size));
    const last = Math.min(bins.length, Math.ceil(bottom / size));
    const pixel = (bin) => Math.round(y(Math.min(bin * size, tree.rows)));
    let before = -1; // the row of the bin above
    for (let bin = first; bin < last; before = bins[bin++]) {
      for (let node = tree.endOfRow(bins[bin]); node >= 0; node = tree.parent[node]) {
        if (tree.lo[node] <= before || tree.stop[node] <= left) break; // it and its ancestors are drawn or out of view
        if (tree.start[node] >= right) continue;
        const begin = bin === first ? Math.floor(tree.lo[node] / size) : bin;
        let end = Math.floor((tree.hi[node] - 1) / size);
        if (bins[end] < tree.hi[node]) end++;
        visit(node, pixel(begin), pixel(end));
      }
    }
  }

  draw() {
    const { viewport } = this;
    this.drawn = 0;
    this.color = null;
    viewport.clipped(viewport.base, () => {
      const x = viewport.x.scale;
      const labels = [];
      this.eachVisible((node, top, bottom) => {
        this.drawNode(viewport.base, node, x, top, bottom);
        if (bottom - top >= LEAST_TEXT_HEIGHT) labels.push([node, top, bottom]);
      });
      viewport.base.globalAlpha = 1;
      viewport.base.font = TEXT_FONT;
      viewport.base.textBaseline = "middle";
      for (const label of labels) this.drawWords(viewport.base, x, ...label);
      this.drawNames(viewport.base, x);
    });
    this.drawAxes();
    if (this.state.matches) this.drawMatches();
    this.stage.dataset.drawn = this.drawn;
  }

  isDimmed(node) {
    return this.state.matches && !this.state.matches.between(this.tree.lo[node], this.tree.hi[node]);
  }

  drawNode(context, node, x, top, bottom) {
    const { tree, viewport } = this;
    const mode = this.state.mode;
    const from = Math.max(-2, Math.round(x(tree.start[node])));
    const to = Math.min(viewport.width + 2, Math.round(x(tree.stop[node])));
    if (to <= from || bottom <= top) return;
    const height = bottom - top >= 4 ? bottom - top - 1 : bottom - top;
    const gap = to - from >= 3 && height >= 3 ? 1 : 0;
    context.globalAlpha = this.isDimmed(node) ? 0.22 : 1;
    if (mode.ofNode) {
      this.rectangle(context, mode.colors[mode.shade(mode.ofNode(node))], from, top, to - from - gap, height);
      return;
    }
    const shift = tree.first[node] - tree.start[node];
    const [low, high] = [x.invert(from), x.invert(to)];
    const begin = Math.max(tree.first[node], Math.floor(low + shift));
    const end = Math.min(tree.first[node + 1], Math.ceil(high + shift));
    let reached = from;
    tree.eachRun(mode.column, begin, end, (value, _, stop) => {
      const right = stop === end ? to - gap : Math.min(to - gap, Math.round(x(stop - shift)));
      if (right <= reached) return;
      this.rectangle(context, mode.colors[mode.shade(value)], reached, top, right - reached, height);
      reached = right;
    });
  }

  rectangle(context, color, left, top, width, height) {
    if (color !== this.color) context.fillStyle = this.color = color;
    context.fillRect(left, top, width, height);
    this.drawn++;
  }

  // Draw the tokens of a segment: a cell for each where there is room, else the first visible ones.
  drawWords(context, x, node, top, bottom) {
    const { tree, words, viewport } = this;
    const [low, high] = [Math.max(tree.start[node], x.invert(0)), Math.min(tree.stop[node], x.invert(viewport.width))];
    const [left, right] = [x(low), x(high)];
    if (right - left < LEAST_TEXT_WIDTH) return;
    const [above, below] = [Math.max(top, 0), Math.min(bottom, viewport.height)];
    const middle = (above + below) / 2;
    context.globalAlpha = this.isDimmed(node) ? 0.3 : 1;
    context.fillStyle = this.inkOf(node, low);
    const width = x(1) - x(0);
    if (words.known && width >= LEAST_TOKEN_WIDTH) {
      for (let depth = Math.floor(low); depth < high; depth++) {
        const text = visible(words.text(words.entry(node, depth)));
        context.fillText(text.slice(0, Math.floor((width - 4) / LETTER)), x(depth) + 2, middle);
        context.fillRect(Math.round(x(depth + 1)) - 1, middle - 3, 1, 6);
      }
      return;
    }
    const letters = Math.floor((right - left - 8) / LETTER);
    const lines = words.known ? Math.max(1, Math.min(MOST_LINES, Math.floor((below - above) / LINE) - 1)) : 1;
    const text = words.known ? words.line(node, low, letters * lines) : this.label(node, letters);
    for (let line = 0; line * letters < text.length && line < lines; line++) {
      context.fillText(
        text.slice(line * letters, (line + 1) * letters),
        left + 5,
        middle + (line - (lines - 1) / 2) * LINE,
      );
    }
  }

  // The longest label with at most so many letters.
  label(node, letters) {
    const [size, through] = [this.tree.size(node), `× ${number(this.tree.through(node))}`];
    const labels = [`${plural(size, "token")} ${through}`, `${number(size)} ${through}`, number(size)];
    return labels.find((label) => label.length <= letters) ?? "";
  }

  inkOf(node, depth) {
    const { mode } = this.state;
    if (mode.ofNode) return mode.inks[mode.shade(mode.ofNode(node))];
    const at = this.tree.first[node] + Math.floor(depth) - this.tree.start[node];
    let shade = 0;
    this.tree.eachRun(mode.column, at, at + 1, (value) => (shade = mode.shade(value)));
    return mode.inks[shade];
  }

  // Draw the names of sequences after their ends, where rows are high enough.
  drawNames(context, x) {
    const { tree, viewport, theme } = this;
    const y = viewport.y.scale;
    const height = y(1) - y(0);
    if (height < 11) return;
    context.fillStyle = theme.muted;
    const [top, bottom] = y.domain();
    for (let row = Math.max(0, Math.floor(top)); row < Math.min(tree.rows, bottom); row++) {
      const name = tree.name(tree.order[row]);
      const left = Math.max(6, x(tree.lengthOfRow(row)) + 6);
      context.fillText(name, left, y(row + 0.5));
    }
  }

  drawAxes() {
    const { viewport } = this;
    const { left, top } = viewport.margin;
    const x = d3
      .axisTop(viewport.x.scale)
      .ticks(viewport.width / 110)
      .tickSize(4)
      .tickFormat(wholeOnly);
    const y = d3
      .axisLeft(viewport.y.scale)
      .ticks(viewport.height / 60)
      .tickSize(4)
      .tickFormat(wholeOnly);
    viewport.group("x", left, top).call(x);
    viewport.group("y", left, top).call(y);
    if (viewport.svg.select(".label").empty()) {
      const label = (text) => viewport.svg.append("text").attr("class", "label").text(text);
      label("tokens →").attr("x", 8).attr("y", 14);
      label("← sequences").attr("transform", "translate(14, 100) rotate(-90)");
    }
  }

  // Mark the positions of matching rows, even if they are too thin to be seen.
  drawMatches() {
    const { viewport, theme } = this;
    const y = viewport.y.scale;
    viewport.base.globalAlpha = 1;
    viewport.base.fillStyle = theme.accent;
    const height = Math.max(2, y(1) - y(0));
    for (const row of this.state.matches.rows) {
      const top = y(row);
      if (top > -height && top < viewport.height) viewport.base.fillRect(viewport.width + 4, top, 6, height);
    }
  }

  drawOverlay() {
    const { viewport } = this;
    const context = viewport.overlay;
    viewport.clipped(context, () => {
      this.drawOp(context);
      if (this.state.row >= 0) this.drawRow(context, this.state.row);
      if (this.state.selected >= 0) this.outline(context, this.state.selected, this.theme.accent, 2);
      const hovered = this.state.hovered;
      if (hovered >= 0 && hovered !== this.state.selected) this.outline(context, hovered, this.theme.ink, 1.5);
    });
  }

  box(node, start = this.tree.start[node], stop = this.tree.stop[node]) {
    const [x, y] = [this.viewport.x.scale, this.viewport.y.scale];
    const [left, right] = [Math.max(-4, x(start)), Math.min(this.viewport.width + 4, x(stop))];
    const [top, bottom] = [
      Math.max(-4, y(this.tree.lo[node])),
      Math.min(this.viewport.height + 4, y(this.tree.hi[node])),
    ];
    return [left, top, right - left, bottom - top];
  }

  outline(context, node, color, width) {
    const [left, top, wide, high] = this.box(node);
    context.strokeStyle = color;
    context.lineWidth = width;
    context.strokeRect(left, top, Math.max(1, wide), Math.max(1, high));
  }

  drawRow(context, row) {
    const [x, y] = [this.viewport.x.scale, this.viewport.y.scale];
    const height = Math.max(2, y(1) - y(0));
    context.strokeStyle = this.theme.accent;
    context.lineWidth = 1.5;
    context.strokeRect(x(0) - 2, y(row + 0.5) - height / 2, x(this.tree.lengthOfRow(row)) - x(0) + 4, height);
  }

  // Draw the current op: the path on the stack as a line, and the tokens of the op.
  drawOp(context) {
    const { schedule, tree, theme, viewport } = this;
    const op = schedule.now;
    if (op < 0) return;
    context.strokeStyle = theme.kinds[schedule.kindOf(op)];
    context.fillStyle = context.strokeStyle;
    context.lineWidth = 1.5;
    schedule.eachRange(op, (from, to) => {
      tree.eachPart(from, to, (node, start, stop) => {
        const [left, top, wide, high] = this.box(node, start, stop);
        if (wide < 0 || high < 0) return;
        context.globalAlpha = 0.45;
        context.fillRect(left, high < 3 ? top + high / 2 - 1.5 : top, Math.max(2, wide), Math.max(3, high));
        context.globalAlpha = 1;
        if (high >= 5 && wide >= 5) context.strokeRect(left + 0.75, top + 0.75, wide - 1.5, high - 1.5);
      });
    });
    context.globalAlpha = 1;
    const sequence = tree.stackSequence[op];
    if (sequence < 0 || tree.stack[op] === 0) return;
    const [x, y] = [viewport.x.scale, viewport.y.scale];
    const [left, right, middle] = [x(0), x(tree.stack[op]), y(tree.position[sequence] + 0.5)];
    context.fillStyle = theme.panel;
    context.fillRect(left, middle - 2.5, right - left + 2, 5);
    context.fillStyle = theme.ink;
    context.fillRect(left, middle - 1.5, right - left, 3);
    context.beginPath();
    context.arc(right, middle, 4, 0, 2 * Math.PI);
    context.fill();
  }

  showNode(node) {
    const { tree } = this;
    const depth = Math.max(tree.deepest[node] - tree.start[node], 1);
    const room = Math.max(0.5, 0.04 * tree.through(node));
    this.viewport.show(
      [tree.start[node] - 0.04 * depth, tree.deepest[node] + 0.12 * depth],
      [tree.lo[node] - room, tree.hi[node] + room],
    );
  }

  showRow(row) {
    const most = Math.max(6, this.viewport.height / 18);
    const low = Math.max(0, Math.min(this.tree.rows - most, row - most / 2));
    this.viewport.show([0, this.tree.depth], [low, Math.min(this.tree.rows, low + most)]);
  }
}

function wholeOnly(value) {
  return Number.isInteger(value) ? number(value) : "";
}
