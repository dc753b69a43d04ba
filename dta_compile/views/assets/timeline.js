// The schedule in order: a lane for each kind of op, and below, the tokens or bytes held after every op.

const LANE = 13;

class Timeline {
  constructor(stage, schedule, theme, state) {
    Object.assign(this, { stage, schedule, theme, state });
    const { tree } = schedule;
    this.lanes = schedule.kinds.filter((_, kind) => tree.kind.includes(kind));
    this.charts = this.makeCharts();
    for (const chart of this.charts) {
      chart.most = Math.max(0, bounds(chart.values)[1]);
      chart.lineMost = chart.line ? Math.max(0, bounds(chart.line)[1]) : 0;
    }
    this.setWidths("even");
    this.viewport = new Viewport(stage, {
      extent: [this.edges.at(-1), 1],
      deepest: [Math.max(1, schedule.length / 8), 1],
      margin: { left: 66, right: 14, top: 6, bottom: 8 },
      yMoves: false,
      draw: () => this.draw(),
      drawOverlay: () => this.drawOverlay(),
    });
    this.viewport.open();
  }

  makeCharts() {
    const { tree, inBytes } = this.schedule;
    const { device } = tree.facts;
    const stack = { title: "on the stack", values: tree.stack, unit: "tokens", color: "forward" };
    if (!inBytes) {
      const held = Float64Array.from(tree.live, (live, op) => live + tree.stored[op]);
      return [stack, { title: "with live graphs or kept KV", values: held, unit: "tokens", color: "backward" }];
    }
    const above = (values) => (device ? Float64Array.from(values, (value) => value + device.base) : values);
    const kept = { values: above(tree.keptBytes), unit: "bytes", color: "backward", line: above(tree.peakBytes) };
    if (!device) return [stack, { ...kept, title: "in kept graphs and KV", limit: tree.facts.budget }];
    const title = "held, the model included";
    return [stack, { ...kept, title, limit: device.memory, limitTitle: "the device (dashed)" }];
  }

  // Give all ops the same width, or a width by the tokens that they run.
  setWidths(widths) {
    const { schedule } = this;
    this.edges = new Float64Array(schedule.length + 1);
    const least = schedule.length ? bounds(schedule.tree.partTokens)[1] / 50 : 1;
    for (let op = 0; op < schedule.length; op++) {
      const wide = widths === "even" ? 1 : Math.max(least, schedule.runs(op) ? schedule.tokensOf(op) : 0);
      this.edges[op + 1] = this.edges[op] + wide;
    }
    if (!this.viewport) return;
    this.viewport.x.base.domain([0, this.edges.at(-1)]);
    this.viewport.drawNow();
  }

  opAt(event) {
    const [left, top] = this.viewport.place(event);
    if (left < 0 || left > this.viewport.width || top < 0 || !this.schedule.length) return -1;
    return Math.min(this.schedule.length - 1, lastAtMost(this.edges, this.viewport.x.scale.invert(left)));
  }

  get visibleOps() {
    const [low, high] = this.viewport.x.domain;
    const first = Math.max(0, lastAtMost(this.edges, low));
    return [first, Math.min(this.schedule.length, lastAtMost(this.edges, high) + 1)];
  }

  draw() {
    const { viewport } = this;
    const lanes = this.lanes.length * LANE;
    const space = (viewport.height - lanes) / this.charts.length;
    this.drawLanes(viewport.base);
    this.charts.forEach((chart, i) => {
      const top = lanes + i * space + 20;
      this.drawChart(viewport.base, chart, top, Math.max(8, space - 22), i);
    });
    this.drawLaneNames();
  }

  drawLanes(context) {
    const { viewport, schedule, theme } = this;
    const x = viewport.x.scale;
    const [first, last] = this.visibleOps;
    const reached = new Float64Array(this.lanes.length).fill(-Infinity);
    const laneOf = schedule.kinds.map((kind) => this.lanes.indexOf(kind));
    viewport.clipped(context, () => {
      context.fillStyle = theme.line;
      this.lanes.forEach((_, lane) => context.fillRect(0, lane * LANE + LANE - 3, viewport.width, 1));
      for (let op = first; op < last; op++) {
        const lane = laneOf[schedule.tree.kind[op]];
        const left = Math.round(x(this.edges[op]));
        const right = Math.max(left + 1, Math.round(x(this.edges[op + 1])));
        if (right <= reached[lane]) continue;
        reached[lane] = right;
        context.fillStyle = theme.kinds[this.lanes[lane]];
        context.fillRect(left, lane * LANE, right - left > 4 ? right - left - 1 : right - left, LANE - 3);
      }
    });
  }

  drawLaneNames() {
    const { left, top } = this.viewport.margin;
    const names = this.viewport
      .group("lanes", left - 8, top)
      .selectAll("text")
      .data(this.lanes);
    names
      .join("text")
      .attr("text-anchor", "end")
      .attr("y", (_, lane) => lane * LANE + LANE - 4)
      .text((kind) => kind);
  }

