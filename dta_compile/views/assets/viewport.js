// A viewport on a plane of tokens (x) and rows (y), zoomed and panned along each axis separately, over canvases that
// follow the size of their element.

const REDUCED_MOTION = matchMedia("(prefers-reduced-motion: reduce)");

// One axis, with a d3 zoom transform of its own.
class Axis {
  constructor(most, deepest) {
    this.element = d3.select(document.createElement("i"));
    this.base = d3.scaleLinear().domain([0, most]);
    this.zoom = d3.zoom().scaleExtent([1, Math.max(1, deepest)]);
  }

  fit(pixels) {
    const [low, high] = this.base.range()[1] > 1 ? this.domain : this.base.domain();
    this.base.range([0, pixels]);
    this.zoom
      .extent([
        [0, 0],
        [pixels, pixels],
      ])
      .translateExtent([
        [0, 0],
        [pixels, pixels],
      ]);
    this.show(low, high);
  }

  get transform() {
    return d3.zoomTransform(this.element.node());
  }

  get scale() {
    return this.transform.rescaleX(this.base);
  }

  get domain() {
    return this.scale.domain();
  }

  show(low, high) {
    const pixels = this.base.range()[1];
    const k = pixels / Math.max(this.base(high) - this.base(low), 1e-9);
    this.element.call(this.zoom.transform, d3.zoomIdentity.scale(k).translate(-this.base(low), 0));
    this.element.call(this.zoom.translateBy, 0, 0); // back into the extent
  }

  moveBy(pixels) {
    this.element.call(this.zoom.translateBy, pixels / this.transform.k, 0);
  }

  scaleBy(factor, at) {
    this.element.call(this.zoom.scaleBy, factor, [at, 0]);
  }
}

class Viewport {
  // `extent`: the range along x and y, and the largest magnification of either; `margin` in pixels.
  constructor(stage, { extent, deepest, margin, draw, drawOverlay, yMoves = true }) {
    Object.assign(this, { stage, margin, draw, drawOverlay, yMoves });
    this.x = new Axis(Math.max(extent[0], 1), deepest[0]);
    this.y = new Axis(Math.max(extent[1], 1), deepest[1]);
    this.base = this.addCanvas();
    this.overlay = this.addCanvas();
    this.svg = d3.select(stage).append("svg");
    this.follow();
  }

  // Call once the owner can draw.
  open() {
    this.resize();
    new ResizeObserver(() => {
      const { clientWidth, clientHeight } = this.stage;
      if (clientWidth !== this.fullWidth || clientHeight !== this.fullHeight) this.resize();
    }).observe(this.stage);
  }

  addCanvas() {
    const canvas = this.stage.appendChild(document.createElement("canvas"));
    return canvas.getContext("2d");
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    [this.fullWidth, this.fullHeight] = [this.stage.clientWidth, this.stage.clientHeight];
    this.width = Math.max(1, this.fullWidth - this.margin.left - this.margin.right);
    this.height = Math.max(1, this.fullHeight - this.margin.top - this.margin.bottom);
    for (const context of [this.base, this.overlay]) {
      context.canvas.width = Math.round(this.fullWidth * ratio);
      context.canvas.height = Math.round(this.fullHeight * ratio);
      context.canvas.style.width = `${this.fullWidth}px`;
      context.canvas.style.height = `${this.fullHeight}px`;
      context.setTransform(ratio, 0, 0, ratio, this.margin.left * ratio, this.margin.top * ratio);
    }
    this.svg.attr("width", this.fullWidth).attr("height", this.fullHeight);
    this.x.fit(this.width);
    this.y.fit(this.height);
    this.drawNow();
  }

  // One d3 zoom takes the gestures and passes each to the axes that the pressed keys allow.
  follow() {
    let before = d3.zoomIdentity;
    const element = d3.select(this.stage);
    const gestures = d3
      .zoom()
      .filter((event) => !event.button && (!event.ctrlKey || event.type === "wheel"))
      // With shift held, browsers report a horizontal wheel.
      .wheelDelta(
        (event) => -(event.deltaY || event.deltaX) * (event.deltaMode === 1 ? 0.05 : event.deltaMode ? 1 : 0.002),
      )
      .on("start", () => this.stage.classList.add("pans"))
      .on("end", () => this.stage.classList.remove("pans"))
      .on("zoom", ({ transform, sourceEvent }) => {
        const factor = transform.k / before.k;
        const [left, top] = sourceEvent ? this.place(sourceEvent) : [this.width / 2, this.height / 2];
        const only = { x: sourceEvent?.shiftKey, y: sourceEvent?.altKey };
        if (factor === 1) {
          this.x.moveBy(transform.x - before.x);
          if (this.yMoves) this.y.moveBy(transform.y - before.y);
        } else {
          if (!only.y || !this.yMoves) this.x.scaleBy(factor, left);
          if (!only.x && this.yMoves) this.y.scaleBy(factor, top);
        }
        before = transform;
        this.invalidate();
      });
    element.call(gestures).on("dblclick.zoom", null);
  }

  // Return the position of an event, from the corner of the drawing.
  place(event) {
    const touch = event.touches?.[0] ?? event;
    const [x, y] = d3.pointer(touch, this.stage);
    return [x - this.margin.left, y - this.margin.top];
  }

  zoomBy(factor) {
    this.x.scaleBy(factor, this.width / 2);
    if (this.yMoves) this.y.scaleBy(factor, this.height / 2);
    this.invalidate();
  }

  // Go to a part of the plane, in 350 ms.
  show([x0, x1], [y0, y1]) {
    this.moving?.stop();
    const from = [...this.x.domain, ...this.y.domain];
    const steps = [x0, x1, y0, y1].map((to, i) => d3.interpolateNumber(from[i], to));
    const duration = REDUCED_MOTION.matches ? 0 : 350;
    this.moving = d3.timer((elapsed) => {
      const share = duration ? Math.min(1, elapsed / duration) : 1;
      const [a, b, c, d] = steps.map((step) => step(d3.easeCubicInOut(share)));
      this.x.show(a, b);
      if (this.yMoves) this.y.show(c, d);
      this.drawNow();
      if (share === 1) this.moving.stop();
    });
  }

  showAll() {
    this.show(this.x.base.domain(), this.y.base.domain());
  }

  invalidate() {
    this.pending ??= requestAnimationFrame(() => this.drawNow());
  }

  invalidateOverlay() {
    this.pendingOverlay ??= requestAnimationFrame(() => this.drawOverlayNow());
  }

  drawNow() {
    cancelAnimationFrame(this.pending);
    this.pending = undefined;
    this.clear(this.base);
    this.draw();
    this.drawOverlayNow();
  }

  drawOverlayNow() {
    cancelAnimationFrame(this.pendingOverlay);
    this.pendingOverlay = undefined;
    this.clear(this.overlay);
    this.drawOverlay();
  }

  clear(context) {
    context.clearRect(-this.margin.left, -this.margin.top, this.fullWidth, this.fullHeight);
  }

  // Draw with clipping to the plane.
  clipped(context, draw) {
    context.save();
    context.beginPath();
    context.rect(0, 0, this.width, this.height);
    context.clip();
    draw();
    context.restore();
  }

  // Return the SVG group of an axis, made on first use.
  group(name, left, top) {
    let group = this.svg.select(`.${name}`);
    if (group.empty()) group = this.svg.append("g").attr("class", `axis ${name}`);
    return group.attr("transform", `translate(${left},${top})`);
  }
}
