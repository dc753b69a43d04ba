// Light and dark theme, and the colours of items drawn on canvases.

const KIND_COLORS = {
  anchor: { light: "#0c8599", dark: "#3bc9db" },
  forward: { light: "#2563c9", dark: "#5c9dff" },
  restore: { light: "#7048c6", dark: "#a98bff" },
  pop: { light: "#8792a3", dark: "#7b8798" },
  attach: { light: "#2b8a3e", dark: "#69db7c" },
  backward: { light: "#d9660b", dark: "#ff9f43" },
};

class Theme {
  constructor(onChange) {
    this.onChange = onChange;
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.system.addEventListener("change", () => this.apply());
    this.apply();
  }

  // The theme chosen on this page before; files from disk may have no storage.
  get chosen() {
    try {
      return localStorage.getItem("dta-theme");
    } catch {
      return null;
    }
  }

  get isDark() {
    return (this.choice ?? this.chosen ?? (this.system.matches ? "dark" : "light")) === "dark";
  }

  toggle() {
    this.choice = this.isDark ? "light" : "dark";
    try {
      localStorage.setItem("dta-theme", this.choice);
    } catch {
      // kept only while the page is open
    }
    this.apply();
  }

  apply() {
    this.name = this.isDark ? "dark" : "light";
    document.documentElement.dataset.theme = this.name;
    const style = getComputedStyle(document.documentElement);
    for (const key of ["panel", "raised", "ink", "muted", "faint", "line", "accent"]) {
      this[key] = style.getPropertyValue(`--${key}`).trim();
    }
    this.kinds = Object.fromEntries(Object.entries(KIND_COLORS).map(([kind, both]) => [kind, both[this.name]]));
    this.onChange?.();
  }
}
