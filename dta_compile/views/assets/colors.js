// Colour modes of the tree. A mode gives every part of a node a shade, an index into the mode's table of colours.

const SHADES = 64; // in a colour ramp
const MOST_RANKS = 12; // in a legend; of more, the first, the last and the plan's own

const RAMPS = {
  sharing: {
    light: ["#dfe6ee", "#a5d3d6", "#4fabb6", "#1f7399", "#18355f"],
    dark: ["#273242", "#235063", "#25718a", "#2b979f", "#46ae9e"],
  },
  recompute: { light: ["#f6c177", "#e8772e", "#b3202c"], dark: ["#8a5a1e", "#e8772e", "#ffc9a8"] },
  loss: { light: ["#b2dba1", "#4a9f4d", "#14532d"], dark: ["#2f6b35", "#57b85a", "#d3f9d8"] },
  reward: {
    light: ["#b5481b", "#eab08a", "#e9e9ec", "#8fb4dd", "#1d5aa8"],
    dark: ["#ff9457", "#8f5231", "#39414d", "#3f6ea8", "#86bdff"],
  },
};
const NEUTRAL = { light: "#dfe4eb", dark: "#2a3441" };

// State of a token at the current op, by the chunk that writes its outputs.
const STATES = [
  { label: "not run", light: "#dbe1e9", dark: "#27303c" },
  { label: "run", light: "#bdd3f0", dark: "#2c4a75" },
  { label: "graph live", light: "#f0a04b", dark: "#d9862b" },
  { label: "KV kept", light: "#b79be8", dark: "#7d5fc4" },
  { label: "done", light: "#8fc79a", dark: "#3c7a4a" },
];

// Causes of lost sharing, the one with most tokens first.
const CAUSES = {
  light: ["#d6336c", "#e8772e", "#7d5fc4", "#1f7399", "#4a9f4d", "#8d6e63"],
  dark: ["#ff6b9d", "#e8a15c", "#a98ef0", "#4fabb6", "#57b85a", "#b39a91"],
};

class Mode {
  constructor(key, label, hint, theme) {
    Object.assign(this, { key, label, hint, theme });
  }

  // The colours of the current theme, and a legible text colour on each.
  refresh() {
    this.colors = this.table();
    this.inks = this.colors.map((color) => (luminance(color) > 0.36 ? "#101820" : "#f4f8ff"));
  }

  ramp() {
    const color = d3.interpolateRgbBasis(RAMPS[this.key][this.theme.name]);
    return Array.from({ length: SHADES }, (_, i) => color(i / (SHADES - 1)));
  }
}

// A mode of numbers, one per node (`ofNode`) or per run of its tokens (`column`); `neutral` values stay grey.
class RampMode extends Mode {
  constructor(
    key,
    label,
    hint,
    theme,
    { low, high, log = false, neutral = null, ofNode = null, column = null, ticks, single = false },
  ) {
    super(key, label, hint, theme);
    Object.assign(this, { low, high, log, neutral, ofNode, column, ticks, single });
  }

  table() {
    return [...this.ramp(), NEUTRAL[this.theme.name]];
  }

  shade(value) {
    if (value === this.neutral) return SHADES;
    const scale = this.log ? Math.log : (one) => one;
    const [low, high] = [scale(this.low), scale(this.high)];
    const share = high > low ? (scale(value) - low) / (high - low) : 1;
    return Math.round(Math.max(0, Math.min(1, share)) * (SHADES - 1));
  }
}

// A mode by the state of chunks at the current op of the schedule.
class StateMode extends Mode {
  constructor(theme, schedule) {
    super("state", "Schedule", "where every token stands at the current op", theme);
    Object.assign(this, { schedule, column: "owner" });
  }

  table() {
    return STATES.map((state) => state[this.theme.name]);
  }

  shade(part) {
    return part < 0 ? 0 : this.schedule.states[part];
  }
}

// A mode by the cause that a token is run again for.
class CauseMode extends Mode {
  constructor(theme, names) {
    super("causes", "Lost", "tokens that are run again, by what keeps them from being shared", theme);
    Object.assign(this, { names, column: "cause" });
  }

  table() {
    return [NEUTRAL[this.theme.name], ...CAUSES[this.theme.name]];
  }

  shade(cause) {
    return Math.min(cause, CAUSES.light.length);
  }
}