  drawChart(context, chart, top, height, index) {
    const { viewport, theme } = this;
    const most = Math.max(chart.most, chart.lineMost, 1);
    // A budget far above the curve would flatten it, so it is written as text instead.
    const hasLimit = chart.limit !== undefined && chart.limit !== null;
    const limit = hasLimit && chart.limit <= 4 * most ? chart.limit : 0;
    const y = d3.scaleLinear([0, 1.04 * Math.max(most, limit)], [top + height, top]);
    const color = theme.kinds[chart.color];
    viewport.clipped(context, () => {
      const points = this.points(chart.values);
      const area = d3
        .area()
        .x((p) => p[0])
        .y0(y(0))
        .y1((p) => y(p[1]))
        .curve(d3.curveStepAfter)
        .context(context);
      context.fillStyle = color;
      context.globalAlpha = 0.22;
      context.beginPath();
      area(points);
      context.fill();
      context.globalAlpha = 1;
      this.strokeSteps(context, points, y, color, 1.25);
      const width = this.schedule.tree.facts.device ? 1 : 0.6;
      if (chart.line) this.strokeSteps(context, this.points(chart.line), y, color, width);
      if (limit) this.strokeLimit(context, y(limit));
    });
    const { left, top: above } = viewport.margin;
    const [size, unit] = chart.unit === "bytes" ? unitOf(most) : [1, ""];
    const scale = y.copy().domain(y.domain().map((value) => value / size));
    const label = (value) => (size > 1 || Number.isInteger(value) ? `${d3.format("~s")(value)} ${unit}` : "");
    const axis = d3
      .axisLeft(scale)
      .ticks(Math.max(2, height / 26))
      .tickSize(3)
      .tickFormat(label);
    viewport.group(`chart${index}`, left, above).call(axis);
    this.drawTitle(context, chart, top - 9);
  }

  strokeSteps(context, points, y, color, width) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.beginPath();
    d3
      .line()
      .x((p) => p[0])
      .y((p) => y(p[1]))
      .curve(d3.curveStepAfter)
      .context(context)(points);
    context.stroke();
  }

  strokeLimit(context, level) {
    context.strokeStyle = this.theme.accent;
    context.lineWidth = 1.25;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(0, level);
    context.lineTo(this.viewport.width, level);
    context.stroke();
    context.setLineDash([]);
  }

  drawTitle(context, chart, middle) {
    const { theme, schedule } = this;
    const { limit, unit, values } = chart;
    const parts = [
      `peak ${amount(chart.most, unit)}`,
      chart.lineMost > chart.most && `with the chunk at work ${amount(chart.lineMost, unit)}`,
      (limit ?? null) !== null && `${chart.limitTitle ?? "budget, besides the chunk at work,"} ${amount(limit, unit)}`,
      schedule.now >= 0 && `now ${amount(values[schedule.now], unit)}`,
    ].filter(Boolean);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = theme.muted;
    let text = `${unit} ${chart.title}`;
    for (const part of parts) {
      const longer = `${text}  ·  ${part}`;
      if (context.measureText(longer).width <= this.viewport.width) text = longer;
    }
    context.fillText(text, 2, middle);
  }

  // Return [pixel, value] wherever the value changes; of several on one pixel, the largest.
  points(values) {
    const x = this.viewport.x.scale;
    const [first, last] = this.visibleOps;
    const found = [];
    let [pixel, largest] = [-Infinity, 0];
    for (let op = first; op < last; op++) {
      const left = Math.round(x(this.edges[op]));
      if (left > pixel) {
        if (pixel > -Infinity) found.push([pixel, largest]);
        [pixel, largest] = [left, values[op]];
      } else largest = Math.max(largest, values[op]);
    }
    if (pixel > -Infinity) found.push([pixel, largest], [x(this.edges[last]), largest]);
    return found;
  }

  drawOverlay() {
    const { viewport, schedule, theme, state } = this;
    const x = viewport.x.scale;
    const mark = (op, color, alpha) => {
      const [left, right] = [x(this.edges[op]), x(this.edges[op + 1])];
      viewport.overlay.globalAlpha = alpha;
      viewport.overlay.fillStyle = color;
      viewport.overlay.fillRect(left, 0, Math.max(1.5, right - left), viewport.height);
      viewport.overlay.globalAlpha = 1;
    };
    viewport.clipped(viewport.overlay, () => {
      for (const op of state.related) mark(op, theme.ink, 0.1);
      if (state.hoveredOp >= 0) mark(state.hoveredOp, theme.ink, 0.18);
      if (schedule.now < 0) return;
      mark(schedule.now, theme.accent, 0.2);
      viewport.overlay.fillStyle = theme.accent;
      viewport.overlay.fillRect(x(this.edges[schedule.now]), 0, 1.5, viewport.height);
    });
  }

  // Move the window so that an op is in it.
  reveal(op) {
    const { viewport } = this;
    const [low, high] = viewport.x.domain;
    if (this.edges[op] >= low && this.edges[op + 1] <= high) return;
    const middle = (this.edges[op] + this.edges[op + 1]) / 2;
    viewport.x.show(middle - (high - low) / 2, middle + (high - low) / 2);
    viewport.invalidate();
  }
}

const BINARY = { base: 1024, names: ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] };
const DECIMAL = { base: 1000, names: ["B", "KB", "MB", "GB", "TB", "PB"] }; // as memories of devices are given
let units = BINARY;

// Return size and name of the largest unit that is at most the given bytes.
function unitOf(bytes) {
  const { base, names } = units;
  const power = Math.min(names.length - 1, Math.floor(Math.log(Math.max(bytes, 1)) / Math.log(base) + 1e-9));
  return [base ** power, names[power]];
}

// Format an amount: tokens with separators, bytes with a unit.
function amount(value, unit) {
  if (unit === "tokens") return number(value);
  const [size, name] = unitOf(value);
  return `${d3.format(".4~g")(value / size)} ${name}`;
}