// A mode by the rank that runs a token, in one tree over ranks.
class RankMode extends Mode {
  constructor(theme, { count, own }) {
    super("ranks", "Ranks", `which of ${number(count)} ranks runs a token; the schedule is that of rank ${own}`, theme);
    Object.assign(this, { count, own, column: "rank" });
  }

  // Hues a golden section apart, so that neighbours differ however many ranks there are.
  table() {
    const [middle, reach] = this.theme.name === "dark" ? [115, 75] : [160, 80];
    const channel = (rank, i) => Math.round(middle + reach * Math.cos(2 * Math.PI * (rank * 0.618034 + i / 3)));
    return Array.from({ length: this.count }, (_, rank) => `rgb(${[0, 1, 2].map((i) => channel(rank, i))})`);
  }

  shade(rank) {
    return rank;
  }
}

function modesOf(tree, schedule, theme) {
  const most = (name) => Math.max(1, bounds(tree[`${name}Value`])[1]);
  const times = most("forwards");
  const modes = [
    new RampMode("sharing", "Sharing", "sequences that share a segment", theme, {
      low: 1,
      high: Math.max(2, tree.maxThrough),
      log: true,
      ofNode: (node) => tree.through(node),
      ticks: ["1 sequence", number(tree.maxThrough)],
    }),
    new RampMode("recompute", "Recompute", "how often a token is run forward", theme, {
      low: 2,
      high: Math.max(3, times),
      neutral: 1,
      column: "forwards",
      ticks: ["once", "2×", `${times}×`].slice(0, Math.max(1, times)),
      single: times === 2,
    }),
  ];
  if (tree.trainedStart) {
    const high = most("trained");
    modes.push(
      new RampMode("loss", "Loss", "sequences that train on a token", theme, {
        low: 1,
        high: Math.max(2, high),
        log: true,
        neutral: 0,
        column: "trained",
        ticks: ["none", "1", number(high)],
        single: high === 1,
      }),
    );
  }
  if (tree.reward) {
    const [low, high] = tree.rewardRange;
    modes.push(
      new RampMode("reward", "Reward", "mean reward of the sequences through a segment", theme, {
        low,
        high,
        ofNode: (node) => tree.meanReward(node),
        ticks: [short(low), short(high)],
      }),
    );
  }
  const { losses, ranks } = tree.facts;
  if (ranks) modes.push(new RankMode(theme, ranks));
  if (losses?.length) modes.push(new CauseMode(theme, losses.filter(({ advice }) => advice).map(({ name }) => name)));
  modes.push(new StateMode(theme, schedule));
  return modes;
}

function short(value) {
  return d3.format(".3~g")(value);
}

function luminance(color) {
  const [red, green, blue] = rgbOf(color).map((one) => (one / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function rgbOf(color) {
  if (color.startsWith("#")) return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return color.match(/[\d.]+/g).map(Number);
}

function drawLegend(element, mode) {
  element.replaceChildren();
  element.title = mode.hint;
  const add = (html, parent = element) => parent.appendChild(Object.assign(document.createElement("span"), html));
  const swatch = (color, label) => {
    const span = add({});
    const box = span.appendChild(document.createElement("i"));
    box.style.background = color;
    span.append(label);
  };
  if (mode instanceof StateMode) {
    STATES.forEach((state, i) => mode.uses(i) && swatch(mode.colors[i], state.label));
    return;
  }
  if (mode instanceof CauseMode) {
    mode.names.forEach((name, i) => swatch(mode.colors[mode.shade(i + 1)], name));
    return;
  }
  if (mode instanceof RankMode) {
    const shown = mode.count > MOST_RANKS ? [...new Set([0, mode.own, mode.count - 1])] : mode.colors.keys();
    for (const rank of shown) swatch(mode.colors[rank], rank === mode.own ? `rank ${rank}, this one` : `rank ${rank}`);
    return;
  }
  const ticks = [...mode.ticks];
  if (mode.neutral !== null) swatch(mode.colors[SHADES], ticks.shift());
  if (mode.single) swatch(mode.colors[mode.shade(mode.low)], ticks[0]);
  else if (ticks.length) {
    add({ textContent: ticks[0] });
    const canvas = element.appendChild(document.createElement("canvas"));
    [canvas.width, canvas.height] = [SHADES, 1];
    mode.colors.slice(0, SHADES).forEach((color, i) => {
      const context = canvas.getContext("2d");
      context.fillStyle = color;
      context.fillRect(i, 0, 1, 1);
    });
    if (ticks.length > 1) add({ textContent: ticks[1] });
  }
}
